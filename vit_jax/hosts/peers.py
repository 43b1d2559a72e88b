"""Watching the processes of a run: if one is lost or fails, all end with a message that names it.

JAX alone lets the others wait for minutes in a collective, or aborts them with a C++ stack. Two
threads of each process watch: one exchanges reports with the others, one evaluates them. Messages
are JSON in the key-value store of the coordination service: under "vit_jax/all" those of every
process for the first one, under "vit_jax/first" its own.
"""

import contextlib
import dataclasses
import faulthandler
import json
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import jax

from vit_jax.hosts import exits
from vit_jax.hosts.exits import leave_at_once, say
from vit_jax.text.printable import first_line

POLL_SECONDS = 1.0
LOST_SECONDS = 40.0
"""Time without a heartbeat after which a process is lost; well below the 100 s of JAX."""
SILENCE_SECONDS = 4.0
"""Time in which several reports are due."""
OWN_ERROR_SECONDS = 3.0
"""Time for a process to print its own error, where all processes meet the same one."""
MEETING_SECONDS = 24 * 3600
"""Time limit of barriers; a process that is lost or fails in the meantime is noticed."""
UNWIND_SECONDS = 10.0
"""Time for a failed process to close its files."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """State of a process.

    Attributes:
      beat: number of the report; the heartbeat of a process is that it rises.
      host: name of the machine.
      step: last completed step; None before the first.
      progress: number of steps over all runs of the process.
      idle_seconds: time since the last step; None while the process does not train.
      has_ended: the process has ended without error and waits for the others.
    """

    beat: int
    host: str
    step: int | None
    progress: int
    idle_seconds: float | None
    has_ended: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verdict:
    """The reason why all processes end."""

    message: str
    exit_code: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Failure(Verdict):
    """The error that ends a process.

    Attributes:
      step: last completed step; None before the first.
    """

    step: int | None


class Store(Protocol):
    """The part of JAX's client that is used."""

    def key_value_set(self, key: str, value: str, allow_overwrite: bool = False) -> None: ...

    def key_value_dir_get(self, key: str) -> list[tuple[str, str]]: ...

    def wait_at_barrier(self, barrier_id: str, timeout_in_ms: int) -> None: ...


Rule = Callable[[Mapping[int, Report]], Verdict | None]


class PeerMonitor:
    """The monitor of the other processes of a run.

    Args:
      store: messages of all processes; None for a run of one process.
      process_id: number of this process.
      num_processes: number of all processes.
      lost_seconds: time without a heartbeat after which a process is lost.
      leave: called with the exit code to end this process at once.
    """

    def __init__(
        self,
        store: Store | None,
        process_id: int,
        num_processes: int,
        *,
        lost_seconds: float = LOST_SECONDS,
        leave: Callable[[int], object] | None = None,
    ):
        self.process_id = process_id
        self.num_processes = num_processes
        self._lost_seconds = lost_seconds
        self._store = store
        self.leave = leave or leave_at_once
        self._host = socket.gethostname()
        self._beat = 0
        self._progress = 0
        self._step: int | None = None
        self._idle_since: float | None = None
        self._num_runs = 0
        self._failure: Failure | None = None
        self._failed_at = 0.0
        self._has_ended = False
        self._is_closing = threading.Event()
        self._rule: Rule | None = None
        self._last_checkpoint: Callable[[], int | None] = lambda: None
        now = time.monotonic()
        self._reports: dict[int, Report] = {}
        self._seen_at = dict.fromkeys(range(num_processes), now)
        self._judged_at = now
        self._failures: dict[int, Failure] = {}
        self._received_verdict: Verdict | None = None
        self._progress_of_stacks = -1  # when stacks were last printed
        self._threads: list[threading.Thread] = []

    # Called by the main thread.

    def start(self) -> None:
        """Start the threads; a second call has no effect."""
        if self._threads:
            return
        actions = [self.check]
        if self._store is not None:
            actions.append(self.talk)
        for action in actions:
            thread = threading.Thread(target=self._repeat, args=(action,), daemon=True)
            self._threads.append(thread)
        for thread in self._threads:
            thread.start()

    def watch_steps(
        self,
        rule: Rule | None,
        last_checkpoint: Callable[[], int | None],
        start_step: int,
    ) -> None:
        """Wait for all processes, then watch that steps follow each other.

        Args:
          rule: called by the first process with the reports of all.
          last_checkpoint: returns the step of the last checkpoint, for the last message.
          start_step: the last completed step.
        """
        self._rule = rule
        self._last_checkpoint = last_checkpoint
        if self._store is not None:
            # A process may have compiled for longer than the first collectives of another wait.
            self._num_runs += 1
            self._store.wait_at_barrier(f"vit_jax/run/{self._num_runs}", MEETING_SECONDS * 1000)
        self._step = start_step
        self._idle_since = time.monotonic()
        self.start()

    def step_done(self, step: int) -> None:
        """Note a step that has been handed to the devices."""
        self._progress += 1
        self._step = step
        self._idle_since = time.monotonic()

    def rest(self) -> None:
        """Suspend the time limit of steps until the next one."""
        self._idle_since = None

    def resume(self) -> None:
        """Apply the time limit of steps again."""
        self._idle_since = time.monotonic()

    def fail(self, error: BaseException) -> None:
        """Report to the others that this process ends.

        It does not return if another process caused the error.
        """
        if self._failure is not None or self._store is None:
            return
        if is_consequence(error) or self._is_first_silent():
            # Another process has ended, and `check` is about to find it.
            time.sleep(self._lost_seconds + 5 * POLL_SECONDS)
        message = type(error).__name__
        reason = first_line(error)
        if reason != message:
            message += f": {reason}"
        failure = Failure(message=message, exit_code=exits.find_exit_code(error), step=self._step)
        self._failure = failure
        self._failed_at = time.monotonic()
        with contextlib.suppress(Exception):  # the others will notice anyway
            if self.process_id == 0:
                verdict = self._judge_failure(0, failure)
                self._post("first/verdict", dataclasses.asdict(verdict))
            else:
                self._post(f"all/failure/{self.process_id}", dataclasses.asdict(failure))

    def _is_first_silent(self) -> bool:
        """Return True if the first process, on which all others depend, sends no more reports."""
        began = time.monotonic()
        while self._threads and self.process_id != 0 and self._seen_at[0] <= began:
            if time.monotonic() - began > SILENCE_SECONDS:
                return True
            time.sleep(0.05)
        return False

    def end(self, wait_for_all: Callable[[], object]) -> None:
        """Wait for the end of all; called last.

        It does not return if this process failed.
        """
        self.rest()
        if self._failure is not None:
            self.leave(self._failure.exit_code)
        self._has_ended = True
        with contextlib.suppress(Exception):
            wait_for_all()
        self._is_closing.set()

    # Called by the threads.

    def _repeat(self, action: Callable[[], None]) -> None:
        while not self._is_closing.wait(POLL_SECONDS):
            with contextlib.suppress(Exception):  # without the store, processes count as silent
                action()

    def talk(self) -> None:
        """Post the report of this process and read the others; a thread calls this once a second."""
        written = "all"
        read = "first"
        if self.process_id == 0:
            written = "first"
            read = "all"
        report = dataclasses.asdict(self.build_report())
        self._post(f"{written}/report/{self.process_id}", report)
        for key, content in self._read(read):
            kind, _, process = key.partition("/")
            if kind == "report":
                self._receive(int(process), Report(**content))
            elif kind == "failure":
                self._failures[int(process)] = Failure(**content)
            elif kind == "verdict":
                self._received_verdict = Verdict(**content)
            elif self.process_id in content:  # the processes that must print their stacks
                self._show_stacks()

    def _post(self, key: str, value: object) -> None:
        assert self._store is not None
        self._store.key_value_set(f"vit_jax/{key}", json.dumps(value), allow_overwrite=True)

    def _read(self, folder: str) -> list[tuple[str, Any]]:
        assert self._store is not None
        prefix = f"vit_jax/{folder}"
        messages = self._store.key_value_dir_get(prefix)
        contents = []
        for key, text in messages:
            contents.append((key.removeprefix(f"{prefix}/"), json.loads(text)))
        return contents

    def build_report(self) -> Report:
        """Return the state of this process, with the next beat."""
        self._beat += 1
        idle_seconds = None
        idle_since = self._idle_since
        if idle_since is not None:
            idle_seconds = time.monotonic() - idle_since
        return Report(
            beat=self._beat,
            host=self._host,
            step=self._step,
            progress=self._progress,
            idle_seconds=idle_seconds,
            has_ended=self._has_ended,
        )

    def _receive(self, process: int, report: Report) -> None:
        known = self._reports.get(process)
        if known is None or known.beat != report.beat:
            self._seen_at[process] = time.monotonic()
        self._reports[process] = report

    def check(self) -> None:
        """End this process if the run is over.

        A separate thread calls this once a second, because `talk` may block.
        """
        if self._failure is not None:
            if time.monotonic() > self._failed_at + UNWIND_SECONDS:
                self._end_with(self._failure.message, self._failure.exit_code)
            return
        self._forgive_own_absence()
        verdict = self._received_verdict or self._judge()
        if verdict is None:
            return

        if self.process_id == 0 and self._store is not None:
            with contextlib.suppress(Exception):  # processes also notice that this one is gone
                self._post("first/verdict", dataclasses.asdict(verdict))
        if verdict.exit_code != exits.LOST and self._fails_itself():
            return
        self._end_with(verdict.message, verdict.exit_code)

    def _forgive_own_absence(self) -> None:
        """Extend the time limits by the time in which this process was stopped.

        A virtual machine that is moved has no reason to count others as lost.
        """
        now = time.monotonic()
        absence = now - self._judged_at - 2 * POLL_SECONDS
        self._judged_at = now
        if absence <= 0:
            return
        seen_at = self._seen_at
        self._seen_at = {process: seconds + absence for process, seconds in seen_at.items()}
        if self._idle_since is not None:
            self._idle_since += absence

    def _judge(self) -> Verdict | None:
        """Return the reason why all processes end, or None."""
        for process, failure in self._failures.items():
            return self._judge_failure(process, failure)
        if self._store is not None:
            for process in self._list_watched():
                if self._is_lost(process):
                    return self._judge_loss(process)
        if self._rule is None or self.process_id != 0:
            return None
        return self._rule({0: self.build_report()} | self._reports)

    def _list_watched(self) -> Sequence[int]:
        """Return the processes to watch: the first process watches all, all watch the first."""
        if self.process_id == 0:
            return range(1, self.num_processes)
        return (0,)

    def _is_lost(self, process: int) -> bool:
        report = self._reports.get(process)
        if report is not None and report.has_ended:
            return False
        return time.monotonic() - self._seen_at[process] > self._lost_seconds

    def _judge_loss(self, process: int) -> Verdict:
        after = ""
        if process in self._reports:
            after = _spell_step(self._reports[process].step)
        message = (
            f"{self.describe(process)} was lost{after}: no sign of life for "
            f"{self._lost_seconds:.0f} s (killed, stopped, or its machine or network is gone). "
            f"{self._advise()}"
        )
        return Verdict(message=message, exit_code=exits.LOST)

    def _judge_failure(self, process: int, failure: Failure) -> Verdict:
        subject = self.describe(process)
        after = _spell_step(failure.step)
        if failure.exit_code == exits.PREEMPTED:
            message = f"{subject} was stopped by SIGTERM{after}. {self._advise()}"
        else:
            advice = self._advise("fix that and ")
            message = f"{subject} failed{after}: {failure.message}\n{advice}"
        return Verdict(message=message, exit_code=failure.exit_code)

    def _fails_itself(self) -> bool:
        deadline = time.monotonic() + OWN_ERROR_SECONDS
        while self._failure is None and time.monotonic() < deadline:
            time.sleep(0.05)
        return self._failure is not None

    def _end_with(self, message: str, exit_code: int) -> None:
        say(message)
        self.leave(exit_code)

    # Messages, also for rules.

    def describe(self, process: int) -> str:
        """Return the name of a process, as in: process 2 of 4 (host)."""
        host = "host unknown"
        if process == self.process_id:
            host = self._host
        elif process in self._reports:
            host = self._reports[process].host
        return f"process {process} of {self.num_processes} ({host})"

    def warn(self, message: str, stuck: tuple[int, ...]) -> None:
        """Print a message and make the processes that are stuck print their stacks."""
        say(message)
        if self.process_id in stuck:
            self._show_stacks()
        if self._store is not None:
            self._post("first/stacks", stuck)

    def _advise(self, first: str = "") -> str:
        if self._step is None:
            return f"{first}start the same command again.".capitalize()
        step = self._last_checkpoint()
        checkpoint = "There is no checkpoint yet"
        if step is not None:
            checkpoint = f"The last checkpoint is of step {step}"
        return f"{checkpoint}; {first}start the same command again."

    def _show_stacks(self) -> None:
        if self._progress_of_stacks != self._progress:
            self._progress_of_stacks = self._progress
            say(f"{self.describe(self.process_id)} is{_spell_step(self._step)}; its Python stacks:")
            faulthandler.dump_traceback(file=2)


def _spell_step(step: int | None) -> str:
    if step is None:
        return ""
    return f" after step {step}"


def is_consequence(error: BaseException) -> bool:
    """Return True if the end of another process may have caused the error: connections break."""
    cause: BaseException | None = error
    while cause is not None:
        is_of_runtime = isinstance(cause, jax.errors.JaxRuntimeError)
        if is_of_runtime and "RESOURCE_EXHAUSTED" not in str(cause):
            return True
        cause = cause.__cause__ or cause.__context__
    return False
