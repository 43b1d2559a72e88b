"""Parts that the training loop asks after its steps: each knows when it is due and what it does.

`session` builds them. None knows the parts of the network, the data or the other parts of a run.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence

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
from vit_jax.train.metrics import READABLE_IMAGES, LateMetrics, require_finite
from vit_jax.train.progress import ESTIMATE_AFTER_STEPS, Display, TrainingClock, estimate_text
from vit_jax.train.state import TrainState, items_of
from vit_jax.train.writers import Writers

DeviceMetrics = Mapping[str, jax.Array]
Metrics = dict[str, float]
Pausing = Callable[[], contextlib.AbstractContextManager[None]]
"""Opens a context in which no step runs: see `TrainingPause`."""


class TrainingPause:
    """Opens contexts between steps: clock and watchdog stop, transfers to the host are allowed."""

    def __init__(self, clock: TrainingClock, watchdog: Watchdog, workdir: WorkdirLock):
        self._clock = clock
        self._watchdog = watchdog
        self._workdir = workdir

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        """Open the context; raises WorkdirLost if the folder is not the run's any more."""
        with self._clock.pause(), self._watchdog.pause(), jax.transfer_guard("allow"):
            self._workdir.check()
            yield


class UnreadableImages:
    """Ends the run if too many images cannot be read, or none of a batch; the state is saved first.

    Attributes:
      log: records that this process could not read.
      emptied: steps without a readable image, the same in every process.
    """

    def __init__(self, log: UnreadableLog, interruption: Interruption):
        self.log = log
        self.emptied: list[int] = []
        self._interruption = interruption

    def after_step(self, step: int, metrics: DeviceMetrics) -> None:
        """Ask all processes to stop if this one has met too many unreadable images."""
        if self.log.problem:
            self._interruption.request()

    def note(self, step: int, num_readable: float) -> None:
        """Take the number of images of a step, over all processes, that could be read."""
        if num_readable == 0:
            self.emptied.append(step)

    def require_readable(self, step: int) -> None:
        """Raise TooManyUnreadable in every process if one has a reason to; `step` is saved."""
        problems = [problem for problem in hosts.gather(self.log.problem) if problem]
        if self.emptied and not problems:
            problems.append(
                f"Step {self.emptied[0]}: no image of the batch can be read. "
                "Replace them, or use a larger global_batch."
            )
        if problems:
            raise TooManyUnreadable(f"{problems[0]} The state after step {step} is saved.")


class Divergence:
    """Ends the run at a step whose metrics are not finite, with a record of the step.

    Args:
      pause: opens a context between steps.
      wait_for_saves: returns when checkpoints are on disk.
      record: from a step and its metrics, writes the record and returns a sentence on it.
    """

    def __init__(
        self,
        pause: Pausing,
        wait_for_saves: Callable[[], None],
        record: Callable[[int, Metrics], str],
    ):
        self._pause = pause
        self._wait_for_saves = wait_for_saves
        self._record = record

    def check(self, step: int, metrics: Metrics) -> None:
        """Raise FloatingPointError if loss, gradient or parameters are not finite."""
        try:
            require_finite(step, metrics)
        except FloatingPointError as error:
            with self._pause():
                self._wait_for_saves()
                advice = self._record(step, metrics)
            raise FloatingPointError(f"{error} {advice}") from None


class MetricsLog:
    """Writes the metrics of a step when they are due, also after the last step.

    Attributes:
      latest: the metrics written last; the summary repeats them.
    """

    def __init__(
        self,
        cadence: Cadence,
        workdir: WorkdirLock,
        store: CheckpointStore,
        unreadable: UnreadableImages,
        wall_seconds: Callable[[], float],
        writers: Writers,
    ):
        self.latest: Metrics = {}
        self._cadence = cadence
        self._workdir = workdir
        self._store = store
        self._unreadable = unreadable
        self._wall_seconds = wall_seconds
        self._writers = writers

    def write(self, step: int, metrics: Metrics) -> None:
        """Write the metrics of a step if they are due; raise errors of saves in the background."""
        if not self._cadence.is_due(step):
            return
        self._workdir.check()
        self._store.check()
        num_unreadable = len(self._unreadable.log.met_by(step))
        self.latest = {
            **metrics,
            "unreadable_images": num_unreadable,
            "wall_seconds": self._wall_seconds(),
        }
        self._writers.write(step, self.latest)


class Progress:
    """Shows metrics and the time left: at every step in a bar, when they are due in a line.

    Args:
      cadence: of lines.
      start_step: steps before this start of the command.
      total_steps: of the run.
      steps_after: of the runs that follow in the same command.
      platform: of the devices.
    """

    def __init__(
        self,
        display: Display,
        clock: TrainingClock,
        cadence: Cadence,
        *,
        start_step: int,
        total_steps: int,
        steps_after: int,
        platform: str,
    ):
        self._display = display
        self._clock = clock
        self._cadence = cadence
        self._estimate_step = start_step + ESTIMATE_AFTER_STEPS
        self._total_steps = total_steps
        self._steps_after = steps_after
        self._platform = platform

    def show(self, step: int, metrics: Metrics) -> None:
        """Show metrics and rates of a step."""
        self._display.advance()
        steps_of_all_runs = self._total_steps + self._steps_after
        if step == self._estimate_step:
            seconds = self._clock.seconds_left(step, steps_of_all_runs)
            self._display.say(estimate_text(seconds, self._platform))
        if not (self._display.is_bar or self._cadence.is_due(step)):
            return
        seconds_to_end = None
        if self._steps_after:
            seconds_to_end = self._clock.seconds_left(step, steps_of_all_runs)
        seconds_left = self._clock.seconds_left(step, self._total_steps)
        self._display.show(step, metrics, seconds_left, seconds_to_end)


class StepReports:
    """Hands on the metrics of each step one step late, so that devices never wait for the host."""

    def __init__(
        self,
        unreadable: UnreadableImages,
        divergence: Divergence,
        clock: TrainingClock,
        log: MetricsLog,
        progress: Progress,
    ):
        self._unreadable = unreadable
        self._divergence = divergence
        self._clock = clock
        self._log = log
        self._progress = progress
        self._late = LateMetrics(self._report)

    def after_step(self, step: int, metrics: DeviceMetrics) -> None:
        """Take the metrics of a step and report those of the step before."""
        self._late.push(step, metrics)

    def flush(self) -> None:
        """Report the metrics of the newest step, for which this waits."""
        self._late.flush()

    def is_busy(self) -> bool:
        """Return whether the devices still compute the newest step."""
        return self._late.is_busy()

    def _report(self, step: int, metrics: Metrics) -> None:
        num_readable = metrics.pop(READABLE_IMAGES)
        self._unreadable.note(step, num_readable)
        if num_readable == 0:  # its loss means nothing
            return
        self._divergence.check(step, metrics)
        metrics |= self._clock.rates(step)
        self._log.write(step, metrics)
        self._progress.show(step, metrics)


class StopRequest:
    """Asks once after each step whether the run has to end: by a signal or by unreadable images."""

    def __init__(self, interruption: Interruption, unreadable: UnreadableImages, total_steps: int):
        self._interruption = interruption
        self._unreadable = unreadable
        self._total_steps = total_steps

    def after_step(self, step: int) -> Interrupted | None:
        """Return the reason to end, the same in every process; None to go on."""
        is_requested = self._interruption.is_requested()
        if is_requested or self._unreadable.emptied:
            return self.make_reason(step)
        return None

    def make_reason(self, step: int) -> Interrupted:
        """Return the error that ends the run after a step, which is saved."""
        return Interrupted(
            f"stopped after step {step} of {self._total_steps}, which is saved; "
            "the same command resumes it"
        )


class Pause:
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


class Evaluation:
    """Runs the evaluators that are due, and notes, writes and shows their results."""

    def __init__(
        self,
        evaluators: Sequence[ScheduledEvaluator],
        writers: Writers,
        display: Display,
        early_stopping: EarlyStopping,
    ):
        self._evaluators = evaluators
        self._writers = writers
        self._display = display
        self._early_stopping = early_stopping
        self._latest_step = 0
        self._latest_results: Metrics = {}

    def is_due(self, step: int) -> bool:
        """Return whether an evaluator is due after a step."""
        return any(evaluator.cadence.is_due(step) for evaluator in self._evaluators)

    def after_step(self, step: int, state: TrainState) -> Metrics:
        """Return the results of the evaluators that are due; none if none is.

        Raises:
          Interrupted: the run has to stop, which does not wait for an evaluation to end.
          TooManyUnreadable: in every process.
        """
        due = [evaluator for evaluator in self._evaluators if evaluator.cadence.is_due(step)]
        results = run_all(due, state)
        if results:
            self._writers.write(step, results)
            self._display.show_results(step, results)
        self._early_stopping.note(step, results)
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
        return run_all(self._evaluators, state)


class Saving:
    """Saves the state when it is due, when it may be the best one, and when the run stops.

    Args:
      cadence: when a checkpoint is due.
      metadata: of every checkpoint of the run.
      wall_seconds: returns the seconds that the run has taken.
    """

    def __init__(
        self,
        store: CheckpointStore,
        keeping: CheckpointConfig,
        cadence: Cadence,
        pause: Pause,
        metadata: JsonObject,
        early_stopping: EarlyStopping,
        unreadable: UnreadableImages,
        writers: Writers,
        wall_seconds: Callable[[], float],
    ):
        self.wait = store.wait
        self._store = store
        self._keeping = keeping
        self._cadence = cadence
        self._pause = pause
        self._metadata = metadata
        self._early_stopping = early_stopping
        self._unreadable = unreadable
        self._writers = writers
        self._wall_seconds = wall_seconds

    def is_due(self, step: int) -> bool:
        """Return whether a checkpoint is due after a step, whatever its results."""
        return self._cadence.is_due(step) or self._pause.is_due(step)

    def after_step(
        self,
        step: int,
        state: TrainState,
        results: Metrics,
        *,
        owes_evaluation: bool,
        is_stopping: bool,
    ) -> None:
        """Save the state if there is a reason to.

        Args:
          step: steps done.
          state: after this step.
          results: of the evaluators that were due; empty if none was.
          owes_evaluation: evaluators were due and have not ended; the resumed run repeats them.
          is_stopping: the run ends with this step.
        """
        is_best_candidate = self._keeping.keep_best and self._keeping.best_metric in results
        if not (is_stopping or is_best_candidate or self.is_due(step)):
            return
        metadata = {
            **self._metadata,
            "wall_seconds": self._wall_seconds(),
            "owes_evaluation": owes_evaluation,
            "unreadable_records": hosts.gather(self._unreadable.log.met_by(step)),
            **self._early_stopping.metadata(),
        }
        self._writers.flush()
        self._store.save(
            step, items_of(state), metadata=metadata, metrics=self._select_metrics(results)
        )

    def complete(self, step: int, results: Metrics) -> None:
        """Add the results of an owed evaluation to a checkpoint."""
        metadata = {"owes_evaluation": False, **self._early_stopping.metadata()}
        self._store.complete(step, metadata=metadata, metrics=self._select_metrics(results))

    def _select_metrics(self, results: Metrics) -> Metrics:
        """Return the metrics of a checkpoint; none if the store could not compare the best one."""
        best = results.get(self._keeping.best_metric, math.nan)
        return results if math.isfinite(best) else {}
