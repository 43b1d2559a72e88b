"""Detects that the steps of a run have stopped: names the processes that are behind and the step, then ends the run.

It reads the reports that processes exchange every second anyway (`hosts.peers`), so it costs a step nothing. Compiling,
evaluating and waiting for a checkpoint are no steps and have no time limit.
"""

import contextlib
import pathlib
import time
from collections.abc import Iterator, Mapping
from typing import Self

from vit_jax import hosts
from vit_jax.checkpoint import CheckpointReader
from vit_jax.hosts import exits
from vit_jax.train.lifecycle.interruption import Interrupted

SLOW_STEPS = 3  # a step that takes this many times as long as the slowest so far hangs, if `hang_seconds` is less


class Watchdog:
    """Context of the loop over steps; enter it last, so that it is the first to see an error.

    After `hang_seconds` without a step it warns; after twice as many it ends the run. None: never. Steps and errors are
    reported to `process`, by default this one.
    """

    def __init__(
        self,
        folder: pathlib.Path,
        start_step: int,
        hang_seconds: float | None,
        process: hosts.Peers | None = None,
    ):
        self._folder = folder
        self._start_step = start_step
        self._hang_seconds = hang_seconds
        self._process = process or hosts.this_process()
        self._num_steps = 0
        self._slowest_seconds = 0.0
        self._last = time.monotonic()
        self._warned_of: tuple[tuple[int, ...], int] | None = None

    def __enter__(self) -> Self:
        rule = None if self._hang_seconds is None else self.check_progress
        self._process.watch_steps(rule, lambda: newest_checkpoint(self._folder), self._start_step)
        self._last = time.monotonic()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._process.rest()
        if error is not None and not isinstance(error, Interrupted):
            self._process.fail(
                error
            )  # before anything is closed: that may wait for processes that wait for this one

    def after_step(self, step: int, metrics: object) -> None:
        """Take note that a step has been handed to the devices."""
        now = time.monotonic()
        if self._num_steps:  # the first sets up connections, and says little of the others
            self._slowest_seconds = max(self._slowest_seconds, now - self._last)
        self._num_steps = self._num_steps + 1
        self._last = now
        self._process.step_done(step)

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Time inside counts as no step."""
        self._process.rest()
        try:
            yield
        finally:
            self._last = time.monotonic()
            self._process.resume()

    def check_progress(self, reports: Mapping[int, hosts.Report]) -> hosts.Verdict | None:
        """Warn of stuck processes, once for each step at which they are stuck; then end all."""
        assert self._hang_seconds is not None
        limit = max(self._hang_seconds, SLOW_STEPS * self._slowest_seconds)
        stuck = find_stuck(reports, limit)
        if not stuck:
            return None
        first = reports[stuck[0]]
        who = ", ".join(self._process.name(process) for process in stuck)
        others = {reports[process].step for process in reports if process not in stuck}
        ahead = (
            f", while the others have reached step {max(s or 0 for s in others)}" if others else ""
        )
        message = f"hangs: {who} finished no step for {first.idle_seconds:.0f} s after step {first.step}{ahead}."
        place = stuck, first.progress
        if self._warned_of != place:
            self._warned_of = place
            self._process.warn(
                f"{message} At {2 * limit:.0f} s the run ends (logging.hang_seconds).", stuck
            )
        if find_stuck(reports, 2 * limit):
            return hosts.Verdict(
                message=f"{message} The run ends; start the same command again.",
                exit_code=exits.LOST,
            )
        return None


def find_stuck(reports: Mapping[int, hosts.Report], limit: float) -> tuple[int, ...]:
    """Processes that are behind, if steps have stopped for longer than `limit` seconds.

    A step needs all processes, so soon all of them wait; those that have done the least are at fault. A process that
    has done no more and is busy with something else (a pause) is given time.
    """
    running = {process: report for process, report in reports.items() if not report.has_ended}
    if not running:
        return ()
    least = min(report.progress for report in running.values())
    behind = {
        process: report.idle_seconds
        for process, report in running.items()
        if report.progress == least
    }
    if any(idle is None or idle <= limit for idle in behind.values()):
        return ()
    return tuple(sorted(behind))


def newest_checkpoint(folder: pathlib.Path) -> int | None:
    """The step of the newest complete checkpoint, read without the store, which may be saving."""
    return max(CheckpointReader(folder).all_steps(), default=None)
