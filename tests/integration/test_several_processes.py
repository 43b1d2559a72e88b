"""Several processes on this machine train and evaluate as one does; their checkpoints continue on any layout."""

import shutil

import pytest

from tests.inference.test_evaluate import LABELS, NAMES, PIXELS, sample_weights, write_folder
from tests.integration import commands
from tests.integration.commands import finish, pretraining, succeed
from tests.integration.launchers import explicit
from vit_jax.weights.saving import OWN, save_weights

pytestmark = [pytest.mark.processes, pytest.mark.slow]
OPTIONS = ("total=12 steps", "checkpoint.every=6 steps", "evaluation.every=12 steps", "logging.every=1 step")
OPTIONS += ("model.width=32", "model.num_heads=4", "polyak.factor=0.99", "checkpoint.keep_latest=5")
OPTIONS += ("evaluation.evaluators.few.kind=fewshot",)
SHARDED = ("sharding.parameters=fsdp", "sharding.num_model_shards=2", "sharding.num_replicas=2")


def train(words, num_processes):
    """What the first of these processes, of two devices each, prints."""
    outcomes = finish(commands.start_all(words, explicit(num_processes), devices=2))
    assert [outcome.code for outcome in outcomes] == [0] * num_processes, outcomes
    assert [commands.spoken(outcome.out) for outcome in outcomes[1:]] == [[]] * (num_processes - 1)
    return outcomes[0].out


@pytest.fixture(scope="module")
def four_processes(data_dir, tmp_path_factory):
    """The workdir of a complete run of 4 x 2 devices: two replicas of two data by two model shards."""
    workdir = tmp_path_factory.mktemp("four")
    out = train(pretraining(data_dir, workdir, *OPTIONS, *SHARDED), 4)
    assert "in 4 process(es), 4 images each, parameters fsdp (2 replica x 2 data x 2 model)" in out
    assert commands.summary(workdir)["num_processes"] == 4
    return workdir


@pytest.fixture
def half_done(four_processes, tmp_path):
    """The workdir as it was after step 6."""
    workdir = tmp_path / "run"
    shutil.copytree(four_processes, workdir)
    shutil.rmtree(workdir / "checkpoints" / "12")
    (workdir / "summary.json").unlink()
    assert commands.checkpoint_steps(workdir) == [6]
    return workdir


def assert_same_run(workdir, expected, steps):
    found, wanted = commands.losses(workdir), commands.losses(expected)
    assert [found[step] for step in steps] == pytest.approx([wanted[step] for step in steps], rel=1e-5)
    summary, wanted = commands.summary(workdir), commands.summary(expected)
    assert summary["test_loss"] == pytest.approx(wanted["test_loss"], rel=1e-4)
    assert summary["test_accuracy"] == wanted["test_accuracy"]
    assert summary["few_5shot_accuracy"] == pytest.approx(wanted["few_5shot_accuracy"], abs=0.01)  # of 360 images


def test_four_processes_train_as_one(data_dir, four_processes, tmp_path):
    succeed(pretraining(data_dir, tmp_path, *OPTIONS))
    assert_same_run(tmp_path, four_processes, range(1, 13))


def test_resumed_on_the_same_layout_to_the_bit(data_dir, four_processes, half_done):
    out = train(pretraining(data_dir, half_done, *OPTIONS, *SHARDED), 4)
    assert "checkpoint of step 6" in out
    assert commands.losses(half_done) == commands.losses(four_processes)
    found, expected = commands.summary(half_done), commands.summary(four_processes)
    for name in ("parameters_sha256", "test_loss", "test_accuracy"):
        assert found[name] == expected[name]


@pytest.mark.parametrize(("num_processes", "sharding"), [(1, ()), (2, ("sharding.parameters=fsdp",))])
def test_resumed_on_another_layout(data_dir, four_processes, half_done, num_processes, sharding):
    words = pretraining(data_dir, half_done, *OPTIONS, *sharding)
    out = succeed(words) if num_processes == 1 else train(words, num_processes)
    assert "checkpoint of step 6" in out
    assert_same_run(half_done, four_processes, range(7, 13))


FIGURES = ("weights", "data", "images", "top1_accuracy", "top5_accuracy", "loss", "calibration_error", "most_confused")


@pytest.fixture
def evaluation(tmp_path):
    """A folder of eleven labelled images, and the words that evaluate weights on them."""
    data = write_folder(tmp_path / "images", NAMES, LABELS[:11], PIXELS[:11])
    save_weights(sample_weights(), tmp_path / "weights", OWN)
    return tmp_path, ["evaluate", str(tmp_path / "weights"), f"--data={data}", "--global_batch=8"]


def figures(out):
    """Lines of the report; the transport writes lines of its own."""
    return [line for line in out.splitlines() if line.partition(" ")[0] in FIGURES]


def test_two_processes_evaluate_as_one(evaluation):
    folder, words = evaluation
    options = {name: [f"--csv={folder / name}.csv", f"--report={folder / name}"] for name in ("one", "two")}
    expected = figures(succeed([*words, *options["one"]]))
    data, images = f"data{'':<15}test of folder:{folder}/images, 11 of 11 images", f"images{'':<13}11"
    assert expected[1:3] == [data, images]
    first, second = finish(commands.start_all([*words, *options["two"]], explicit(2), devices=2))
    assert (first.code, second.code) == (0, 0), (first, second)
    assert (figures(first.out), figures(second.out)) == (expected, [])
    assert second.err == ""
    assert (folder / "two.csv").read_text() == (folder / "one.csv").read_text()
    for name in ("classes.csv", "confusion.csv", "confusion.png"):
        assert (folder / "two" / name).read_bytes() == (folder / "one" / name).read_bytes(), name
    one, two = ([line.split(",") for line in (folder / n / "images.csv").read_text().splitlines()] for n in options)
    assert [row[:3] for row in two] == [row[:3] for row in one], "every image, in the order of the data"
    assert [float(row[3]) for row in two[1:]] == pytest.approx([float(row[3]) for row in one[1:]], abs=1e-5)
    assert len(two) == 12


def test_two_processes_fit_on_features_as_one(evaluation):
    folder, (_, weights, data, batch) = evaluation
    words = ["knn", weights, data, batch, "--neighbours=1,3", "--json"]
    expected = succeed([*words, "--cache=none"])
    first, second = finish(commands.start_all([*words, f"--cache={folder / 'cache'}"], explicit(2), devices=2))
    assert (first.code, second.code) == (0, 0), (first, second)
    assert (commands.spoken(first.out)[-len(expected.splitlines()) :], commands.spoken(second.out)) == (
        expected.splitlines(),
        [],
    )
    assert len(list((folder / "cache").iterdir())) == 2  # the features of each split, once


def test_two_processes_stop_together_at_an_image_of_one(evaluation):
    folder, words = evaluation
    (damaged,) = (folder / "images" / "test").rglob("000.png")
    damaged.write_bytes(b"")
    outcomes = finish(commands.start_all([*words, "--max_unreadable=0"], explicit(2), devices=2))
    assert [outcome.code for outcome in outcomes] == [2, 2], outcomes
    assert [figures(outcome.out) for outcome in outcomes] == [[], []]
    assert all("1 images cannot be read, and --max_unreadable is 0" in outcome.err for outcome in outcomes)
    # The process that met it names it, in its log at least: the other's error, without the name, may end it first.
    assert any("000.png" in outcome.err for outcome in outcomes)
    own = [outcome.err for outcome in outcomes if " of 2 (" not in outcome.err]
    assert sum("000.png. Replace" in err for err in own) <= 1
