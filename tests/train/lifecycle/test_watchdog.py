"""Steps that stop: who is behind is named, once, and the run ends; whatever is no step raises no alarm."""

import time

import pytest

from vit_jax.hosts import PeerMonitor, Report, exits
from vit_jax.train.lifecycle.interruption import Interrupted
from vit_jax.train.lifecycle.watchdog import Watchdog, find_stuck


def report(progress, idle_seconds, **changes):
    fields = {
        "beat": 1,
        "host": "h",
        "step": 10 + progress,
        "progress": progress,
        "idle_seconds": idle_seconds,
    }
    return Report(**(fields | changes))


@pytest.mark.parametrize(
    ("reports", "stuck"),
    [
        ([report(7, 61.0), report(5, 62.0)], (1,)),  # the one that has done less
        ([report(7, 61.0), report(7, 62.0)], (0, 1)),  # all in the same collective
        ([report(7, 61.0), report(5, 59.0)], ()),  # not long enough yet
        ([report(7, 61.0), report(5, None)], ()),  # it saves, and the other waits
        ([report(7, None), report(5, 61.0)], (1,)),
        ([report(7, 61.0), report(5, 99.0, has_ended=True)], (0,)),
        ([], ()),
    ],
)
def test_find_stuck(reports, stuck):
    by_process = dict(enumerate(reports))

    assert find_stuck(by_process, 60.0) == stuck


@pytest.fixture
def process(monkeypatch):
    process = PeerMonitor(None, 0, 2)
    monkeypatch.setattr(process, "start", lambda: None)
    return process


def test_a_warning_and_then_the_end(process, tmp_path, capfd):
    first_words = "hangs: process 1 of 2 (host unknown) finished no step for 61 s after step 15"
    last_words = "the others have reached step 17. At 120 s the run ends (logging.hang_seconds)"

    def build_reports(idle_seconds):
        return {
            0: report(7, idle_seconds),
            1: report(5, idle_seconds),
        }

    with Watchdog(tmp_path, 10, 60.0, process) as watchdog:
        assert watchdog.check_progress(build_reports(30.0)) is None
        assert capfd.readouterr().err == ""

        assert watchdog.check_progress(build_reports(61.0)) is None
        assert watchdog.check_progress(build_reports(62.0)) is None

        said = capfd.readouterr().err
        assert said.count("hangs") == 1, "said once"
        assert first_words in said
        assert last_words in said

        verdict = watchdog.check_progress(build_reports(121.0))

    assert verdict.exit_code == exits.LOST
    assert "process 1 of 2" in verdict.message


def test_none_switches_it_off(process, tmp_path, monkeypatch):
    rules = []

    def record_rule(rule, *_):
        rules.append(rule)

    monkeypatch.setattr(process, "watch_steps", record_rule)

    with Watchdog(tmp_path, 0, None, process):
        assert rules == [None]


def test_slow_steps_are_no_hang_and_what_is_no_step_may_take_its_time(
    process,
    tmp_path,
    monkeypatch,
):
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    assert process.build_report().idle_seconds is None, "before the first step"

    with Watchdog(tmp_path, 0, 50.0, process) as watchdog:
        begun = process.build_report()
        assert begun.step == 0
        assert begun.idle_seconds == 0

        watchdog.after_step(1, {})
        with watchdog.pause():
            assert process.build_report().idle_seconds is None
            now[0] = 500.0

        assert process.build_report().idle_seconds == 0

        now[0] = 600.0
        watchdog.after_step(2, {})  # three times as long, 300 s, is the limit now

        second = process.build_report()
        slow = report(2, 200.0)
        stuck = report(2, 1000.0)

        assert second.step == 2
        assert second.progress == 2
        assert watchdog.check_progress({0: slow}) is None
        assert watchdog.check_progress({0: stuck}) is not None

    assert process.build_report().idle_seconds is None, "after the last"


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (ValueError("mine"), True),
        (Interrupted("asked to"), False),
    ],
)
def test_an_error_is_told_to_the_others_before_anything_is_closed(
    process,
    tmp_path,
    monkeypatch,
    error,
    told,
):
    heard = []
    monkeypatch.setattr(process, "fail", heard.append)

    with pytest.raises(type(error)), Watchdog(tmp_path, 0, 60.0, process):
        raise error

    assert heard == ([error] if told else [])
