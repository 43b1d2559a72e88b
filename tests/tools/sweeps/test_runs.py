"""The verb study: two runs that really train, and runs that only pretend, for what is done by whom and what is left."""

import json
import re
import shutil

import pytest

from tests.integration import commands
from tests.integration.commands import rejected, run, succeed
from tests.tiny import NETWORK, flags
from vit_jax.cli import VERBS
from vit_jax.tools.sweeps.catalogue import STUDIES
from vit_jax.train.lifecycle.interruption import Interrupted

pytestmark = pytest.mark.usefixtures("compiled_once")

SHORT = flags(*NETWORK, "total=4 steps", "schedule.warmup=1 steps", "global_batch=16")


def words_of(folder, *more, name="pooling"):
    return ["study", name, "--config=digits_studies:ViT-16", f"--workdir={folder}", *SHORT, *more]


POOLS = ["--learning_rates=0.01"]
NAMES = [f"pool={pool},learning_rate=0.01" for pool in ("token", "gap")]


def rows(folder):
    return json.loads((folder / "study.json").read_text())["rows"]


@pytest.fixture(scope="module")
def studied(tmp_path_factory):
    """A finished study, of which each of two machines did its share, and what they printed."""
    folder = tmp_path_factory.mktemp("study") / "pooling"
    return folder, [
        succeed(words_of(folder, *POOLS, f"--index={index}", "--count=2")) for index in range(2)
    ]


@pytest.mark.slow
def test_each_machine_does_its_share_and_the_last_collects_all(studied):
    folder, (first, second) = studied

    assert re.findall(r"^run (\d of \d): (.*)$", first, re.MULTILINE) == [("1 of 1", NAMES[0])]
    assert f"Not ended: {NAMES[1]}." in first
    assert re.findall(r"^run (\d of \d): (.*)$", second, re.MULTILINE) == [("1 of 1", NAMES[1])]
    assert second.endswith((folder / "study.md").read_text())
    assert "Not ended" not in second

    for row, name in zip(rows(folder), NAMES, strict=True):
        summary = commands.summary(folder / "runs" / name)
        assert (row["test_accuracy"], row["folders"]) == (
            summary["test_accuracy"],
            [f"runs/{name}"],
        )


@pytest.mark.slow
def test_the_same_command_again_trains_nothing_and_another_config_is_refused(studied):
    folder, _ = studied
    before = {path: path.stat().st_mtime_ns for path in folder.glob("runs/*/*.json*")}

    assert "run 1" not in succeed(words_of(folder, *POOLS))
    assert {path: path.stat().st_mtime_ns for path in folder.glob("runs/*/*.json*")} == before

    outcome = run(words_of(folder, *POOLS, "--config.optimizer.weight_decay=0.5"))
    assert outcome.code == 2
    assert re.search(
        r"pool=token.*: workdir .* another config:\n  optimizer.weight_decay: there", outcome.err
    )


@pytest.mark.slow
def test_killed_in_its_second_run_it_comes_to_the_same_results(studied, tmp_path):
    """What a kill leaves: no summary of the run in progress, nor its last checkpoint, nor the results."""
    folder = tmp_path / "pooling"
    shutil.copytree(studied[0], folder)
    unfinished = folder / "runs" / NAMES[1]
    (unfinished / "summary.json").unlink()
    shutil.rmtree(unfinished / "checkpoints" / "4")
    for file in folder.glob("study.*"):
        file.unlink()

    out = succeed(words_of(folder, *POOLS))

    assert re.findall(r"^run (\d of \d): (.*)$", out, re.MULTILINE) == [("2 of 2", NAMES[1])]

    resumed, expected = (
        commands.summary(place / "runs" / NAMES[1]) for place in (folder, studied[0])
    )
    assert resumed["parameters_sha256"] == expected["parameters_sha256"]
    assert [row["test_accuracy"] for row in rows(folder)] == [
        row["test_accuracy"] for row in rows(studied[0])
    ]


def test_an_interrupted_study_goes_on_and_what_diverged_does_not(pretended, tmp_path):
    ran, special = pretended
    special |= {
        NAMES[0]: FloatingPointError("Step 3: the loss is nan"),
        NAMES[1]: Interrupted("stopped after step 2"),
    }
    outcome = run(words_of(tmp_path, *POOLS))

    assert (outcome.code, outcome.err) == (75, "vit-jax: stopped after step 2\n")
    assert (
        f"Not ended: {NAMES[1]}." in (tmp_path / "study.md").read_text()
    )  # what there is, is there at once

    plan = succeed(words_of(tmp_path, *POOLS, "--dry-run"))
    assert re.findall(r"(diverged|interrupted|new|ended) *\|", plan) == ["diverged", "interrupted"]
    assert "Left: 1 of 2 runs" in plan
    assert "1 of 1, 1 diverged" in succeed(words_of(tmp_path, *POOLS))
    assert ran == [(NAMES[1], None)]


def test_a_config_that_cannot_be_is_refused_before_the_first_run(pretended, tmp_path):
    err = rejected(words_of(tmp_path, *POOLS, "--seeds=0,-1"))

    assert re.search(r"seed=-1: config.seed=-1: must lie in \[0, 4294967295\]", err)
    assert pretended[0] == []


@pytest.mark.parametrize("more", [[], ["--dry-run"]])
@pytest.mark.parametrize("measure", ["test_acuracy", "fewshot_5shot_accuracy"])
def test_a_measure_that_no_run_has_is_refused_before_the_first_run(
    pretended, tmp_path, measure, more
):
    err = rejected(words_of(tmp_path / "s", *POOLS, f"--measures=test_accuracy,{measure}", *more))

    assert (
        f"will have no {measure} (--measures=); it will have test_accuracy, test_loss, exaflops"
        in err
    )
    assert not list(tmp_path.iterdir())


def test_dry_run_plans_by_arithmetic(tmp_path):
    words = [
        "study",
        "data_size",
        "--config=pretrain_jft",
        f"--workdir={tmp_path}",
        "--dry-run",
        "--models=ViT-B/32",
    ]
    plan = succeed([*words, "--topology=v5e:16x16", "--index=1", "--count=2"])
    lines = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in plan.splitlines()
        if line.startswith("|")
    ]

    assert lines[0] == ["run", "this machine", "state", "steps", "exaFLOPs", "hours", "chip-hours"]
    assert [line[1] for line in lines[2:]] == ["no", "yes", "no", "yes"]
    assert {(line[3], line[4]) for line in lines[2:]} == {
        ("517,822", "56.3")
    }  # 3 x 8.8 GFLOPs x 7 x 303 million
    assert float(lines[2][6]) == pytest.approx(256 * float(lines[2][5]), rel=0.01)
    assert re.search(
        r"Left: 4 of 4 runs, 225 exaFLOPs; on v5e:16x16 .* hours one after the other", plan
    )
    assert not list(tmp_path.iterdir())

    short = succeed([*words, "--num_examples=100000000", "--examples=100000000"])
    assert "hours" not in short
    assert " 170,898 |" in short


def test_every_axis_is_an_option():
    assert {axis.option for study in STUDIES.values() for axis in study.all_axes} <= {
        *VERBS["study"].flags
    }


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["study", "size", "--config=digits_studies"],
            "NAME=size: must be one of data_size, scaling",
        ),
        (
            ["study", "scaling", "--config=digits_studies", "--topology=v5e:2x2"],
            "no effect on scaling without --dry",
        ),
        (
            ["study", "scaling", "--config=digits_studies", "--num_classes=3"],
            "no effect without --dry_run",
        ),
        (
            ["study", "shape", "--config=digits_studies", "--paper"],
            "no effect on shape, only on scaling",
        ),
        (
            ["study", "positions", "--config=digits_studies", "--positions=,"],
            "--positions=,: must have a value",
        ),
        (
            ["study", "shape", "--config=digits_studies", "--index=2", "--count=2"],
            "must lie in [0, 2)",
        ),
    ],
)
def test_mistakes(words, message, tmp_path):
    err = rejected([*words, f"--workdir={tmp_path}"])
    assert message in err
