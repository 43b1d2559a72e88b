"""A run around its loop: what is opened before the first step, and the summary after the last."""

import contextlib
import dataclasses
import itertools
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import jax

from vit_jax import hosts
from vit_jax.arrays import Batch
from vit_jax.checkpoint import CheckpointReader, CheckpointStore
from vit_jax.config.directions import require_direction
from vit_jax.config.metric_names import Mode
from vit_jax.data.unreadable import UnreadableLog
from vit_jax.storage.files import JsonObject
from vit_jax.train import hooks, overview
from vit_jax.train.assembly import Assembly, LiveState
from vit_jax.train.cadence import Cadence, ScheduledEvaluator
from vit_jax.train.early_stopping import EarlyStopping
from vit_jax.train.evaluations import build_evaluations, with_best_metric, with_stated_mode
from vit_jax.train.inputs import Datasets, open_train_batches
from vit_jax.train.lifecycle.interruption import Interruption, Paused
from vit_jax.train.lifecycle.lock import WorkdirLock
from vit_jax.train.lifecycle.watchdog import Watchdog
from vit_jax.train.metrics import LateMetrics
from vit_jax.train.profiling import Profiler, peak_flops
from vit_jax.train.progress import Display, TrainingClock
from vit_jax.train.run_files import last_training_line, remove_divergence, write_summary
from vit_jax.train.start import restore, start_state
from vit_jax.train.state import TrainState
from vit_jax.train.writers import Writers

if TYPE_CHECKING:
    from vit_jax.weights.fit import Fitted


@dataclasses.dataclass(kw_only=True, eq=False)
class Session:
    """A run that `loop.train` trains: what its caller gives, and the parts that `begin` adds.

    Args:
      run: the parts of the run, from `assemble`.
      data: the open splits; the run is evaluated on `data.test`.
      workdir: the claimed folder.
      interruption: interruption of the command; may end the run after any step.
      fitted: the weights that a fine-tuning run starts with.
      further: evaluations besides those of the config, for custom evaluators of the caller.
      pause_fraction: fraction of the steps; the run ends, saved, after the last evaluation up to
        there.
      later_steps: steps of the runs that follow in the same command, for the time that is shown.

    Attributes:
      folder: the workdir.
      total_steps: steps of the complete run.
      config: config of the run, with the best metric and its direction resolved.
      own_checkpoints: reader of the checkpoints in the workdir.
      metadata: metadata of every checkpoint of the run.
      resumed_metadata: metadata of the checkpoint that the run continues.
      live_state: the state after the steps done; a step replaces it.
      start_step: steps done before this start of the command.
      batches: placed batches of the next steps.
      writers: writers of metrics.
      store: store of checkpoints.
      display: the console.
      clock: the time in steps.
      watchdog: reports steps to the other processes.
      between_steps: opens a context in which clock and watchdog pause, and transfers are allowed.
      profiler, late_metrics, unreadable: look at every step; see `step_hooks`.
      step_hooks: parts that look at every step, in this order.
      log: writes the metrics of steps, one step late.
      early_stopping, pause, stop: know when the run ends before its last step; see `is_over`,
        `before_step` and `loop.take_steps`.
      evaluation, saving: know when they are due, and need the state.
    """

    run: Assembly
    data: Datasets
    workdir: WorkdirLock
    interruption: Interruption
    fitted: "Fitted | None" = None
    further: Sequence[ScheduledEvaluator] = ()
    pause_fraction: float | None = None
    later_steps: int = 0

    def __post_init__(self) -> None:
        self._began = time.perf_counter()
        self.folder = self.workdir.folder
        self.total_steps = self.run.steps.total

    @contextlib.contextmanager
    def begin(self) -> Iterator[None]:
        """Open what the loop needs.

        Nothing is written into the workdir before the code and the config of the user have been
        checked.
        """
        self.config = with_stated_mode(with_best_metric(self.run.config, self.data), self.further)
        self.pause = hooks.EndAtFraction(self.run.steps, self.pause_fraction)
        evaluators = build_evaluations(self.run, self.data, self.interruption.check)

        self.own_checkpoints = CheckpointReader(self.folder)
        self.metadata = overview.checkpoint_metadata(self.run, self.data, self.fitted)
        state, origin = start_state(self.run, self.fitted, self.own_checkpoints, self.metadata)
        self.live_state = LiveState(self.run, state)
        self.start_step = self.live_state.step
        self.resumed_metadata = self._read_resumed_metadata()
        self.run.trace_train_step()  # the last check of the user's code

        with contextlib.ExitStack() as stack:
            self.writers = self._open_writers(stack)
            self.early_stopping = EarlyStopping(self.config, self.resumed_metadata)
            self.store = self._open_store(stack)
            self.display = self._open_display(stack)
            self._say_opening(origin)
            self._compile_step()

            self.profiler = self._open_profiler(stack)
            batches, log = self._open_batches(stack)
            self.unreadable = hooks.UnreadableImages(log, self.interruption)
            stack.enter_context(jax.transfer_guard("disallow"))
            self.clock = self._build_clock()
            self.watchdog = self._start_watchdog(stack)
            self.between_steps = hooks.BetweenSteps(self.clock, self.watchdog, self.workdir)

            self.log = self._build_log()
            self.late_metrics = LateMetrics(self._build_report())
            self.batches = self.clock.time_input(batches, self.late_metrics.is_busy)
            self.step_hooks = (self.late_metrics, self.profiler, self.watchdog, self.unreadable)
            self.stop = hooks.StopRequest(self.interruption, self.unreadable, self.total_steps)
            self.evaluation = self._build_evaluation([*evaluators, *self.further])
            self.saving = self._build_saving()
            yield

    def _read_resumed_metadata(self) -> JsonObject:
        """Return the metadata of the checkpoint that the run continues."""
        if self.own_checkpoints.all_steps():
            return self.own_checkpoints.metadata(self.start_step)
        return {"wall_seconds": 0.0, "step_seconds": 0.0}

    def _open_writers(self, stack: contextlib.ExitStack) -> Writers:
        """Open the writers of metrics; remove the record of a divergence that may be repeated."""
        is_first = hosts.is_first()
        writers = Writers(self.folder, self.config, self.start_step, enabled=is_first)
        stack.enter_context(contextlib.closing(writers))
        if is_first:
            # An earlier start of the run has written it; this one repeats the step.
            remove_divergence(self.folder)
        return writers

    def _open_store(self, stack: contextlib.ExitStack) -> CheckpointStore:
        """Open the store of checkpoints."""
        keeping = self.config.checkpoint
        best_mode: Mode = "max"
        if keeping.keep_best:
            best_mode = require_direction(self.config, keeping.best_metric).mode
        store = CheckpointStore(
            self.folder,
            keep_latest=keeping.keep_latest,
            keep_best=keeping.keep_best,
            best_metric=keeping.best_metric,
            best_mode=best_mode,
            check_workdir=self.workdir.check,
        )
        stack.callback(store.close)
        return store

    def _open_display(self, stack: contextlib.ExitStack) -> Display:
        """Open the display."""
        display = Display(self.total_steps, self.start_step, enabled=hosts.is_first())
        return stack.enter_context(contextlib.closing(display))

    def _say_opening(self, origin: str) -> None:
        """Say what is trained, which checkpoints are kept, and where the run begins."""
        keeping = self.config.checkpoint
        self.display.say(overview.opening(self.run, self.data, self.folder))
        if keeping.keep_best:
            direction = require_direction(self.config, keeping.best_metric)
            self.display.say(f"best     {keeping.best_metric}, {direction}")
        self.display.say(origin)

    def _compile_step(self) -> None:
        """Compile the training step."""
        began = time.perf_counter()
        self.live_state.compile_step()
        seconds = time.perf_counter() - began
        self.display.say(f"compiled the training step in {seconds:.1f} s")

    def _open_profiler(self, stack: contextlib.ExitStack) -> Profiler:
        """Open the profiler."""
        profiler = Profiler(self.folder, self.config.logging, enabled=hosts.is_first())
        return stack.enter_context(contextlib.closing(profiler))

    def _open_batches(self, stack: contextlib.ExitStack) -> tuple[Iterator[Batch], UnreadableLog]:
        """Open the training batches; return them, and their log of unreadable images so far."""
        batches, log = stack.enter_context(
            open_train_batches(self.run, self.data.train, self.start_step)
        )
        records = self.resumed_metadata.get("unreadable_records", [])
        log.resume(self.start_step, _select_own_part(records))
        log.defer_errors()  # the state is saved first
        return batches, log

    def _build_clock(self) -> TrainingClock:
        """Start the clock of the steps."""
        return TrainingClock(
            self.start_step,
            self.run.images,
            self.run.training_flops,
            peak_flops(),
        )

    def _start_watchdog(self, stack: contextlib.ExitStack) -> Watchdog:
        """Start the watchdog. The last context that is entered is the first to see an error."""
        watchdog = Watchdog(self.folder, self.start_step, self.config.logging.hang_seconds)
        return stack.enter_context(watchdog)

    def _build_log(self) -> hooks.MetricsLog:
        """Build the log of the metrics of steps."""
        return hooks.MetricsLog(
            Cadence(self.run.steps.log_every, self.total_steps),
            self.workdir,
            self.store,
            self.unreadable,
            self.wall_seconds,
            self.goodput,
            self.writers,
        )

    def _build_report(self) -> hooks.StepReport:
        """Build the part that takes the metrics of each step, one step late."""
        divergence = hooks.Divergence(
            self.between_steps,
            self.store.wait,
            self._record_divergence,
        )
        progress = hooks.Progress(
            self.display,
            self.clock,
            Cadence(self.run.steps.log_every, self.total_steps),
            start_step=self.start_step,
            total_steps=self.total_steps,
            later_steps=self.later_steps,
            platform=self.run.compiler.platform,
        )
        return hooks.StepReport(
            self.unreadable,
            divergence,
            self.clock,
            self.log,
            progress,
        )

    def _build_evaluation(self, evaluators: Sequence[ScheduledEvaluator]) -> hooks.Evaluation:
        """Build the part that evaluates."""
        return hooks.Evaluation(
            evaluators,
            self.writers,
            self.display,
            self.early_stopping,
        )

    def _build_saving(self) -> hooks.Saving:
        """Build the part that saves."""
        return hooks.Saving(
            self.store,
            self.config.checkpoint,
            Cadence(self.run.steps.checkpoint_every, self.total_steps),
            self.pause,
            self.metadata,
            self.early_stopping,
            self.unreadable,
            self.writers,
            self.wall_seconds,
            self.step_seconds,
        )

    def _record_divergence(self, step: int, metrics: dict[str, float]) -> str:
        """Write `divergence.json`; return a sentence that tells how to examine the step."""
        from vit_jax.train.divergence import record_divergence

        return record_divergence(self.folder, self.run, self.data, step, metrics)

    def is_over(self) -> bool:
        """Return whether the last step has been taken, or the run stops early."""
        return self.live_state.step >= self.total_steps or bool(
            self.early_stopping.reason_to_stop()
        )

    def before_step(self, step: int) -> None:
        """Raise Paused if the run pauses before this step; start the trace that begins with it."""
        if self.pause.is_over(step):
            with self.between_steps():
                self.store.wait()
            raise Paused(step - 1, self.total_steps)
        self.profiler.before_step(step)

    def wall_seconds(self) -> float:
        """Return the seconds that the run has taken, those before it was resumed included."""
        seconds: float = self.resumed_metadata["wall_seconds"]
        return seconds + time.perf_counter() - self._began

    def step_seconds(self) -> float:
        """Return the part of `wall_seconds` in which the run took steps."""
        # Checkpoints before version 0.5.0 do not have it.
        seconds: float = self.resumed_metadata.get("step_seconds", 0.0)
        return seconds + self.clock.seconds

    def goodput(self) -> float:
        """Return the share of the time of the run in which it took steps."""
        return self.step_seconds() / self.wall_seconds()

    def run_owed_evaluation(self) -> None:
        """Run the evaluation that an interruption ended; add its results to the checkpoint."""
        if not self.resumed_metadata.get("owes_evaluation"):
            return
        with self.between_steps():
            results = self.evaluation.run_due(self.start_step, self.live_state.read())
            self.saving.complete(self.start_step, results)

    def summarize(self) -> JsonObject:
        """Return the content of `summary.json`; with early stopping, of the best checkpoint kept."""
        step = self.live_state.step
        is_stopped_early = step < self.total_steps
        with self.between_steps():
            self.unreadable.require_readable(step)
            if is_stopped_early:
                reason = self.early_stopping.reason_to_stop()
                self.display.say(f"step {step:>6}/{self.total_steps}  {reason}")
            self.store.wait()
            best_step = self.early_stopping.best_of(self.own_checkpoints.all_steps())
            state, results = self._measure_result(best_step)

            training_metrics = self.log.latest
            if step == self.start_step:
                training_metrics = last_training_line(self.folder)
            num_images = len(self.data.test)
            num_missing = num_images - int(results.get(f"{self.data.test_name}_images", num_images))
            summary = overview.summary(
                self.run,
                state,
                step,
                training_metrics,
                results,
                num_missing,
            )
            summary["goodput"] = self.goodput()
            if best_step is not None:
                summary["best_step"] = best_step
                summary["stopped_early"] = is_stopped_early
        return summary

    def _measure_result(self, best_step: int | None) -> tuple[TrainState, dict[str, float]]:
        """Return the state that is the result of the run, and the results of all evaluators on it."""
        step = self.live_state.step
        if best_step not in (None, step):
            self.live_state.delete()  # there may be no room for both states
            state = restore(
                self.run,
                self.own_checkpoints,
                best_step,
                self.metadata,
            )
            return state, self.evaluation.run_all(state)

        state = self.live_state.read()
        results = None
        if step == self.total_steps:  # all evaluators are due after the last step
            results = self.evaluation.results_after(step)
        if results is None:
            results = self.evaluation.run_all(state)
        return state, results

    def publish(self, summary: JsonObject) -> JsonObject:
        """Write and show the summary, when everything else of the run is closed; return it."""
        summary["wall_seconds"] = self.wall_seconds()
        if hosts.is_first():
            write_summary(self.folder, summary)
            text = overview.closing(summary, self.folder, split=self.data.test_name)
            print(text, flush=True)
        return summary


def _select_own_part(parts: Sequence[Sequence[int]]) -> Sequence[int]:
    """Return the unreadable records of this process, or of all if their number has changed."""
    if len(parts) == jax.process_count():
        return parts[jax.process_index()]
    return list(itertools.chain.from_iterable(parts))
