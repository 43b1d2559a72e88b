"""Two processes on this machine evaluate, sweep and meet unreadable images as one does.

They run one verb after the other, and each test looks at one of these.
"""

import json
import shutil

import pytest

from tests.evals.test_evaluate import LABELS, NAMES, PIXELS, sample_weights, write_folder
from tests.integration import commands
from tests.integration.commands import finish, pretraining, spoken, succeed
from tests.integration.launchers import explicit
from tests.integration.test_runs import write_damaged
from tests.tools.sweeps.small_suite import begun, words_of
from vit_jax.checkpoint import CheckpointReader
from vit_jax.weights.saving import OWN, save_weights

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("compiled_once")]


@pytest.fixture(scope="module")
def evaluation(tmp_path_factory):
    """A folder of eleven labelled images, and the words that evaluate weights on them."""
    folder = tmp_path_factory.mktemp("evaluation")
    data = write_folder(folder / "images", NAMES, LABELS[:11], PIXELS[:11])
    save_weights(sample_weights(), folder / "weights", OWN)

    return folder, ["evaluate", folder / "weights", f"--data={data}", "--global_batch=8"]


@pytest.fixture(scope="module")
def swept(tiny_run, tmp_path_factory):
    """Weights, and the workdir of an uninterrupted sweep of the verb vtab over one task."""
    folder = tmp_path_factory.mktemp("sweep") / "vtab"
    succeed(words_of(tiny_run.workdir, folder, tasks="bright"))

    return tiny_run.workdir, folder


@pytest.fixture(scope="module")
def damaged_words(data_dir, tmp_path_factory):
    """Words of a training on images of which some cannot be read, and its workdir."""
    folder = tmp_path_factory.mktemp("damaged")
    options = (
        "checkpoint.every=1 steps",
        "checkpoint.keep_latest=9",
        "schedule.warmup=1 steps",
        "total=4 steps",
    )
    options += (
        "sharding.parameters=fsdp",
        "sharding.num_model_shards=2",
        "model.dropout_fraction=0.1",
    )
    data = f"data=folder:{write_damaged(folder)}"

    return pretraining(
        data_dir,
        folder / "run",
        *options,
        "logging.every=1 steps",
        data,
    ), folder / "run"


@pytest.fixture(scope="module")
def in_two(evaluation, swept, damaged_words, tmp_path_factory):
    """What two processes of two devices print, verb after verb; the last ends them with an error."""
    folder, words = evaluation
    broken = folder / "broken"
    shutil.copytree(folder / "images", broken)
    (image,) = (broken / "test").rglob("000.png")
    image.write_bytes(b"")
    verbs = {
        "doctor": ["doctor", f"--workdir={tmp_path_factory.mktemp('doctor') / 'run'}"],
        "evaluate": [*words, f"--csv={folder / 'two'}.csv", f"--report={folder / 'two'}"],
        "knn": ["knn", *words[1:], *KNN, f"--cache={folder / 'cache'}"],
        "vtab": words_of(swept[0], folder / "vtab", tasks="bright"),
        "pretrain": damaged_words[0],
        "unreadable": [*words[:2], f"--data=folder:{broken}", words[3], "--max_unreadable=0"],
    }
    outcomes = commands.run_series(verbs.values(), explicit(2), devices=2)

    return dict(zip(verbs, outcomes, strict=True))


def counted(workdir):
    """Unreadable images by step, and which ones each process has met."""
    counts = [
        line["unreadable_images"]
        for line in commands.metrics(workdir)
        if "unreadable_images" in line
    ]
    return counts, CheckpointReader(workdir).metadata(4)["unreadable_records"]


def test_resumed_to_the_bit_where_each_goes_on_counting_its_own(in_two, damaged_words):
    """Resumed after two steps, when the second process has met an unreadable image that it will not meet again."""
    words, workdir = damaged_words
    counts = counted(workdir)
    losses = commands.losses(workdir)
    summary = commands.summary(workdir)

    for step in (3, 4):
        shutil.rmtree(workdir / "checkpoints" / f"{step}")

    outcomes = finish(commands.start_all(words, explicit(2), devices=2))

    assert [outcome.code for outcome in outcomes] == [0, 0], outcomes
    assert counts[0][-1] == len(counts[1][0])
    assert set(counts[1][0]) != set(counts[1][1])
    assert counted(workdir) == counts
    assert commands.losses(workdir) == losses

    found = commands.summary(workdir)
    for name in ("parameters_sha256", "test_loss", "test_accuracy"):
        assert found[name] == summary[name]


def test_doctor_examines_both_processes(in_two):
    first, _ = in_two["doctor"]
    lines = [line for line in spoken(first.out) if line.startswith(("good", "wrong"))]

    assert [line.split("  ")[0] for line in lines] == ["good"] * 9
    assert "4 x cpu in 2 process(es), 2 of each" in first.out
    assert "all-reduce        4 MiB of each of 4 devices" in first.out
    assert "checkpoint        16 MiB written" in first.out


FIGURES = (
    "weights",
    "data",
    "images",
    "accuracy",
    "top5_accuracy",
    "loss",
    "calibration_error",
    "most_confused",
)
KNN = ("--neighbours=1,3", "--json")


def figures(out):
    """Lines of the report; the transport writes lines of its own."""
    return [line for line in out.splitlines() if line.partition(" ")[0] in FIGURES]


def test_two_processes_evaluate_as_one(evaluation, in_two):
    folder, words = evaluation
    expected = figures(
        succeed([*map(str, words), f"--csv={folder / 'one'}.csv", f"--report={folder / 'one'}"])
    )
    data = f"data{'':<15}test of folder:{folder}/images, 11 of 11 images"
    images = f"images{'':<13}11"

    assert expected[1:3] == [data, images]

    first, second = in_two["evaluate"]

    assert figures(first.out) == expected
    assert figures(second.out) == []
    assert second.err == ""
    assert (folder / "two.csv").read_text() == (folder / "one.csv").read_text()

    for name in ("classes.csv", "confusion.csv", "confusion.png"):
        assert (folder / "two" / name).read_bytes() == (folder / "one" / name).read_bytes(), name

    lines = [(folder / number / "images.csv").read_text().splitlines() for number in ("one", "two")]
    one, two = ([line.split(",") for line in of_run] for of_run in lines)

    assert [row[:3] for row in two] == [row[:3] for row in one], (
        "every image, in the order of the data"
    )
    assert [float(row[3]) for row in two[1:]] == pytest.approx(
        [float(row[3]) for row in one[1:]],
        abs=1e-5,
    )
    assert len(two) == 12


def test_two_processes_fit_on_features_as_one(evaluation, in_two):
    folder, words = evaluation
    expected = succeed(["knn", *map(str, words[1:]), *KNN, "--cache=none"]).splitlines()
    first, second = in_two["knn"]

    assert spoken(first.out)[-len(expected) :] == expected
    assert spoken(second.out) == []
    assert len(list((folder / "cache").iterdir())) == 2  # the features of each split, once


def test_two_processes_stop_together_at_an_image_of_one(in_two):
    outcomes = in_two["unreadable"]

    assert [outcome.code for outcome in outcomes] == [2, 2], outcomes
    assert [figures(outcome.out) for outcome in outcomes] == [[], []]
    assert all("--max_unreadable=0: 1 images cannot be read" in outcome.err for outcome in outcomes)
    # The process that met it names it, in its log at least: the other's error, without the name,
    # may end it first.
    assert any("000.png" in outcome.err for outcome in outcomes)

    own = [outcome.err for outcome in outcomes if " of 2 (" not in outcome.err]

    assert sum("000.png. Replace" in err for err in own) <= 1


def accuracies(folder):
    return [
        (t["task"], t["test_accuracy"])
        for t in json.loads((folder / "results.json").read_text())["tasks"]
    ]


def test_two_processes_make_one_sweep(evaluation, swept, in_two):
    (first, second), folder = in_two["vtab"], evaluation[0] / "vtab"

    assert spoken(second.out) == []
    assert len(begun(first.out)) == 3
    assert (folder / "results.md").read_text() in first.out
    assert accuracies(folder) == accuracies(swept[1])
