"""A run killed at any moment and started again ends with the same bytes as one that was left alone."""

import random
import signal
import time

import pytest

LENGTH = ("total=120 steps", "checkpoint.every=15 steps", "evaluation.every=60 steps", "logging.every=10 steps")
OPTIONS = (*LENGTH, "polyak.factor=0.99", "model.dropout_fraction=0.1", "optimizer.first_moment_dtype=bfloat16")
LAYOUTS = {1: (), 8: ("sharding.parameters=fsdp",)}


@pytest.fixture(scope="module", params=LAYOUTS)
def uninterrupted(request, command, outcome, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("uninterrupted")
    result = command.run(workdir, *OPTIONS, *LAYOUTS[request.param], devices=request.param)
    assert result.returncode == 0, result.stderr
    return request.param, workdir


def test_killed_again_and_again(uninterrupted, command, outcome, tmp_path):
    devices, reference = uninterrupted
    rng, kills = random.Random(devices), 0
    while True:
        process = command.start(tmp_path, *OPTIONS, *LAYOUTS[devices], devices=devices)
        before = outcome.checkpoint_steps(tmp_path)
        if kills < 3:
            outcome.wait_for(lambda: outcome.checkpoint_steps(tmp_path) != before, process)
            time.sleep(rng.uniform(0.0, 0.3))
            process.kill()
            process.communicate()
            kills += 1
            continue
        out, err = process.communicate(timeout=300)
        assert process.returncode == 0, err
        break
    assert "continuing from this workdir's checkpoint" in out
    assert outcome.summary(tmp_path)["parameters_sha256"] == outcome.summary(reference)["parameters_sha256"]
    assert outcome.summary(tmp_path)["test_loss"] == outcome.summary(reference)["test_loss"]

    def curve(workdir):
        return [(line["step"], line.get("train_loss"), line.get("test_loss")) for line in outcome.metrics(workdir)]

    assert curve(tmp_path) == curve(reference), "metrics.jsonl must read as if nothing had happened"


def test_sigterm_saves_and_the_same_command_goes_on(uninterrupted, command, outcome, tmp_path):
    devices, reference = uninterrupted
    process = command.start(tmp_path, *OPTIONS, *LAYOUTS[devices], devices=devices)
    outcome.wait_for(lambda: outcome.checkpoint_steps(tmp_path), process)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 75, err
    stopped_at = outcome.checkpoint_steps(tmp_path)[-1]
    assert f"stopped after step {stopped_at} of 120, which is saved" in err
    result = command.run(tmp_path, *OPTIONS, *LAYOUTS[devices], devices=devices)
    assert f"checkpoint of step {stopped_at}" in result.stdout
    assert outcome.summary(tmp_path)["parameters_sha256"] == outcome.summary(reference)["parameters_sha256"]


def test_a_finished_run_is_only_evaluated_again(uninterrupted, command, outcome):
    devices, reference = uninterrupted
    before = outcome.summary(reference)
    result = command.run(reference, *OPTIONS, *LAYOUTS[devices], devices=devices)
    assert result.returncode == 0, result.stderr
    after = outcome.summary(reference)
    for name in ("parameters_sha256", "test_loss", "test_accuracy", "steps"):
        assert after[name] == before[name]
