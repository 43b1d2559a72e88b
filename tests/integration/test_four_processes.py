"""Four processes on this machine train as one does; their checkpoints continue on any layout."""

import shutil

import pytest

from tests.integration import commands
from tests.integration.commands import finish, pretraining, spoken, succeed
from tests.integration.launchers import explicit
from tests.tiny import MIXUP

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("compiled_once")]
OPTIONS = (
    MIXUP,
    "total=12 steps",
    "checkpoint.every=6 steps",
    "evaluation.every=12 steps",
    "logging.every=1 step",
    "model.depth=1",
    "model.width=32",
    "model.num_heads=4",
    "polyak.factor=0.99",
    "checkpoint.keep_latest=5",
    "evaluation.evaluators.few.kind=fewshot",
)
SHARDED = ("sharding.parameters=fsdp", "sharding.num_model_shards=2", "sharding.num_replicas=2")


def train(words, num_processes):
    """Run processes of two devices each; return the output of the first.

    The others print nothing.
    """
    outcomes = finish(commands.start_all(words, explicit(num_processes), devices=2))

    for outcome in outcomes:
        assert outcome.code == 0, outcomes
    first, *others = outcomes
    for outcome in others:
        assert spoken(outcome.out) == []
    return first.out


@pytest.fixture(scope="module")
def four_processes(data_dir, tmp_path_factory):
    """The workdir of a run of 4 x 2 devices: two replicas of two data by two model shards."""
    workdir = tmp_path_factory.mktemp("four")

    out = train(pretraining(data_dir, workdir, *OPTIONS, *SHARDED), 4)

    assert "in 4 process(es), 4 images each, parameters fsdp (2 replica x 2 data x 2 model)" in out
    assert commands.summary(workdir)["num_processes"] == 4
    return workdir


def assert_same_run(workdir, expected_workdir, steps):
    """Compare losses and results; few-shot accuracies are of 360 images."""
    losses = commands.losses(workdir)
    expected_losses = commands.losses(expected_workdir)
    for step in steps:
        assert losses[step] == pytest.approx(expected_losses[step], rel=1e-5)

    summary = commands.summary(workdir)
    expected = commands.summary(expected_workdir)
    accuracy = summary["few_5shot_accuracy"]
    assert summary["test_loss"] == pytest.approx(expected["test_loss"], rel=1e-4)
    assert summary["test_accuracy"] == expected["test_accuracy"]
    assert accuracy == pytest.approx(expected["few_5shot_accuracy"], abs=0.01)


@pytest.mark.newest
def test_four_processes_train_as_one(data_dir, four_processes, tmp_path):
    succeed(pretraining(data_dir, tmp_path, *OPTIONS))

    assert_same_run(tmp_path, four_processes, range(1, 13))


@pytest.fixture
def half_done(four_processes, tmp_path):
    """A copy of the run as it was after step 6."""
    workdir = tmp_path / "run"
    shutil.copytree(four_processes, workdir)
    shutil.rmtree(workdir / "checkpoints" / "12")
    (workdir / "summary.json").unlink()

    assert commands.checkpoint_steps(workdir) == [6]
    return workdir


def test_resumed_in_one_process(data_dir, four_processes, half_done):
    out = succeed(pretraining(data_dir, half_done, *OPTIONS))

    assert "checkpoint of step 6" in out
    assert_same_run(half_done, four_processes, range(7, 13))


def test_resumed_in_two_processes(data_dir, four_processes, half_done):
    out = train(
        pretraining(
            data_dir,
            half_done,
            *OPTIONS,
            "sharding.parameters=fsdp",
        ),
        2,
    )

    assert "checkpoint of step 6" in out
    assert_same_run(half_done, four_processes, range(7, 13))
