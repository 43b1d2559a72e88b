"""What processes make of each other's reports; the store is a dictionary, and nobody ends."""

import time

import jax
import pytest

from vit_jax.hosts import exits, peers
from vit_jax.hosts.peers import Peers

LOST_SECONDS = 0.15


class Store:
    """The coordination service's."""

    def __init__(self):
        self.said = {}
        self.is_gone = False

    def key_value_set(self, key, value, allow_overwrite=False):
        if self.is_gone:
            raise jax.errors.JaxRuntimeError("UNAVAILABLE")
        assert allow_overwrite or key not in self.said
        self.said[key] = value

    def key_value_dir_get(self, key):
        if self.is_gone:
            raise jax.errors.JaxRuntimeError("UNAVAILABLE")
        return [(name, value) for name, value in self.said.items() if name.startswith(f"{key}/")]


@pytest.fixture
def ended(monkeypatch):
    """Who ended, with which exit code."""
    monkeypatch.setattr(peers, "OWN_ERROR_SECONDS", 0.05)
    monkeypatch.setattr(peers, "POLL_SECONDS", 0.02)
    return {}


@pytest.fixture
def run(ended):
    store = Store()
    made = [
        Peers(
            store,
            process,
            3,
            lost_seconds=LOST_SECONDS,
            leave=lambda exit_code, process=process: ended.setdefault(process, exit_code),
        )
        for process in range(3)
    ]
    for process in made:
        process.step_done(7)
        process.store = store
    return made


def live(processes, seconds):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        for process in processes:
            process.talk()
        for process in processes:
            process.judge()
        time.sleep(0.01)


def test_all_well(run, ended, capfd):
    live(run, 3 * LOST_SECONDS)
    assert ended == {}
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("lost", [0, 2])
def test_a_lost_process_ends_the_others(run, ended, capfd, lost):
    live(run, 0.05)
    rest = [process for process in run if process.process_id != lost]
    live(rest, 3 * LOST_SECONDS)
    assert ended == {process.process_id: exits.LOST for process in rest}
    message = capfd.readouterr().err.splitlines()[0]
    assert message.startswith(f"vit-jax: process {lost} of 3 (")
    assert "was lost after step 7: no sign of life" in message
    assert message.endswith("There is no checkpoint yet; start the same command again.")


def test_one_that_never_spoke_is_lost_too(run, ended):
    live(run[:2], 3 * LOST_SECONDS)
    assert ended == {0: exits.LOST, 1: exits.LOST}


def test_one_that_has_ended_well_is_not_lost(run, ended):
    for process in run[1:]:
        process._has_ended = True
    live(run, 0.05)
    live(run[:1], 3 * LOST_SECONDS)
    assert ended == {}


@pytest.mark.parametrize("failing", [0, 2])
@pytest.mark.parametrize(("error", "code"), [(ValueError("bad images\nmore"), 2), (KeyError("bug"), 1)])
def test_a_failure_ends_the_others_with_its_words_and_code(run, ended, capfd, failing, error, code):
    live(run, 0.05)
    run[failing].fail(error)
    live(run, 0.15)
    assert ended == {process: code for process in range(3) if process != failing}
    kind = type(error).__name__
    first = capfd.readouterr().err.splitlines()[0]
    assert first.startswith(f"vit-jax: process {failing} of 3 (")
    assert f"failed after step 7: {kind}: {str(error).splitlines()[0]}" in first
    assert "mend that and start the same command again" in first or "more" not in first


def test_an_error_that_all_meet_is_told_by_each(run, ended, capfd):
    live(run, 0.05)
    for process in run:
        process.fail(ValueError("the same"))
    live(run, 0.15)
    assert ended == {}
    assert capfd.readouterr().err == ""


def test_a_failed_process_that_does_not_come_to_an_end(run, ended, monkeypatch):
    monkeypatch.setattr(peers, "UNWIND_SECONDS", 0.05)
    run[1].fail(ValueError("bad"))
    live(run[1:2], 0.1)
    assert ended == {1: exits.MISUSED}


def test_the_victim_waits_for_the_verdict_before_it_speaks(run, ended):
    began = time.monotonic()
    run[1].fail(jax.errors.JaxRuntimeError("Connection closed by peer"))
    assert time.monotonic() - began > LOST_SECONDS
    began = time.monotonic()
    run[2].fail(jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory"))
    assert time.monotonic() - began < LOST_SECONDS


def test_any_error_may_come_of_a_first_process_that_is_silent(run, monkeypatch):
    monkeypatch.setattr(peers, "SILENCE_SECONDS", 0.02)
    run[1]._threads = run[2]._threads = ["running"]
    run[2]._seen_at[0] = time.monotonic() + 1.0  # it speaks
    for process, waits in ((2, False), (1, True)):
        began = time.monotonic()
        run[process].fail(OSError("a file is gone"))
        assert (time.monotonic() - began > LOST_SECONDS) is waits


def test_consequences():
    broken = jax.errors.JaxRuntimeError("Connection reset")
    outer = RuntimeError("A checkpoint could not be written")
    outer.__cause__ = broken
    assert peers.is_consequence(broken)
    assert peers.is_consequence(outer)
    assert not peers.is_consequence(ValueError("mine"))


def test_a_process_that_was_stopped_and_goes_on_has_not_hung(ended, monkeypatch):
    process = Peers(None, 0, 1)
    process.step_done(3)
    process._judged_at -= 100.0  # as after SIGSTOP: for so long no thread has run
    process._idle_since -= 100.0
    process.judge()
    assert process.own_report().idle_seconds < 1.0


def test_one_that_stood_still_itself_blames_nobody(run, ended):
    live(run, 0.05)
    time.sleep(3 * LOST_SECONDS)  # all of them
    live(run, LOST_SECONDS)
    assert ended == {}


def test_without_the_service_the_first_process_is_taken_for_lost(run, ended):
    live(run, 0.05)
    run[0].store.is_gone = True
    deadline = time.monotonic() + 3 * LOST_SECONDS
    while time.monotonic() < deadline:
        run[1].judge()
        time.sleep(0.01)
    assert ended == {1: exits.LOST}


def test_a_run_of_one_process_has_nobody_to_lose(ended):
    alone = Peers(None, 0, 1, lost_seconds=0.0, leave=lambda exit_code: ended.setdefault(0, exit_code))
    time.sleep(0.01)
    alone.judge()
    alone.fail(ValueError("mine"))
    alone.judge()
    assert ended == {}


def test_exit_codes():
    assert exits.code_of(ValueError()) == 2
    assert exits.code_of(FloatingPointError()) == 1
    assert exits.code_of(KeyboardInterrupt()) == 130
    assert exits.code_of(SystemExit(75)) == 75


def test_by_itself_a_lost_process_ends_the_others_within_a_minute():
    assert peers.LOST_SECONDS + 10 * peers.POLL_SECONDS < 60
