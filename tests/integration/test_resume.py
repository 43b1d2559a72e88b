"""A run that is killed at any moment and resumed ends with the bytes of an undisturbed one."""

import signal

import pytest

from tests.integration import commands
from tests.tiny import MIXUP
from vit_jax.checkpoint import CheckpointReader

SHARDED = ("sharding.parameters=fsdp", "polyak.factor=0.99", "model.dropout_fraction=0.1")
LENGTH = (
    "total=30 steps",
    "checkpoint.every=10 steps",
    "evaluation.every=15 steps",
    "logging.every=5 steps",
)
OPTIONS = (*SHARDED, *LENGTH, MIXUP, "optimizer.first_moment_dtype=bfloat16")
pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("compiled_once")]


@pytest.fixture(scope="module")
def uninterrupted(data_dir, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("uninterrupted")
    commands.succeed(commands.pretraining(data_dir, workdir, *OPTIONS))
    return workdir


def test_killed_again_and_again(uninterrupted, data_dir, tmp_path):
    """A run is killed while it writes its first checkpoint, and later stopped by SIGTERM.

    SIGTERM saves the state. The metrics of the resumed run read as if it had never stopped.
    """
    words = commands.pretraining(data_dir, tmp_path, *OPTIONS)

    process = commands.start_held(words, tmp_path)
    commands.wait_until(lambda: commands.checkpoints(tmp_path), process)
    commands.kill(process)

    process = commands.start_held(words, tmp_path)
    commands.wait_for_new_checkpoint(tmp_path, process)
    process.send_signal(signal.SIGTERM)
    (stopped,) = commands.finish([process])
    last_step = commands.checkpoint_steps(tmp_path)[-1]
    assert stopped.code == 75, stopped.err
    assert f"stopped after step {last_step} of 30, which is saved" in stopped.err

    out = commands.succeed(words)
    assert f"continuing from this workdir's checkpoint of step {last_step}" in out

    found = commands.summary(tmp_path)
    expected = commands.summary(uninterrupted)
    for name in ("parameters_sha256", "test_loss", "test_accuracy"):
        assert found[name] == expected[name], name
    assert commands.curve(tmp_path) == commands.curve(uninterrupted)


def test_a_finished_run_is_only_evaluated_again(uninterrupted, data_dir):
    """The time of the new evaluation is added to the time of training."""
    before = commands.summary(uninterrupted)

    commands.succeed(commands.pretraining(data_dir, uninterrupted, *OPTIONS))

    after = commands.summary(uninterrupted)
    reader = CheckpointReader(uninterrupted)
    trained = reader.metadata(reader.all_steps()[-1])
    assert after["wall_seconds"] > trained["wall_seconds"]
    for name in (
        "parameters_sha256",
        "test_loss",
        "test_accuracy",
        "train_loss",
        "images_per_second",
        "steps",
    ):
        assert after[name] == before[name]
