"""The batches of a run in phases come from one pipeline at a time."""

import contextlib

import pytest

from tests import tiny
from tests.train import small_runs as runs
from vit_jax.train import inputs

PHASES = (
    "phases.small.until=2 steps",
    "phases.small.global_batch=8",
    "phases.wide.until=5 steps",
    "total=6 steps",
    "schedule.warmup=1 step",
)


@pytest.fixture
def events(monkeypatch):
    """Pipelines that note when they open and close, and yield the numbers of their steps."""
    noted = []

    @contextlib.contextmanager
    def open_placed(stream, *options):
        noted.append(("open", stream.start_step, stream.global_batch, stream.first_sample))
        yield iter(range(stream.start_step + 1, stream.num_steps + 1))
        noted.append(("close", stream.start_step))

    monkeypatch.setattr(inputs, "open_placed", open_placed)
    return noted


def test_a_pipeline_ends_before_that_of_the_next_phase_starts(events):
    run = runs.build(*PHASES)
    with inputs.open_train_batches(run, tiny.source(160), 0) as (batches, _):
        assert events == [("open", 0, 8, 0)]
        assert list(batches) == [1, 2, 3, 4, 5, 6]

    expected = [
        ("open", 0, 8, 0),
        ("close", 0),
        ("open", 2, 16, 16),
        ("close", 2),
        ("open", 5, 16, 64),
        ("close", 5),
    ]

    assert events == expected


def test_a_resumed_run_begins_in_its_phase(events):
    run = runs.build(*PHASES)
    with inputs.open_train_batches(run, tiny.source(160), 3) as (batches, _):
        assert next(batches) == 4

    assert events == [("open", 3, 16, 32), ("close", 3)]
