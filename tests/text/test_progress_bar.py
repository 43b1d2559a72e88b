"""Progress without a terminal: a line now and then, with the time left."""

import pytest

from vit_jax.text import progress_bar


@pytest.fixture
def now(monkeypatch):
    """The time of a fake clock, in a list."""
    now = [100.0]
    monkeypatch.setattr(progress_bar.time, "monotonic", lambda: now[0])
    return now


def count(now, num_batches, seconds):
    with progress_bar.open_progress("features", 500, is_shown=True) as progress:
        for _ in range(num_batches):
            now[0] += seconds
            progress.update(50)


def test_long_work_has_a_line_every_half_minute(now, capsys):
    count(now, num_batches=10, seconds=20)

    first, *others = capsys.readouterr().err.splitlines()
    assert first == "features: 100 of 500 images, about 3 min left"
    assert len(others) == 4


def test_short_work_is_silent(now, capsys):
    count(now, num_batches=10, seconds=2)

    assert capsys.readouterr().err == ""


def test_other_processes_are_silent(now, capsys):
    with progress_bar.open_progress("features", 500, is_shown=False) as progress:
        now[0] += 100
        progress.update(50)

    assert capsys.readouterr().err == ""
