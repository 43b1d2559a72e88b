"""Runs that pretend, for what is done by whom and what is left."""

import json

import pytest

from vit_jax.train import finetune, pretrain
from vit_jax.train.lifecycle import workdir
from vit_jax.train.lifecycle.interruption import Paused
from vit_jax.train.run_files import write_summary

STEPS = 100  # of each run


@pytest.fixture
def pretended(monkeypatch):
    """Runs of studies and sweeps that end at once, with an accuracy that depends on learning rate and seed.

    Returns the runs so far, as name and fraction of a pause, and errors to raise once, by name.
    """
    ran = []
    special = {}

    def perform(config, folder, pause_fraction=None):
        name = folder.rpartition("/")[2]
        accuracy = 0.5 + config.schedule.learning_rate + 0.01 * config.seed
        last = STEPS if pause_fraction is None else int(pause_fraction * STEPS)
        with workdir.claim(folder, config) as claimed:
            if error := special.pop(name, None):
                raise error
            ran.append((name, pause_fraction))
            lines = [
                {"step": step, "test_accuracy": accuracy * step / STEPS}
                for step in range(10, last + 1, 10)
            ]
            (claimed.folder / "metrics.jsonl").write_text(
                "".join(json.dumps(line) + "\n" for line in lines)
            )
            if pause_fraction is not None:
                raise Paused(last, STEPS)
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
