"""Watching the processes of a run: if one is lost or fails, all end with a message that names it.

JAX alone lets the others wait for minutes in a collective, or aborts them with a C++ stack. Two threads of each process
watch: one exchanges reports with the others, one evaluates them. Messages are JSON in the key-value store of the
coordination service: under "vit_jax/all" those of every process for the first one, under "vit_jax/first" its own.
"""

import contextlib
import dataclasses
import faulthandler
import json
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import jax

from vit_jax.hosts import exits
from vit_jax.hosts.exits import leave_at_once, say
from vit_jax.text.printable import first_line

POLL_SECONDS = 1.0
LOST_SECONDS = 40.0  # without a sign of life; well below JAX's own 100
SILENCE_SECONDS = 4.0  # within which several reports are due
OWN_ERROR_SECONDS = 3.0  # where all processes meet the same error, each prints its own
MEETING_SECONDS = 24 * 3600  # one that is lost or fails in the meantime is noticed
UNWIND_SECONDS = 10.0  # for a failed process to close its files


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """State of a process."""

    beat: int  # counts reports: a process whose count stops has no sign of life
    host: str
    step: int | None  # last completed step; None before the first
    progress: int  # counts steps over all runs of the process
    idle_seconds: float | None  # since then; None while it does not train
    has_ended: bool = False  # normally: it waits for the others to end


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verdict:
    """The reason why all processes end."""

    message: str
    exit_code: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Failure(Verdict):
    """The error that ends a process."""

    step: int | None  # last completed step; None before the first


class Store(Protocol):
    """The part of JAX's client that is used."""

    def key_value_set(self, key: str, value: str, allow_overwrite: bool = False) -> None: ...

    def key_value_dir_get(self, key: str) -> list[tuple[str, str]]: ...

    def wait_at_barrier(self, barrier_id: str, timeout_in_ms: int) -> None: ...


Rule = Callable[[Mapping[int, Report]], Verdict | None]


class Peers:
    """The peers of this process; a run of one process has no store.

    A process without a sign of life for `lost_seconds` counts as lost. `leave(exit_code)` ends this one at once.
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
        self._heard_verdict: Verdict | None = None
        self._showed_at = -1  # the progress at which stacks were last printed
        self._threads: list[threading.Thread] = []

    # Called by the main thread.

    def start(self) -> None:
        """Start the threads; again has no effect."""
        actions = [self.check] if self._store is None else [self.check, self.talk]
        if not self._threads:
            self._threads = [
                threading.Thread(target=self._repeat, args=(action,), daemon=True)
                for action in actions
            ]
            for thread in self._threads:
                thread.start()

    def watch_steps(
        self, rule: Rule | None, last_checkpoint: Callable[[], int | None], start_step: int
    ) -> None:
        """Start to watch that steps follow each other, after those that were done before; wait for all processes.

        The first process calls `rule` with the reports of all. `last_checkpoint` gives its step, for the last message.
        """
        self._rule = rule
        self._last_checkpoint = last_checkpoint
        if (
            self._store is not None
        ):  # one may have compiled for longer than the first collectives of another wait
            self._num_runs += 1
            self._store.wait_at_barrier(f"vit_jax/run/{self._num_runs}", MEETING_SECONDS * 1000)
        self._step = start_step
        self._idle_since = time.monotonic()
        self.start()

    def step_done(self, step: int) -> None:
        """A step has been handed to the devices."""
        self._progress = self._progress + 1
        self._step = step
        self._idle_since = time.monotonic()

    def rest(self) -> None:
        """Suspend the time limit of steps until the next one."""
        self._idle_since = None

    def resume(self) -> None:
        """Steps follow again."""
        self._idle_since = time.monotonic()

    def fail(self, error: BaseException) -> None:
        """Report to the others that this process ends; does not return if another process caused the error."""
        if self._failure is not None or self._store is None:
            return
        if (
            is_consequence(error) or self._is_first_silent()
        ):  # another's end: `check` is about to find it
            time.sleep(self._lost_seconds + 5 * POLL_SECONDS)
        kind = type(error).__name__
        said = first_line(error)
        words = kind if said == kind else f"{kind}: {said}"
        failure = Failure(message=words, exit_code=exits.code_of(error), step=self._step)
        self._failure = failure
        self._failed_at = time.monotonic()
        with contextlib.suppress(Exception):  # the others will notice anyway
            if self.process_id == 0:
                self._post(
                    "first/verdict", dataclasses.asdict(self._verdict_on_failure(0, failure))
                )
            else:
                self._post(f"all/failure/{self.process_id}", dataclasses.asdict(failure))

    def _is_first_silent(self) -> bool:
        """Return whether the first process, on which all others depend, gives no sign of life from now on."""
        began = time.monotonic()
        while self._threads and self.process_id != 0 and self._seen_at[0] <= began:
            if time.monotonic() - began > SILENCE_SECONDS:
                return True
            time.sleep(0.05)
        return False

    def end(self, wait_for_all: Callable[[], object]) -> None:
        """Wait for the end of all; called last. Does not return if this process failed."""
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
            with contextlib.suppress(Exception):  # of the store: it then counts as silent
                action()

    def talk(self) -> None:
        """Post the report of this process and read those of the others; once a second, by a thread."""
        folder = "first" if self.process_id == 0 else "all"
        self._post(f"{folder}/report/{self.process_id}", dataclasses.asdict(self.own_report()))
        for key, said in self._read("all" if self.process_id == 0 else "first"):
            kind, _, process = key.partition("/")
            if kind == "report":
                self._hear(int(process), Report(**said))
            elif kind == "failure":
                self._failures[int(process)] = Failure(**said)
            elif kind == "verdict":
                self._heard_verdict = Verdict(**said)
            elif self.process_id in said:  # of those that are to print their stacks
                self._show_stacks()

    def _post(self, key: str, value: object) -> None:
        assert self._store is not None
        self._store.key_value_set(f"vit_jax/{key}", json.dumps(value), allow_overwrite=True)

    def _read(self, folder: str) -> list[tuple[str, Any]]:
        assert self._store is not None
        prefix = f"vit_jax/{folder}"
        said = self._store.key_value_dir_get(prefix)
        return [(key.removeprefix(f"{prefix}/"), json.loads(text)) for key, text in said]

    def own_report(self) -> Report:
        """State of this process."""
        self._beat += 1
        since = self._idle_since
        return Report(
            beat=self._beat,
            host=self._host,
            step=self._step,
            progress=self._progress,
            idle_seconds=None if since is None else time.monotonic() - since,
            has_ended=self._has_ended,
        )

    def _hear(self, process: int, report: Report) -> None:
        known = self._reports.get(process)
        if known is None or known.beat != report.beat:
            self._seen_at[process] = time.monotonic()
        self._reports[process] = report

    def check(self) -> None:
        """End this process if the run is over; once a second, by another thread, since `talk` may block."""
        if self._failure is not None:
            if time.monotonic() > self._failed_at + UNWIND_SECONDS:
                self._end_with(self._failure.message, self._failure.exit_code)
            return
        self._forgive_own_absence()
        verdict = self._heard_verdict or self._verdict()
        if verdict is None:
            return
        if self.process_id == 0 and self._store is not None:
            with contextlib.suppress(Exception):  # who does not read it finds this process gone
                self._post("first/verdict", dataclasses.asdict(verdict))
        if verdict.exit_code != exits.LOST and self._fails_itself():
            return
        self._end_with(verdict.message, verdict.exit_code)

    def _forgive_own_absence(self) -> None:
        """A process that was stopped itself (a virtual machine that is moved) has no reason to count others as lost."""
        now = time.monotonic()
        absence = now - self._judged_at - 2 * POLL_SECONDS
        self._judged_at = now
        if absence > 0:
            self._seen_at = {
                process: seen_at + absence for process, seen_at in self._seen_at.items()
            }
            if self._idle_since is not None:
                self._idle_since += absence

    def _verdict(self) -> Verdict | None:
        for process, failure in self._failures.items():
            return self._verdict_on_failure(process, failure)
        known = range(1, self.num_processes) if self.process_id == 0 else (0,)
        for process in known if self._store is not None else ():
            report = self._reports.get(process)
            silence = time.monotonic() - self._seen_at[process]
            if silence > self._lost_seconds and not (report and report.has_ended):
                what = (
                    f"was lost{_after(report.step if report else None)}: no sign of life for {self._lost_seconds:.0f} "
                    f"s (killed, stopped, or its machine or network is gone). {self._advice()}"
                )
                return Verdict(message=f"{self.name(process)} {what}", exit_code=exits.LOST)
        if self._rule is None or self.process_id != 0:
            return None
        return self._rule({0: self.own_report()} | self._reports)

    def _verdict_on_failure(self, process: int, failure: Failure) -> Verdict:
        if failure.exit_code == exits.PREEMPTED:
            what = f"was stopped by SIGTERM{_after(failure.step)}. {self._advice('')}"
        else:
            what = (
                f"failed{_after(failure.step)}: {failure.message}\n{self._advice('fix that and ')}"
            )
        return Verdict(message=f"{self.name(process)} {what}", exit_code=failure.exit_code)

    def _fails_itself(self) -> bool:
        deadline = time.monotonic() + OWN_ERROR_SECONDS
        while self._failure is None and time.monotonic() < deadline:
            time.sleep(0.05)
        return self._failure is not None

    def _end_with(self, message: str, exit_code: int) -> None:
        say(message)
        self.leave(exit_code)

    # Messages, also for rules.

    def name(self, process: int) -> str:
        """Return the name of a process, as in: process 2 of 4 (host)."""
        report = self._reports.get(process)
        host = (
            self._host if process == self.process_id else report.host if report else "host unknown"
        )
        return f"process {process} of {self.num_processes} ({host})"

    def warn(self, message: str, stuck: tuple[int, ...]) -> None:
        """Print a message and make the processes that are stuck print their stacks."""
        say(message)
        if self.process_id in stuck:
            self._show_stacks()
        if self._store is not None:
            self._post("first/stacks", stuck)

    def _advice(self, first: str = "") -> str:
        if self._step is None:
            return f"{first}start the same command again.".capitalize()
        step = self._last_checkpoint()
        kept = (
            "There is no checkpoint yet"
            if step is None
            else f"The last checkpoint is of step {step}"
        )
        return f"{kept}; {first}start the same command again."

    def _show_stacks(self) -> None:
        if self._showed_at != self._progress:
            self._showed_at = self._progress
            say(f"{self.name(self.process_id)} is{_after(self._step)}; its Python stacks:")
            faulthandler.dump_traceback(file=2)


def _after(step: int | None) -> str:
    return "" if step is None else f" after step {step}"


def is_consequence(error: BaseException) -> bool:
    """Return whether the end of another process may have caused the error: connections break."""
    chain: list[BaseException | None] = [error]
    while (last := chain[-1]) is not None:
        chain.append(last.__cause__ or last.__context__)
    return any(
        isinstance(e, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" not in str(e)
        for e in chain
    )
