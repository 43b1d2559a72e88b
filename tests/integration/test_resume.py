"""A run that is killed at any moment and started again ends with the same bytes as one that was left alone."""

import signal

import pytest

from tests.integration import commands
from vit_jax.checkpoint import CheckpointReader

SHARDED = ("sharding.parameters=fsdp", "polyak.factor=0.99", "model.dropout_fraction=0.1")
LENGTH = (
    "total=30 steps",
    "checkpoint.every=10 steps",
    "evaluation.every=15 steps",
    "logging.every=5 steps",
)
OPTIONS = (*SHARDED, *LENGTH, "optimizer.first_moment_dtype=bfloat16")
pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("compiled_once")]


@pytest.fixture(scope="module")
def uninterrupted(data_dir, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("uninterrupted")
    commands.succeed(commands.pretraining(data_dir, workdir, *OPTIONS))

    return workdir


def test_killed_again_and_again(uninterrupted, data_dir, tmp_path):
    """While its first checkpoint is written, and by SIGTERM, which saves; then it runs to its end."""
    words = commands.pretraining(data_dir, tmp_path, *OPTIONS)

    process = commands.start_held(words, tmp_path)
    commands.wait_until(lambda: commands.checkpoints(tmp_path), process)
    commands.kill(process)

    process = commands.start_held(words, tmp_path)
    commands.wait_for_new_checkpoint(tmp_path, process)
    process.send_signal(signal.SIGTERM)
    (stopped,) = commands.finish([process])
    stopped_at = commands.checkpoint_steps(tmp_path)[-1]

    assert stopped.code == 75, stopped.err
    assert f"stopped after step {stopped_at} of 30, which is saved" in stopped.err

    out = commands.succeed(words)

    assert f"continuing from this workdir's checkpoint of step {stopped_at}" in out

    found = commands.summary(tmp_path)
    expected = commands.summary(uninterrupted)

    for name in ("parameters_sha256", "test_loss", "test_accuracy"):
        assert found[name] == expected[name], name

    assert commands.curve(tmp_path) == commands.curve(uninterrupted), (
        "metrics.jsonl reads as if it never stopped"
    )


def test_a_finished_run_is_only_evaluated_again(uninterrupted, data_dir):
    before = commands.summary(uninterrupted)
    commands.succeed(commands.pretraining(data_dir, uninterrupted, *OPTIONS))
    after = commands.summary(uninterrupted)
    own = CheckpointReader(uninterrupted)

    assert after["wall_seconds"] > own.metadata(own.all_steps()[-1])["wall_seconds"], (
        "that of training counts"
    )

    for name in (
        "parameters_sha256",
        "test_loss",
        "test_accuracy",
        "train_loss",
        "images_per_second",
        "steps",
    ):
        assert after[name] == before[name]
