"""Runs that only pretend to train, for tests of who runs what and what remains."""

import json

import pytest

from vit_jax.train import finetune, pretrain
from vit_jax.train.lifecycle import workdir
from vit_jax.train.lifecycle.interruption import Paused
from vit_jax.train.run_files import write_summary

STEPS = 100  # number of steps of each run


def make_evaluations(accuracy, last_step):
    """Return an evaluation every ten steps, whose accuracy grows linearly to that of all steps."""
    evaluations = []
    for step in range(10, last_step + 1, 10):
        evaluations.append({"step": step, "test_accuracy": accuracy * step / STEPS})
    return evaluations


@pytest.fixture
def pretended(monkeypatch):
    """Runs of studies and sweeps end at once, with an accuracy that depends on learning rate and seed.

    Returns the runs so far, as name and fraction of a pause, and errors to raise once, by name.
    """
    ran = []
    special = {}

    def perform(config, folder, pause_fraction=None):
        name = folder.rpartition("/")[2]
        accuracy = 0.5 + config.schedule.learning_rate + 0.01 * config.seed
        last_step = STEPS
        if pause_fraction is not None:
            last_step = int(pause_fraction * STEPS)

        with workdir.claim(folder, config) as claimed:
            if error := special.pop(name, None):
                raise error

            ran.append((name, pause_fraction))
            lines = [json.dumps(line) + "\n" for line in make_evaluations(accuracy, last_step)]
            (claimed.folder / "metrics.jsonl").write_text("".join(lines))
            if pause_fraction is not None:
                raise Paused(last_step, STEPS)

            summary = {
                "test_accuracy": accuracy,
                "test_loss": 1 - accuracy,
                "steps": STEPS,
                "wall_seconds": 1.0,
            }
            write_summary(claimed.folder, summary)

    monkeypatch.setattr(pretrain, "learn", perform)
    monkeypatch.setattr(finetune, "tune", perform)
    return ran, special
