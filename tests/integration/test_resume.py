"""A run killed at any moment and started again ends with the same bytes as one that was left alone."""

import random
import signal
import time

import pytest

from tests.integration import commands

LENGTH = ("total=120 steps", "checkpoint.every=15 steps", "evaluation.every=60 steps", "logging.every=10 steps")
OPTIONS = (*LENGTH, "polyak.factor=0.99", "model.dropout_fraction=0.1", "optimizer.first_moment_dtype=bfloat16")
LAYOUTS = {1: (), 8: ("sharding.parameters=fsdp",)}


@pytest.fixture(scope="module", params=LAYOUTS)
def uninterrupted(request, command, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("uninterrupted")
    result = command.run(workdir, *OPTIONS, *LAYOUTS[request.param], devices=request.param)
    assert result.returncode == 0, result.stderr
    return request.param, workdir


def test_killed_again_and_again(uninterrupted, command, tmp_path):
    devices, reference = uninterrupted
    rng = random.Random(devices)
    for when in ("while it starts", "after a checkpoint", "after a checkpoint", "after a checkpoint"):
        process = command.start(tmp_path, *OPTIONS, *LAYOUTS[devices], devices=devices)
        if when == "after a checkpoint":
            commands.wait_for_new_checkpoint(tmp_path, process)
        time.sleep(rng.uniform(0.0, 0.3 if when == "after a checkpoint" else 6.0))
        process.kill()
        process.communicate()
    result = command.run(tmp_path, *OPTIONS, *LAYOUTS[devices], devices=devices)
    assert result.returncode == 0, result.stderr
    assert "continuing from this workdir's checkpoint" in result.stdout
    assert commands.summary(tmp_path)["parameters_sha256"] == commands.summary(reference)["parameters_sha256"]
    assert commands.summary(tmp_path)["test_loss"] == commands.summary(reference)["test_loss"]

    def curve(workdir):
        return [(line["step"], line.get("train_loss"), line.get("test_loss")) for line in commands.metrics(workdir)]

    assert curve(tmp_path) == curve(reference), "metrics.jsonl must read as if nothing had happened"


def test_sigterm_saves_and_the_same_command_goes_on(uninterrupted, command, tmp_path):
    devices, reference = uninterrupted
    process = command.start(tmp_path, *OPTIONS, *LAYOUTS[devices], devices=devices)
    commands.wait_for_new_checkpoint(tmp_path, process)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 75, err
    stopped_at = commands.checkpoint_steps(tmp_path)[-1]
    assert f"stopped after step {stopped_at} of 120, which is saved" in err
    result = command.run(tmp_path, *OPTIONS, *LAYOUTS[devices], devices=devices)
    assert f"checkpoint of step {stopped_at}" in result.stdout
    assert commands.summary(tmp_path)["parameters_sha256"] == commands.summary(reference)["parameters_sha256"]


def test_a_finished_run_is_only_evaluated_again(uninterrupted, command):
    devices, reference = uninterrupted
    before = commands.summary(reference)
    result = command.run(reference, *OPTIONS, *LAYOUTS[devices], devices=devices)
    assert result.returncode == 0, result.stderr
    assert commands.summary(reference)["wall_seconds"] > before["wall_seconds"]
    after = commands.summary(reference)
    for name in ("parameters_sha256", "test_loss", "test_accuracy", "train_loss", "images_per_second", "steps"):
        assert after[name] == before[name]
