"""The verb study: two runs that really train, and runs that only pretend, for tests of who runs
what.
"""

import json
import re
import shutil

import pytest

from tests.columns import list_column
from tests.integration import commands
from tests.integration.commands import rejected, run, succeed
from tests.tiny import NETWORK, flags
from vit_jax.cli import VERBS
from vit_jax.tools.sweeps.catalogue import STUDIES
from vit_jax.train.lifecycle.interruption import Interrupted

pytestmark = pytest.mark.usefixtures("compiled_once")

SHORT = flags(
    *NETWORK,
    "total=4 steps",
    "schedule.warmup=1 steps",
    "global_batch=16",
)


def build_words(folder, *more, name="pooling"):
    return [
        "study",
        name,
        "--config=digits_studies:ViT-16",
        f"--workdir={folder}",
        *SHORT,
        *more,
    ]


POOLS = ["--learning_rates=0.01"]
NAMES = [f"pool={pool},learning_rate=0.01" for pool in ("token", "gap")]


def read_rows(folder):
    return json.loads((folder / "study.json").read_text())["rows"]


def read_begun(out):
    return re.findall(r"^run (\d of \d): (.*)$", out, re.MULTILINE)


def read_times(folder):
    return {path: path.stat().st_mtime_ns for path in folder.glob("runs/*/*.json*")}


@pytest.fixture(scope="module")
def studied(tmp_path_factory):
    """A finished study, of which each of two machines did its share, and both outputs."""
    folder = tmp_path_factory.mktemp("study") / "pooling"
    first = succeed(build_words(folder, *POOLS, "--index=0", "--count=2"))
    second = succeed(build_words(folder, *POOLS, "--index=1", "--count=2"))
    return folder, [first, second]


@pytest.mark.slow
def test_each_machine_does_its_share_and_the_last_collects_all(studied):
    folder, (first, second) = studied

    assert read_begun(first) == [("1 of 1", NAMES[0])]
    assert f"Not ended: {NAMES[1]}." in first
    assert read_begun(second) == [("1 of 1", NAMES[1])]
    assert second.endswith((folder / "study.md").read_text())
    assert "Not ended" not in second

    for row, name in zip(read_rows(folder), NAMES, strict=True):
        summary = commands.summary(folder / "runs" / name)
        assert row["test_accuracy"] == summary["test_accuracy"]
        assert row["folders"] == [f"runs/{name}"]


@pytest.mark.slow
def test_the_same_command_again_trains_nothing(studied):
    folder, _ = studied
    before = read_times(folder)

    out = succeed(build_words(folder, *POOLS))

    assert read_begun(out) == []
    assert "run 1" not in out
    assert read_times(folder) == before


@pytest.mark.slow
def test_another_config_is_rejected(studied):
    folder, _ = studied
    message = r"pool=token.*: workdir .* another config:\n  optimizer.weight_decay: there"

    outcome = run(build_words(folder, *POOLS, "--config.optimizer.weight_decay=0.5"))

    assert outcome.code == 2
    assert re.search(message, outcome.err)


@pytest.mark.slow
def test_killed_in_its_second_run_it_comes_to_the_same_results(studied, tmp_path):
    """A kill leaves no summary of the run in progress, nor its last checkpoint, nor the results."""
    complete, _ = studied
    folder = tmp_path / "pooling"
    unfinished = folder / "runs" / NAMES[1]
    shutil.copytree(complete, folder)
    shutil.rmtree(unfinished / "checkpoints" / "4")
    (unfinished / "summary.json").unlink()
    for file in folder.glob("study.*"):
        file.unlink()

    out = succeed(build_words(folder, *POOLS))

    assert read_begun(out) == [("2 of 2", NAMES[1])]

    resumed = commands.summary(unfinished)
    expected = commands.summary(complete / "runs" / NAMES[1])
    assert resumed["parameters_sha256"] == expected["parameters_sha256"]
    for row, expected in zip(read_rows(folder), read_rows(complete), strict=True):
        assert row["test_accuracy"] == expected["test_accuracy"]


def test_an_interrupted_study_goes_on_and_what_diverged_does_not(pretended, tmp_path):
    ran, special = pretended
    special[NAMES[0]] = FloatingPointError("Step 3: the loss is nan")
    special[NAMES[1]] = Interrupted("stopped after step 2")
    words = build_words(tmp_path, *POOLS)

    outcome = run(words)
    assert outcome.code == 75
    assert outcome.err == "vit-jax: stopped after step 2\n"
    # Results are written after each run.
    assert f"Not ended: {NAMES[1]}." in (tmp_path / "study.md").read_text()

    plan = succeed([*words, "--dry-run"])
    states = re.findall(r"(diverged|interrupted|new|ended) *\|", plan)

    assert states == ["diverged", "interrupted"]
    assert "Left: 1 of 2 runs" in plan

    assert "1 of 1, 1 diverged" in succeed(words)
    assert ran == [(NAMES[1], None)]


def test_a_config_that_cannot_be_is_rejected_before_the_first_run(pretended, tmp_path):
    ran, _ = pretended
    err = rejected(build_words(tmp_path, *POOLS, "--seeds=0,-1"))

    assert re.search(r"seed=-1: config.seed=-1: must lie in \[0, 4294967295\]", err)
    assert ran == []


@pytest.mark.parametrize(
    "more",
    [
        [],
        ["--dry-run"],
    ],
    ids=["run", "dry run"],
)
@pytest.mark.parametrize("measure", ["test_acuracy", "fewshot_5shot_accuracy"])
def test_a_measure_that_no_run_has_is_rejected_before_the_first_run(
    pretended,
    tmp_path,
    measure,
    more,
):
    available = "it will have test_accuracy, test_loss, exaflops"
    err = rejected(
        build_words(
            tmp_path / "s",
            *POOLS,
            f"--measures=test_accuracy,{measure}",
            *more,
        )
    )

    assert f"will have no {measure} (--measures=); {available}" in err
    assert not list(tmp_path.iterdir())


def read_table(text):
    """Return the cells of each line of a table."""
    lines = []
    for line in text.splitlines():
        if line.startswith("|"):
            lines.append([cell.strip() for cell in line.split("|")[1:-1]])
    return lines


DATA_SIZE = [
    "study",
    "data_size",
    "--config=pretrain_jft",
    "--dry-run",
    "--models=ViT-B/32",
]


def test_dry_run_plans_by_arithmetic(tmp_path):
    machines = ["--topology=v5e:16x16", "--index=1", "--count=2"]
    plan = succeed([*DATA_SIZE, f"--workdir={tmp_path}", *machines])
    header, _, *lines = read_table(plan)
    total = r"Left: 4 of 4 runs, 225 exaFLOPs; on v5e:16x16 .* hours one after the other"

    assert header == [
        "run",
        "this machine",
        "state",
        "steps",
        "exaFLOPs",
        "hours",
        "chip-hours",
        "GiB a chip",
    ]
    assert list_column(lines, 1) == ["no", "yes", "no", "yes"]
    assert set(list_column(lines, 3)) == {"517,822"}
    # 3 x 8.8 GFLOPs x 7 x 303 million
    assert set(list_column(lines, 4)) == {"56.3"}
    hours = float(lines[0][5])
    chip_hours = float(lines[0][6])
    assert chip_hours == pytest.approx(256 * hours, rel=0.01)
    assert re.search(total, plan)
    assert "15.75 GiB usable of each" in plan
    assert 0 < float(lines[0][7]) < 15.75
    assert not list(tmp_path.iterdir())


def test_dry_run_of_fewer_examples_without_a_machine(tmp_path):
    sizes = ["--num_examples=100000000", "--examples=100000000"]
    plan = succeed([*DATA_SIZE, f"--workdir={tmp_path}", *sizes])

    assert "hours" not in plan
    assert " 170,898 |" in plan


def test_every_axis_is_an_option():
    flags = set(VERBS["study"].flags)
    for study in STUDIES.values():
        for axis in study.all_axes:
            assert axis.option in flags


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("size", [], "NAME=size: must be one of data_size, scaling"),
        ("scaling", ["--topology=v5e:2x2"], "no effect on scaling without --dry"),
        ("scaling", ["--num_classes=3"], "no effect without --dry_run"),
        ("shape", ["--paper"], "no effect on shape, only on scaling"),
        ("positions", ["--positions=,"], "--positions=,: must have a value"),
        ("shape", ["--index=2", "--count=2"], "must lie in [0, 2)"),
    ],
)
def test_mistakes(name, options, message, tmp_path):
    err = rejected(
        [
            "study",
            name,
            "--config=digits_studies",
            f"--workdir={tmp_path}",
            *options,
        ]
    )
    assert message in err
