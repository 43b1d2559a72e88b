"""End a run after SIGTERM or Ctrl-C with a checkpoint; a second Ctrl-C ends it at once.

A platform that reclaims a machine sends SIGTERM. A running evaluation is cancelled; the resumed run
repeats it.

Before the first step there is nothing to save, and either signal ends the run at once.
"""

import os
import signal
from collections.abc import Callable
from types import FrameType
from typing import Self

import jax
from jax.experimental import multihost_utils

from vit_jax.hosts import exits
from vit_jax.hosts.notice import Notice


class Interrupted(Exception):
    """The run ends; its state is saved when the error leaves `train`."""


class Paused(Interrupted):
    """The run is trained to the fraction of its steps that its caller wants; its state is saved."""

    def __init__(self, step: int, total: int):
        super().__init__(f"paused after step {step} of {total}, which is saved")
        self.total = total


class Interruption:
    """Context in which signals are recorded, to take effect after a step.

    With several processes JAX's preemption service, which sees SIGTERM in any of them once they
    have joined, makes all agree on the step, or the batch of an evaluation, after which they stop.
    """

    def __init__(self) -> None:
        self._requested = False
        # Over all runs of the command: the service counts queries and expects every number.
        self._num_queries = 0
        self._previous: dict[int, signal.Handlers | Callable | int | None] = {}
        self._notice = Notice()

    def __enter__(self) -> Self:
        signals = [signal.SIGINT]
        if jax.process_count() == 1:  # JAX's service handles SIGTERM otherwise
            signals.append(signal.SIGTERM)
        for number in signals:
            self._previous[number] = signal.signal(number, self._note)
        self._notice.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._notice.stop()
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def is_requested(self) -> bool:
        """Return whether the run has to end after this step, the same in every process.

        Call it once after each step.
        """
        self._num_queries += 1
        if jax.process_count() > 1:
            return bool(multihost_utils.reached_preemption_sync_point(self._num_queries))
        return self._requested

    def request(self) -> None:
        """End the run after the next step that all processes agree on, as a signal does."""
        if not self._requested and jax.process_count() > 1:
            os.kill(os.getpid(), signal.SIGTERM)
        self._requested = True

    def check(self) -> None:
        """Raise Interrupted if the run has to end after this batch of an evaluation."""
        if self.is_requested():
            raise Interrupted("stopped while evaluating; the same command resumes the run")

    def _note(self, number: int, frame: FrameType | None) -> None:
        is_second = self._requested
        self._requested = True
        is_before_first_step = self._num_queries == 0
        if number == signal.SIGINT and (is_second or is_before_first_step):
            raise KeyboardInterrupt
        if is_before_first_step:  # in the only process; with several the service has the signal
            # Python may be in a callback of the garbage collector, which would lose an exception.
            exits.say("stopped before the first step: there is nothing to save; repeat the command")
            exits.leave_at_once(exits.PREEMPTED)
        if jax.process_count() > 1:  # passed on to the service that sees SIGTERM
            os.kill(os.getpid(), signal.SIGTERM)
