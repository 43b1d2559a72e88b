"""SIGTERM and Ctrl-C end a run after the step they arrive in, with a checkpoint; a second Ctrl-C ends it at once.

A platform that reclaims a machine sends such a SIGTERM. A running evaluation is cancelled; the resumed run repeats it.

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
    """The run was interrupted; its state is saved."""


class Paused(Interrupted):
    """The run has reached the fraction of its steps that it was to be trained to; its state is saved."""

    def __init__(self, step: int, total: int):
        super().__init__(f"paused after step {step} of {total}, which is saved")
        self.total = total


class Interruption:
    """Context in which signals are recorded, to take effect after a step.

    With several processes JAX's own preemption service, which sees SIGTERM in any of them from the moment they have
    joined, makes all agree on the step, or the batch of an evaluation, after which they stop.
    """

    def __init__(self) -> None:
        self._requested = False
        self._num_questions = (
            0  # over all runs of the command: the service counts them, and passes over none
        )
        self._previous: dict[int, signal.Handlers | Callable | int | None] = {}
        self._notice = Notice()

    def __enter__(self) -> Self:
        signals = (signal.SIGINT,) if jax.process_count() > 1 else (signal.SIGINT, signal.SIGTERM)
        for number in signals:
            self._previous[number] = signal.signal(number, self._note)
        self._notice.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._notice.stop()
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def is_requested(self) -> bool:
        """Return whether the run has to end after this step, equal in every process. Call once after each step."""
        self._num_questions += 1
        if jax.process_count() > 1:
            return bool(multihost_utils.reached_preemption_sync_point(self._num_questions))
        return self._requested

    def request(self) -> None:
        """End the run after the next step that all processes agree on, as a signal does."""
        if not self._requested and jax.process_count() > 1:
            os.kill(os.getpid(), signal.SIGTERM)
        self._requested = True

    def check(self) -> None:
        """The same after a batch of an evaluation: raises `Interrupted` if the run has to end."""
        if self.is_requested():
            raise Interrupted("stopped while evaluating; the same command resumes the run")

    def _note(self, number: int, frame: FrameType | None) -> None:
        is_second = self._requested
        self._requested = True
        if number == signal.SIGINT and (is_second or self._num_questions == 0):
            raise KeyboardInterrupt
        if self._num_questions == 0:  # one process; with several the service has the signal
            # An exception from here would be lost where Python happens to be in a callback of the garbage collector.
            exits.say(
                "stopped before the first step: there is nothing to save; the same command starts again"
            )
            exits.leave_at_once(exits.PREEMPTED)
        if jax.process_count() > 1:  # passed on to the service that sees SIGTERM
            os.kill(os.getpid(), signal.SIGTERM)
