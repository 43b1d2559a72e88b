"""Parts that the training loop asks after its steps: each knows when it is due and what it does.

`session` builds them and gives each the others that it uses. None knows the network or the kinds of
evaluators. `Hook` is the protocol of those that look at every step.
"""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

import jax

from vit_jax import hosts
from vit_jax.checkpoint import CheckpointStore
from vit_jax.config import CheckpointConfig, RunSteps
from vit_jax.data.unreadable import TooManyUnreadable, UnreadableLog
from vit_jax.storage.files import JsonObject
from vit_jax.train.cadence import Cadence, ScheduledEvaluator, run_all
from vit_jax.train.early_stopping import EarlyStopping
from vit_jax.train.lifecycle.interruption import Interrupted, Interruption
from vit_jax.train.lifecycle.lock import WorkdirLock
from vit_jax.train.lifecycle.watchdog import Watchdog
from vit_jax.train.metrics import READABLE_IMAGES, require_finite
from vit_jax.train.progress import ESTIMATE_AFTER_STEPS, Display, TrainingClock, estimate_text
from vit_jax.train.state import TrainState, items_of
from vit_jax.train.writers import Writers

DeviceMetrics = Mapping[str, jax.Array]
Metrics = dict[str, float]
OpenBetweenSteps = Callable[[], contextlib.AbstractContextManager[None]]
"""Opens a context in which no step runs: see `BetweenSteps`."""
MOST_LINES = 25
"""Number of lines that a run shows unless it takes long."""
SECONDS_BETWEEN_LINES = 30
"""Training time after which a due step gets a line in any case."""


class Hook(Protocol):
    """A part of the loop that looks at every step, such as the profiler and the watchdog."""

    def after_step(self, step: int, metrics: DeviceMetrics) -> None:
        """Take the metrics of a step that the devices may still compute."""


@dataclasses.dataclass
class BetweenSteps:
    """Opens contexts between steps: clock and watchdog stop, transfers to the host are allowed."""

    clock: TrainingClock
    watchdog: Watchdog
    workdir: WorkdirLock

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        """Open the context; raises WorkdirLost if the folder is not the run's any more."""
        with self.clock.pause(), self.watchdog.pause(), jax.transfer_guard("allow"):
            self.workdir.check()
            yield


@dataclasses.dataclass
class UnreadableImages:
    """Ends the run if too many images cannot be read, or none of a batch; the state is saved first.

    Attributes:
      log: records that this process could not read.
      emptied: steps without a readable image, the same in every process.
    """

    log: UnreadableLog
    interruption: Interruption
    emptied: list[int] = dataclasses.field(default_factory=list, init=False)

    def after_step(self, step: int, metrics: DeviceMetrics) -> None:
        """Ask all processes to stop if this one has met too many unreadable images."""
        if self.log.problem:
            self.interruption.request()

    def note(self, step: int, num_readable: float) -> None:
        """Record a step by its number of readable images over all processes."""
        if num_readable == 0:
            self.emptied.append(step)

    def find_error(self, step: int) -> TooManyUnreadable | None:
        """Return the error if a process has a reason to stop, the same in all; `step` is saved."""
        problems = [problem for problem in hosts.gather(self.log.problem) if problem]
        if self.emptied and not problems:
            problems.append(
                f"Step {self.emptied[0]}: no image of the batch can be read. "
                "Replace them, or use a larger global_batch."
            )
        if not problems:
            return None
        return TooManyUnreadable(f"{problems[0]} The state after step {step} is saved.")

    def require_readable(self, step: int) -> None:
        """Raise the error of `find_error`, if there is one."""
        error = self.find_error(step)
        if error is not None:
            raise error


@dataclasses.dataclass
class Divergence:
    """Ends the run at a step whose metrics are not finite, with a record of the step.

    Args:
      pause: opens a context between steps.
      wait_for_saves: returns when checkpoints are on disk.
      record: from a step and its metrics, writes the record and returns a sentence on it.
    """

    pause: OpenBetweenSteps
    wait_for_saves: Callable[[], None]
    record: Callable[[int, Metrics], str]

    def check(self, step: int, metrics: Metrics) -> None:
        """Raise FloatingPointError if loss, gradient or parameters are not finite."""
        try:
            require_finite(step, metrics)
        except FloatingPointError as error:
            with self.pause():
                self.wait_for_saves()
                advice = self.record(step, metrics)
            raise FloatingPointError(f"{error} {advice}") from None


@dataclasses.dataclass
class MetricsLog:
    """Writes the metrics of a step when they are due, also after the last step.

    Attributes:
      wall_seconds: returns the seconds that the run has taken.
      goodput: returns the share of them in which it took steps.
      latest: the metrics written last; the summary repeats them.
    """

    cadence: Cadence
    workdir: WorkdirLock
    store: CheckpointStore
    unreadable: UnreadableImages
    wall_seconds: Callable[[], float]
    goodput: Callable[[], float]
    writers: Writers
    latest: Metrics = dataclasses.field(default_factory=dict, init=False)

    def write(self, step: int, metrics: Metrics) -> None:
        """Write the metrics of a step if they are due; raise errors of saves in the background."""
        if not self.cadence.is_due(step):
            return
        self.workdir.check()
        self.store.check()
        num_unreadable = len(self.unreadable.log.list_met(step))
        self.latest = {
            **metrics,
            "unreadable_images": num_unreadable,
            "wall_seconds": self.wall_seconds(),
            "goodput": self.goodput(),
        }
        self.writers.write(step, self.latest)


@dataclasses.dataclass
class Progress:
    """Shows metrics and the time left: at every step in a bar, or at some of the due steps in a line.

    A line comes with the last step, after each 1/`MOST_LINES` of the run, and when the last one is
    `SECONDS_BETWEEN_LINES` old.

    Args:
      cadence: steps that may have a line.
      start_step: steps before this start of the command.
      total_steps: number of steps of the run.
      later_steps: steps of the runs that follow in the same command.
      platform: platform of the devices.
    """

    display: Display
    clock: TrainingClock
    cadence: Cadence
    _: dataclasses.KW_ONLY
    start_step: int
    total_steps: int
    later_steps: int
    platform: str

    def __post_init__(self) -> None:
        self._last_line_step = -math.inf
        self._last_line_seconds = 0.0

    def show(self, step: int, metrics: Metrics) -> None:
        """Show metrics and rates of a step."""
        self.display.advance()
        steps_of_all_runs = self.total_steps + self.later_steps
        if step == self.start_step + ESTIMATE_AFTER_STEPS:
            seconds = self.clock.seconds_left(step, steps_of_all_runs)
            self.display.say(estimate_text(seconds, self.platform))
        if not (self.display.is_bar or self._is_line_due(step)):
            return
        seconds_to_end = None
        if self.later_steps:
            seconds_to_end = self.clock.seconds_left(step, steps_of_all_runs)
        seconds_left = self.clock.seconds_left(step, self.total_steps)
        self.display.show(step, metrics, seconds_left, seconds_to_end)

    def _is_line_due(self, step: int) -> bool:
        """Return whether a step gets a line, and note its place and time."""
        if not self.cadence.is_due(step):
            return False
        seconds = self.clock.seconds
        is_last = step == self.total_steps
        is_far = step - self._last_line_step >= self.total_steps / MOST_LINES
        is_old = seconds - self._last_line_seconds >= SECONDS_BETWEEN_LINES
        if not (is_last or is_far or is_old):
            return False
        self._last_line_step = step
        self._last_line_seconds = seconds
        return True


@dataclasses.dataclass
class StepReport:
    """Checks, logs and shows the metrics of a step, once its devices have computed them."""

    unreadable: UnreadableImages
    divergence: Divergence
    clock: TrainingClock
    log: MetricsLog
    progress: Progress

    def __call__(self, step: int, metrics: Metrics) -> None:
        """Report a step; a step without a readable image, whose loss means nothing, is skipped."""
        num_readable = metrics.pop(READABLE_IMAGES)
        self.unreadable.note(step, num_readable)
        if num_readable == 0:
            return
        self.divergence.check(step, metrics)
        metrics |= self.clock.rates(step)
        self.log.write(step, metrics)
        self.progress.show(step, metrics)


@dataclasses.dataclass
class StopRequest:
    """Asks once after each step whether the run has to end: by a signal or by unreadable images."""

    interruption: Interruption
    unreadable: UnreadableImages
    total_steps: int

    def is_requested(self) -> bool:
        """Return whether the run has to end after this step, the same in every process."""
        is_requested = self.interruption.is_requested()
        return is_requested or bool(self.unreadable.emptied)

    def make_error(self, step: int) -> Interrupted:
        """Return the error that ends the run after a step, which is saved."""
        return Interrupted(
            f"stopped after step {step} of {self.total_steps}, which is saved; "
            "the same command resumes it"
        )


class EndAtFraction:
    """The end of a run at a fraction of its steps: after the last evaluation up to there.

    Raises:
      ValueError: there is no evaluation up to there.
    """

    def __init__(self, steps: RunSteps, fraction: float | None):
        self._step: int | None = None
        if fraction is None:
            return
        num_evaluations = int(fraction * steps.total) // steps.evaluate_every
        if num_evaluations == 0:
            raise ValueError(
                f"config.evaluation.every: the first evaluation, after {steps.evaluate_every} "
                f"steps, must be within {fraction:.0%} of the {steps.total} steps. "
                "Evaluate more often, or pause later."
            )
        self._step = num_evaluations * steps.evaluate_every

    def is_due(self, step: int) -> bool:
        """Return whether this is the last step before the pause."""
        return step == self._step

    def is_over(self, step: int) -> bool:
        """Return whether the run is not to take this step."""
        return self._step is not None and step > self._step


@dataclasses.dataclass
class Evaluation:
    """Runs the evaluators that are due, and notes, writes and shows their results."""

    evaluators: Sequence[ScheduledEvaluator]
    writers: Writers
    display: Display
    early_stopping: EarlyStopping
    _latest_step: int = dataclasses.field(default=0, init=False)
    _latest_results: Metrics = dataclasses.field(default_factory=dict, init=False)

    def is_due(self, step: int) -> bool:
        """Return whether an evaluator is due after a step."""
        return any(evaluator.cadence.is_due(step) for evaluator in self.evaluators)

    def has_unfinished(self, step: int) -> bool:
        """Return whether evaluators are due after a step and have not all ended."""
        return self.is_due(step) and step != self._latest_step

    def run_due(self, step: int, state: TrainState) -> Metrics:
        """Return the results of the evaluators that are due; none if none is.

        Raises:
          Interrupted: the run has to stop, which does not wait for an evaluation to end.
          TooManyUnreadable: in every process.
        """
        due = [evaluator for evaluator in self.evaluators if evaluator.cadence.is_due(step)]
        results = run_all(due, state)
        if results:
            self.writers.write(step, results)
            self.display.show_results(step, results)
        self.early_stopping.note(step, results)
        self._latest_step = step
        self._latest_results = results
        return results

    def results_after(self, step: int) -> Metrics | None:
        """Return the results of the evaluators that were due after a step; None without any."""
        if step == self._latest_step and self._latest_results:
            return self._latest_results
        return None

    def run_all(self, state: TrainState) -> Metrics:
        """Return the results of all evaluators, whether due or not."""
        return run_all(self.evaluators, state)


@dataclasses.dataclass
class Saving:
    """Saves the state when it is due, when it may be the best one, and when the run stops.

    Args:
      cadence: when a checkpoint is due.
      metadata: metadata of every checkpoint of the run.
      wall_seconds: returns the seconds that the run has taken.
      step_seconds: returns the part of them in which it took steps.
    """

    store: CheckpointStore
    keeping: CheckpointConfig
    cadence: Cadence
    pause: EndAtFraction
    metadata: JsonObject
    early_stopping: EarlyStopping
    unreadable: UnreadableImages
    writers: Writers
    wall_seconds: Callable[[], float]
    step_seconds: Callable[[], float]

    def wait(self) -> None:
        """Return when all checkpoints are on disk; raise SaveError if one is not."""
        self.store.wait()

    def is_due(self, step: int) -> bool:
        """Return whether a checkpoint is due after a step, whatever its results."""
        return self.cadence.is_due(step) or self.pause.is_due(step)

    def save_if_due_or_best(
        self,
        step: int,
        state: TrainState,
        results: Metrics,
    ) -> None:
        """Save the state after a step if that is due, or its results may be the best ones."""
        is_best_candidate = self.keeping.keep_best and self.keeping.best_metric in results
        if is_best_candidate or self.is_due(step):
            self.save(step, state, results, owes_evaluation=False)

    def save(
        self,
        step: int,
        state: TrainState,
        results: Metrics,
        *,
        owes_evaluation: bool,
    ) -> None:
        """Save the state.

        Args:
          step: steps done.
          state: after this step.
          results: values of the evaluators that were due; empty if none was.
          owes_evaluation: evaluators were due and have not ended; the resumed run repeats them.
        """
        metadata = {
            **self.metadata,
            "wall_seconds": self.wall_seconds(),
            "step_seconds": self.step_seconds(),
            "owes_evaluation": owes_evaluation,
            "unreadable_records": hosts.gather(self.unreadable.log.list_met(step)),
            **self.early_stopping.metadata(),
        }
        self.writers.flush()
        self.store.save(
            step,
            items_of(state),
            metadata=metadata,
            metrics=self._select_metrics(results),
        )

    def complete(self, step: int, results: Metrics) -> None:
        """Add the results of an owed evaluation to a checkpoint."""
        metadata = {"owes_evaluation": False, **self.early_stopping.metadata()}
        self.store.complete(step, metadata=metadata, metrics=self._select_metrics(results))

    def _select_metrics(self, results: Metrics) -> Metrics:
        """Return the metrics of a checkpoint; none if the store could not compare the best one."""
        best = results.get(self.keeping.best_metric, math.nan)
        return results if math.isfinite(best) else {}
