"""Detect that steps have stopped: name the processes that are behind, then end the run.

The watchdog reads the reports that processes exchange every second (`hosts.peers`), so that a step
costs nothing. Compiling, evaluating and waiting for a checkpoint are no steps and have no time
limit.
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

SLOW_STEPS = 3
"""A step hangs if it takes this many times as long as the slowest, and `hang_seconds`."""


class Watchdog:
    """Context of the loop over steps; enter it last, so that it is the first to see an error.

    After `hang_seconds` without a step it warns; after twice as many it ends the run. None: never.
    Steps and errors are reported to `process`, by default this one.
    """

    def __init__(
        self,
        folder: pathlib.Path,
        start_step: int,
        hang_seconds: float | None,
        process: hosts.PeerMonitor | None = None,
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
        rule = None
        if self._hang_seconds is not None:
            rule = self.check_progress
        self._process.watch_steps(
            rule,
            lambda: newest_checkpoint(self._folder),
            self._start_step,
        )
        self._last = time.monotonic()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._process.rest()
        if error is not None and not isinstance(error, Interrupted):
            # Before anything is closed: closing may wait for processes that wait for this one.
            self._process.fail(error)

    def after_step(self, step: int, metrics: object) -> None:
        """Take note that a step has been handed to the devices."""
        now = time.monotonic()
        if self._num_steps > 0:  # the first step sets up connections and is no measure of others
            self._slowest_seconds = max(self._slowest_seconds, now - self._last)
        self._num_steps += 1
        self._last = now
        self._process.step_done(step)

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Open a context whose time is not part of a step."""
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
        message = self._describe_stuck(reports, stuck)

        place = (stuck, reports[stuck[0]].progress)
        if self._warned_of != place:
            self._warned_of = place
            warning = f"{message} At {2 * limit:.0f} s the run ends (logging.hang_seconds)."
            self._process.warn(warning, stuck)

        if not find_stuck(reports, 2 * limit):
            return None
        return hosts.Verdict(
            message=f"{message} The run ends; start the same command again.",
            exit_code=exits.LOST,
        )

    def _describe_stuck(self, reports: Mapping[int, hosts.Report], stuck: tuple[int, ...]) -> str:
        """Return a sentence that names the stuck processes, their step, and that of the others."""
        first = reports[stuck[0]]
        who = ", ".join(map(self._process.describe, stuck))
        steps_of_others = []
        for process, report in reports.items():
            if process not in stuck:
                steps_of_others.append(report.step or 0)
        message = f"hangs: {who} finished no step for {first.idle_seconds:.0f} s"
        message += f" after step {first.step}"
        if steps_of_others:
            message += f", while the others have reached step {max(steps_of_others)}"
        return f"{message}."


def find_stuck(reports: Mapping[int, hosts.Report], limit: float) -> tuple[int, ...]:
    """Return the processes that are behind, if steps have stopped for longer than `limit` seconds.

    A step needs all processes, so that soon all of them wait; those that have done the least are at
    fault. A process that has done no more and is busy with something else (a pause) is given time.
    """
    running = {process: report for process, report in reports.items() if not report.has_ended}
    if not running:
        return ()
    least_progress = min(report.progress for report in running.values())
    behind = []
    for process, report in running.items():
        if report.progress != least_progress:
            continue
        if report.idle_seconds is None or report.idle_seconds <= limit:
            return ()
        behind.append(process)
    return tuple(sorted(behind))


def newest_checkpoint(folder: pathlib.Path) -> int | None:
    """Return the step of the newest complete checkpoint, without the store, which may be saving."""
    return max(CheckpointReader(folder).all_steps(), default=None)
