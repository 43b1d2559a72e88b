"""Metrics on their way from a step to the console and to files."""

import contextlib
import io
import logging
import math
import re
import sys
import types
from typing import ClassVar

import jax.numpy as jnp
import pytest

from tests.integration import commands
from tests.rejections import rejects
from tests.train import small_runs as runs
from vit_jax.config.check import validate
from vit_jax.train import progress
from vit_jax.train.cadence import Cadence
from vit_jax.train.hooks import Progress
from vit_jax.train.metrics import LateMetrics, require_finite
from vit_jax.train.progress import Display, TrainingClock, duration_text, estimate_text
from vit_jax.train.writers import JsonLines, Writers


@pytest.fixture
def now(monkeypatch):
    """The time of a fake clock, in a list."""
    now = [100.0]
    monkeypatch.setattr(progress.time, "perf_counter", lambda: now[0])
    return now


def build_clock(first_step, peak_flops=None):
    """Return a clock of steps of 8 images and 40 FLOPs."""
    return TrainingClock(
        first_step,
        lambda step: 8 * step,
        lambda step: 40.0 * step,
        peak_flops,
    )


class Lines:
    """A display without a bar, which notes the steps of its lines."""

    is_bar = False

    def __init__(self):
        self.steps = []

    def advance(self):
        pass

    def say(self, text):
        pass

    def show(self, step, *values):
        self.steps.append(step)


def show_run(now, total_steps, every, seconds_per_step):
    """Return the steps with a line of a run."""
    display = Lines()
    shown = Progress(
        display,
        build_clock(0),
        Cadence(every, total_steps),
        start_step=0,
        total_steps=total_steps,
        later_steps=0,
        platform="cpu",
    )
    for step in range(1, total_steps + 1):
        now[0] += seconds_per_step
        shown.show(step, {})
    return display.steps


def test_a_short_run_shows_few_lines(now):
    steps = show_run(now, total_steps=100, every=1, seconds_per_step=0.1)

    assert steps == [*range(1, 100, 4), 100]


def test_a_slow_run_shows_all_due_lines(now):
    steps = show_run(now, total_steps=1000, every=10, seconds_per_step=3)

    assert steps == list(range(10, 1001, 10))


METRICS = {
    "train_loss": 1.25,
    "learning_rate": 1e-3,
    "images_per_second": 1234.0,
}


def test_the_clock_ignores_pauses_and_earlier_steps(now):
    clock = build_clock(10, peak_flops=1000.0)

    now[0] += 2
    with clock.pause():
        now[0] += 50
        assert clock.seconds == 2
    now[0] += 2
    rates = clock.rates(20)

    assert clock.seconds == 4
    assert rates["images_per_second"] == 10 * 8 / 4
    assert rates["mfu"] == 20 * 5.0 / 1000.0
    # All steps count.
    assert rates["exaflops"] == 20 * 8 * 5.0 / 1e18
    assert clock.seconds_left(20, 40) == 8


def test_the_utilisation_of_an_unknown_chip_is_not_known():
    assert "mfu" not in build_clock(0).rates(1)


def test_waiting_for_input_counts_where_the_devices_have_no_work(now):
    def batches():
        for seconds in (1, 5, 3):
            now[0] += seconds
            yield seconds

    clock = build_clock(0)
    is_busy = iter((True, False, True))

    timed = list(clock.time_input(batches(), lambda: next(is_busy)))
    now[0] += 1

    assert timed == [1, 5, 3]
    assert clock.rates(3)["input_wait_fraction"] == 5 / 10


def test_plain_lines_where_there_is_no_terminal(capsys):
    display = Display(100, 0, enabled=True)

    Display(100, 0, enabled=False).say("other processes are silent")
    display.advance()

    def show(step, **metrics):
        display.show(step, METRICS | metrics, seconds_left=75)

    show(10, mfu=0.5)
    show(11, input_wait_fraction=0.004)
    show(12, input_wait_fraction=0.124)
    display.show(
        13,
        METRICS,
        seconds_left=75,
        seconds_to_end=3600,
    )
    display.close()
    lines = capsys.readouterr().out.splitlines()

    expected = "step     10/100  loss 1.2500  lr 1.00e-03  1,234 images/s  MFU 50.0%  1m 15s left"
    assert lines[0] == expected
    assert lines[1].endswith("1,234 images/s  1m 15s left")
    assert lines[2].endswith("1,234 images/s  waiting for input 12%  1m 15s left")
    assert lines[3].endswith("1m 15s left, about 1h 00m to the end of all runs")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.4, "0s"),
        (3600, "1h 00m"),
        (7270, "2h 01m"),
    ],
)
def test_durations(seconds, text):
    assert duration_text(seconds) == text


def test_a_bar_on_a_terminal(monkeypatch):
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", terminal)
    display = Display(100, 40, enabled=True)
    display.advance()
    display.show(41, METRICS, seconds_left=75)
    display.say("a line")
    logging.getLogger("vit_jax.data").warning("a warning")
    display.close()
    text = terminal.getvalue()

    assert re.search(r"(^|[\r\n])a warning\n", text), "on a separate line"
    assert "41/100" in text
    assert "loss 1.2500" in text
    assert "a line\n" in text


def test_the_estimate_names_probe_for_long_runs_on_a_cpu():
    short = estimate_text(3600, "cpu")
    long = estimate_text(50_640, "cpu")

    assert estimate_text(59, "cpu") == ""
    assert short.startswith("estimate: 1h 00m of training")
    assert "probe" not in short
    assert "probe" not in estimate_text(50_640, "tpu")
    assert "14h 04m" in long
    assert "vit-jax probe" in long


@pytest.mark.parametrize(
    ("every", "last", "expected"),
    [
        (1, 3, [1, 2, 3]),
        (2, 5, [2, 4, 5]),
        (4, 8, [4, 8]),
        (10, 3, [3]),
    ],
)
def test_due_every_so_often_and_at_the_end(every, last, expected):
    cadence = Cadence(every, last)
    due = [step for step in range(last + 1) if cadence.is_due(step)]

    assert due == expected


def test_metrics_are_reported_one_step_late_each_once_and_in_order():
    seen = []

    def record(step, metrics):
        seen.append((step, metrics["x"]))

    late = LateMetrics(record)
    late.after_step(1, {"x": jnp.float32(1)})

    assert seen == []

    late.after_step(2, {"x": jnp.float32(2)})
    assert seen == [(1, 1.0)]

    late.flush()
    late.flush()

    assert seen == [
        (1, 1.0),
        (2, 2.0),
    ]


@pytest.mark.parametrize("name", ["train_loss", "gradient_norm", "parameter_norm"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_metrics_that_are_not_finite_raise(name, value):
    metrics = {
        "train_loss": 1.0,
        "gradient_norm": 1.0,
        "parameter_norm": 1.0,
        "learning_rate": 0.1,
    }
    diverged = metrics | {name: value}
    at_rate_0 = diverged | {"learning_rate": 0.0}
    no_cause = "The learning rate is 0, so it is not the cause"

    require_finite(5, metrics)

    message = r"Step 5: .*learning_rate \(now 0\.1\)"
    with pytest.raises(FloatingPointError, match=message):
        require_finite(5, diverged)
    with pytest.raises(FloatingPointError, match=no_cause) as raised:
        require_finite(5, at_rate_0)

    assert "lower" not in str(raised.value)


def test_lines_after_the_restored_step_and_half_lines_go(tmp_path):
    first = JsonLines(tmp_path, 0)
    for step in (1, 2, 3):
        first.write(step, {"x": step / 2})
    first.close()
    # The process is killed while it writes.
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "x"')

    second = JsonLines(tmp_path, 2)
    second.write(3, {"x": 9.0})
    second.close()

    assert commands.metrics(tmp_path) == [
        {"step": 1, "x": 0.5},
        {"step": 2, "x": 1.0},
        {"step": 3, "x": 9.0},
    ]


def test_weights_and_biases_receives_config_and_metrics(tmp_path, monkeypatch):
    calls: ClassVar = []

    class Run:
        def log(self, metrics, step):
            calls.append(("log", step, metrics))

        def finish(self):
            calls.append(("finish",))

    def init(*, project, config, resume, **_):
        calls.append(("init", project, config["logging"]["every"], resume))
        return Run()

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init))
    config = runs.config(
        "logging.every=1 steps",
        "logging.tensorboard=False",
        "logging.wandb_project=p",
    )

    writers = Writers(tmp_path, config, 0, enabled=True)
    writers.write(3, {"x": 1.0})
    writers.close()

    assert calls == [
        ("init", "p", "1 steps", "allow"),
        ("log", 3, {"x": 1.0}),
        ("finish",),
    ]


def test_a_missing_package_is_named_before_any_file_is_made(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)

    with pytest.raises(ValueError, match=r"pip install .*\[wandb\]"):
        Writers(
            tmp_path,
            runs.config("logging.wandb_project=p"),
            0,
            enabled=True,
        )

    assert list(tmp_path.iterdir()) == []


class ListTracker:
    """A custom tracker that keeps its calls, and fails at a step."""

    calls: ClassVar = []

    def start(self, workdir, config, start_step):
        self.calls.append(("start", workdir, config["seed"], start_step))

    def write(self, step, metrics):
        self.calls.append((step, metrics))
        if step == 9:
            raise OSError("the server does not answer")

    def flush(self):
        self.calls.append("flush")

    def close(self):
        self.calls.append("close")


class NoTracker:
    """A class without the method `write`."""

    def start(self, workdir, config, start_step):
        raise AssertionError

    def close(self):
        raise AssertionError


TRACKED = f"logging.writers={__name__}:ListTracker"


@pytest.fixture
def calls(monkeypatch):
    """The calls of `ListTracker`."""
    monkeypatch.setattr(ListTracker, "calls", [])
    return ListTracker.calls


def test_a_custom_tracker_receives_config_and_metrics(tmp_path, calls):
    config = runs.config("seed=5", "logging.tensorboard=False", TRACKED)

    writers = Writers(tmp_path, config, 2, enabled=True)
    writers.write(3, {"x": 1.0})
    writers.flush()
    writers.close()

    assert calls == [("start", tmp_path, 5, 2), (3, {"x": 1.0}), "flush", "close"]
    assert [line["step"] for line in commands.metrics(tmp_path)] == [3]


def test_trackers_are_closed_if_another_writer_cannot_start(tmp_path, calls):
    (tmp_path / "metrics.jsonl").mkdir()

    with pytest.raises(ValueError, match=r"metrics\.jsonl is damaged"):
        Writers(tmp_path, runs.config(TRACKED), 0, enabled=True)

    assert calls[1:] == ["close"]


def test_an_error_of_a_tracker_ends_the_run_and_closes_all(tmp_path, calls):
    writers = Writers(tmp_path, runs.config(TRACKED), 0, enabled=True)

    with pytest.raises(OSError, match="does not answer"), contextlib.closing(writers):
        writers.write(9, {"x": 1.0})

    assert calls[-1] == "close"


@pytest.mark.parametrize("name", ["NoTracker", "build_clock"])
def test_another_object_is_no_tracker(name):
    with rejects(f"config.logging.writers='{__name__}:{name}'", "class with .*write.*extend"):
        validate(runs.config(f"logging.writers={__name__}:{name}"))


def test_a_process_that_does_not_write_makes_no_file(tmp_path):
    writers = Writers(tmp_path, runs.config(), 0, enabled=False)

    writers.write(1, {"x": 1.0})

    assert list(tmp_path.iterdir()) == []
