"""Two processes on this machine evaluate, sweep and meet unreadable images as one does.

They run one verb after the other, and each test examines the output of one of these.
"""

import json
import shutil

import pytest

from tests.columns import list_column
from tests.evals.test_evaluate import LABELS, NAMES, PIXELS, sample_weights, write_folder
from tests.integration import commands
from tests.integration.commands import finish, pretraining, spoken, succeed
from tests.integration.launchers import explicit
from tests.integration.test_runs import write_damaged
from tests.tools.sweeps.small_suite import build_words, read_begun
from vit_jax.checkpoint import CheckpointReader
from vit_jax.weights.saving import OWN, save_weights

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("compiled_once")]


@pytest.fixture(scope="module")
def evaluation(tmp_path_factory):
    """A folder of eleven labelled images, and the words that evaluate weights on them."""
    folder = tmp_path_factory.mktemp("evaluation")
    data = write_folder(folder / "images", NAMES, LABELS[:11], PIXELS[:11])
    weights = folder / "weights"
    save_weights(sample_weights(), weights, OWN)

    return folder, ["evaluate", str(weights), f"--data={data}", "--global_batch=8"]


@pytest.fixture(scope="module")
def swept(tiny_run, tmp_path_factory):
    """Weights, and the workdir of an uninterrupted sweep of the verb vtab over one task."""
    folder = tmp_path_factory.mktemp("sweep") / "vtab"
    succeed(build_words(tiny_run.workdir, folder, tasks="bright"))

    return tiny_run.workdir, folder


@pytest.fixture(scope="module")
def damaged_words(data_dir, tmp_path_factory):
    """The words of a training with unreadable images, and its workdir."""
    folder = tmp_path_factory.mktemp("damaged")
    words = pretraining(
        data_dir,
        folder / "run",
        "checkpoint.every=1 steps",
        "checkpoint.keep_latest=9",
        "schedule.warmup=1 steps",
        "total=4 steps",
        "sharding.parameters=fsdp",
        "sharding.num_model_shards=2",
        "model.dropout_fraction=0.1",
        "logging.every=1 steps",
        f"data=folder:{write_damaged(folder)}",
    )

    return words, folder / "run"


@pytest.fixture(scope="module")
def in_two(evaluation, swept, damaged_words, tmp_path_factory):
    """Outcomes of two processes of two devices, verb after verb.

    The last verb ends them with an error.
    """
    folder, words = evaluation
    weights, _ = swept
    pretrain_words, _ = damaged_words
    broken = folder / "broken"
    shutil.copytree(folder / "images", broken)
    (image,) = (broken / "test").rglob("000.png")
    image.write_bytes(b"")
    verb, model, _, batch = words

    verbs = {
        "doctor": ["doctor", f"--workdir={tmp_path_factory.mktemp('doctor') / 'run'}"],
        "evaluate": [*words, f"--csv={folder / 'two'}.csv", f"--report={folder / 'two'}"],
        "knn": ["knn", *words[1:], *KNN, f"--cache={folder / 'cache'}"],
        "vtab": build_words(weights, folder / "vtab", tasks="bright"),
        "pretrain": pretrain_words,
        "unreadable": [verb, model, f"--data=folder:{broken}", batch, "--max_unreadable=0"],
    }
    outcomes = commands.run_series(verbs.values(), explicit(2), devices=2)

    return dict(zip(verbs, outcomes, strict=True))


def read_counts(workdir):
    """Return the numbers of unreadable images by step, and the records of each process."""
    counts = []
    for line in commands.metrics(workdir):
        if "unreadable_images" in line:
            counts.append(line["unreadable_images"])
    records = CheckpointReader(workdir).metadata(4)["unreadable_records"]
    return counts, records


def test_resumed_runs_are_equal_to_the_bit_and_go_on_counting(in_two, damaged_words):
    """Two steps are resumed.

    The second process has met an unreadable image before, which it will not meet again.
    """
    words, workdir = damaged_words
    counts, records = read_counts(workdir)
    losses = commands.losses(workdir)
    summary = commands.summary(workdir)
    for step in (3, 4):
        shutil.rmtree(workdir / "checkpoints" / f"{step}")

    outcomes = finish(commands.start_all(words, explicit(2), devices=2))

    assert list_column(outcomes, "code") == [0, 0], outcomes
    assert counts[-1] == len(records[0])
    assert set(records[0]) != set(records[1])
    assert read_counts(workdir) == (counts, records)
    assert commands.losses(workdir) == losses

    found = commands.summary(workdir)
    for name in ("parameters_sha256", "test_loss", "test_accuracy"):
        assert found[name] == summary[name]


def test_doctor_examines_both_processes(in_two):
    first, _ = in_two["doctor"]

    verdicts = []
    for line in spoken(first.out):
        if line.startswith(("good", "wrong")):
            verdict, *_ = line.split("  ")
            verdicts.append(verdict)

    assert verdicts == ["good"] * 9
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


def list_figures(out):
    """Return the lines of the report; the transport writes further lines."""
    return [line for line in out.splitlines() if line.partition(" ")[0] in FIGURES]


@pytest.fixture(scope="module")
def in_one(evaluation):
    """The report of one process that evaluates the images."""
    folder, words = evaluation
    return succeed([*words, f"--csv={folder / 'one'}.csv", f"--report={folder / 'one'}"])


def test_two_processes_evaluate_as_one(evaluation, in_one, in_two):
    folder, _ = evaluation
    first, second = in_two["evaluate"]

    expected = list_figures(in_one)
    data = f"data{'':<15}test of folder:{folder}/images, 11 of 11 images"
    images = f"images{'':<13}11"
    assert expected[1:3] == [data, images]

    assert list_figures(first.out) == expected
    assert list_figures(second.out) == []
    assert second.err == ""


def read_rows(folder):
    lines = (folder / "images.csv").read_text().splitlines()
    return [line.split(",") for line in lines]


@pytest.mark.usefixtures("in_one", "in_two")
def test_two_processes_write_the_files_of_one(evaluation):
    """Every image has its row, in the order of the data; probabilities agree to five digits."""
    folder, _ = evaluation

    assert (folder / "two.csv").read_text() == (folder / "one.csv").read_text()
    for name in ("classes.csv", "confusion.csv", "confusion.png"):
        assert (folder / "two" / name).read_bytes() == (folder / "one" / name).read_bytes(), name

    rows = read_rows(folder / "two")
    expected_rows = read_rows(folder / "one")
    assert len(rows) == 12
    assert [row[:3] for row in rows] == [row[:3] for row in expected_rows]

    probabilities = [float(row[3]) for row in rows[1:]]
    expected = [float(row[3]) for row in expected_rows[1:]]
    assert probabilities == pytest.approx(expected, abs=1e-5)


def test_two_processes_fit_on_features_as_one(evaluation, in_two):
    """The features of each split are kept once."""
    folder, words = evaluation
    first, second = in_two["knn"]

    expected = succeed(["knn", *words[1:], *KNN, "--cache=none"]).splitlines()

    assert spoken(first.out)[-len(expected) :] == expected
    assert spoken(second.out) == []
    assert len(list((folder / "cache").iterdir())) == 2


def test_two_processes_stop_together_at_an_image_of_one(in_two):
    """The process that met the image names it, in its log at least.

    The error of the other process, without the name, may end it first.
    """
    outcomes = in_two["unreadable"]

    for outcome in outcomes:
        assert outcome.code == 2, outcomes
        assert list_figures(outcome.out) == []
        assert "--max_unreadable=0: 1 images cannot be read" in outcome.err
    assert any("000.png" in outcome.err for outcome in outcomes)

    num_local_errors = 0
    for outcome in outcomes:
        if " of 2 (" not in outcome.err:
            num_local_errors += "000.png. Replace" in outcome.err
    assert num_local_errors <= 1


def read_accuracies(folder):
    tasks = json.loads((folder / "results.json").read_text())["tasks"]
    return [(task["task"], task["test_accuracy"]) for task in tasks]


def test_two_processes_make_one_sweep(evaluation, swept, in_two):
    first, second = in_two["vtab"]
    folder = evaluation[0] / "vtab"

    assert spoken(second.out) == []
    assert len(read_begun(first.out)) == 3
    assert (folder / "results.md").read_text() in first.out
    assert read_accuracies(folder) == read_accuracies(swept[1])
