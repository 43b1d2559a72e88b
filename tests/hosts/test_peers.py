"""Conclusions of processes from reports, with a dictionary as store and a clock moved by hand."""

import threading

import jax
import pytest

from vit_jax.hosts import exits, peers
from vit_jax.hosts.peers import LOST_SECONDS, POLL_SECONDS, PeerMonitor


class Store:
    """The coordination service's."""

    def __init__(self):
        self.said = {}
        self.barriers = []

    def wait_at_barrier(self, barrier_id, timeout_in_ms):
        self.barriers.append((barrier_id, timeout_in_ms))

    def key_value_set(self, key, value, allow_overwrite=False):
        assert allow_overwrite or key not in self.said
        self.said[key] = value

    def key_value_dir_get(self, key):
        return [(name, value) for name, value in self.said.items() if name.startswith(f"{key}/")]


class Clock:
    """Stands for the module `time`."""

    now = 1000.0

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(peers, "time", clock)

    return clock


@pytest.fixture
def ended():
    """Exit codes of the processes that have ended."""
    return {}


@pytest.fixture
def run(ended, clock):
    """Three processes after step 7."""
    store = Store()

    def process(number):
        made = PeerMonitor(
            store,
            number,
            3,
            leave=lambda exit_code: ended.setdefault(number, exit_code),
        )
        made.step_done(7)
        made.clock = clock
        made.ended = ended
        made.store = store

        return made

    return [process(number) for number in range(3)]


def live(processes, seconds):
    for _ in range(round(seconds / POLL_SECONDS)):
        running = [process for process in processes if process.process_id not in process.ended]
        for process in running:
            process.talk()

        for process in running:
            process.check()

        processes[0].clock.sleep(POLL_SECONDS)


def test_all_well(run, ended, capfd):
    live(run, 3 * LOST_SECONDS)

    assert ended == {}
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("lost", [0, 2])
def test_a_lost_process_ends_the_others(run, ended, capfd, lost):
    live(run, 5)
    rest = [process for process in run if process.process_id != lost]
    live(rest, 58)  # within a minute

    assert ended == {process.process_id: exits.LOST for process in rest}

    message = capfd.readouterr().err.splitlines()[0]

    assert message.startswith(f"vit-jax: process {lost} of 3 (")
    assert "was lost after step 7: no sign of life for 40 s" in message
    assert message.endswith("There is no checkpoint yet; start the same command again.")


def test_a_process_without_any_report_is_lost_too(run, ended):
    live(run[:2], LOST_SECONDS - 2)

    assert ended == {}

    live(run[:2], 5)

    assert ended == {0: exits.LOST, 1: exits.LOST}


def test_a_process_that_has_ended_normally_is_not_lost(run, ended):
    for process in run[1:]:
        process.end(lambda: None)

    live(run, 5)
    live(run[:1], 3 * LOST_SECONDS)

    assert ended == {}


@pytest.mark.parametrize("failing", [0, 2])
@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ValueError("bad images\nmore"), 2),
        (KeyError("bug"), 1),
        (OSError(), 1),
    ],
)
def test_a_failure_ends_the_others_with_its_message_and_code(
    run,
    ended,
    capfd,
    failing,
    error,
    code,
):
    live(run, 5)
    run[failing].fail(error)
    live(run, 2)  # in each of which the clock of all advances while one waits for its own error

    assert ended == {process: code for process in range(3) if process != failing}

    first = capfd.readouterr().err.splitlines()[0]

    assert first.startswith(f"vit-jax: process {failing} of 3 (")

    words = f": {str(error).splitlines()[0]}" if str(error) else ""

    assert first.endswith(f"failed after step 7: {type(error).__name__}{words}")


def test_an_error_of_all_is_not_printed_again(run, ended, capfd):
    live(run, 5)
    for process in run:
        process.fail(ValueError("the same"))

    live(run, peers.UNWIND_SECONDS - 2)

    assert ended == {}
    assert capfd.readouterr().err == ""


def test_a_failed_process_that_does_not_end(run, ended):
    run[1].fail(ValueError("bad"))
    live(run[1:2], peers.UNWIND_SECONDS + 2)

    assert ended == {1: exits.MISUSED}


def test_an_error_that_another_process_caused_waits_for_the_verdict(run, clock):
    began = clock.now
    outer = RuntimeError("A checkpoint could not be written")
    outer.__cause__ = jax.errors.JaxRuntimeError("Connection closed by peer")
    run[1].fail(outer)

    assert clock.now - began > LOST_SECONDS

    began = clock.now
    run[2].fail(jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory"))

    assert clock.now == began


@pytest.mark.parametrize("is_silent", [True, False])
def test_a_silent_first_process_may_have_caused_any_error(
    run,
    clock,
    monkeypatch,
    is_silent,
):
    monkeypatch.setattr(
        threading.Thread,
        "start",
        lambda thread: None,
    )  # `talk` is called here instead
    run[1].start()
    talking = run[1:2] if is_silent else run[:2]
    sleep = clock.sleep
    began = clock.now
    monkeypatch.setattr(
        clock,
        "sleep",
        lambda seconds: sleep(seconds) or [process.talk() for process in talking],
    )
    run[1].fail(OSError("a file is gone"))

    assert (clock.now - began > LOST_SECONDS) is is_silent


def test_a_process_that_was_stopped_and_resumed_has_not_hung(
    run,
    clock,
    ended,
):
    live(run, 5)
    clock.sleep(3 * LOST_SECONDS)  # as after SIGSTOP of all
    run[0].check()

    assert run[0].build_report().idle_seconds < 10

    live(run, LOST_SECONDS)

    assert ended == {}


def test_a_run_of_one_process_cannot_lose_any(ended, clock):
    alone = PeerMonitor(
        None,
        0,
        1,
        lost_seconds=0.0,
        leave=lambda exit_code: ended.setdefault(0, exit_code),
    )
    clock.sleep(1)
    alone.check()
    alone.fail(ValueError("mine"))
    alone.check()

    assert ended == {}


def test_exit_codes():
    errors = (ValueError(), FloatingPointError(), KeyboardInterrupt(), SystemExit(75))
    assert [exits.find_exit_code(error) for error in errors] == [2, 1, 130, 75]


def test_all_are_there_before_the_steps_of_each_run_begin(run):
    """One may have compiled for longer than the first collective of another waits."""
    for _ in range(2):
        run[1].watch_steps(None, lambda: None, 0)

    run[1].end(lambda: None)
    (first, limit), (second, _) = run[1].store.barriers

    assert first != second
    assert limit >= 3600_000
