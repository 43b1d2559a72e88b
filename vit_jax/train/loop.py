"""The training loop, once for every kind of run: steps, and what is due between them.

It takes a run's parts and a function that gives the first state; `pretrain` and `finetune` supply both.
"""

import contextlib
import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence

import jax

from vit_jax import hosts, pytree
from vit_jax.checkpoint import CheckpointReader, CheckpointStore
from vit_jax.config import RunSteps
from vit_jax.config.directions import require_direction
from vit_jax.data.unreadable import TooManyUnreadable
from vit_jax.storage.files import JsonObject
from vit_jax.train import overview
from vit_jax.train.assemble import Assembly, Datasets, open_train_batches
from vit_jax.train.cadence import Cadence, ScheduledEvaluator, run_all
from vit_jax.train.early_stopping import EarlyStopping
from vit_jax.train.evaluations import build_evaluations, with_best_metric, with_stated_mode
from vit_jax.train.lifecycle.interruption import Interrupted, Interruption, Paused
from vit_jax.train.lifecycle.lock import WorkdirLock
from vit_jax.train.lifecycle.watchdog import Watchdog
from vit_jax.train.metrics import READABLE_IMAGES, LateMetrics, require_finite
from vit_jax.train.profiling import Profiler, peak_flops
from vit_jax.train.progress import ESTIMATE_AFTER_STEPS, Display, TrainingClock, estimate_text
from vit_jax.train.replay import forget_divergence, record_divergence
from vit_jax.train.run_files import last_training_line, write_summary
from vit_jax.train.start import items_of, restore
from vit_jax.train.state import TrainState
from vit_jax.train.writers import Writers
from vit_jax.weights.fit import Fitted

FirstState = Callable[[CheckpointReader, JsonObject], tuple[TrainState, str]]
"""From the checkpoints of the run's own workdir, and the metadata that theirs must agree with, to the state to begin
with and a sentence on where it comes from."""


def train(
    run: Assembly,
    data: Datasets,
    workdir: WorkdirLock,
    first_state: FirstState,
    interruption: Interruption,
    *,
    split: str = "test",
    steps_after: int = 0,
    pause_fraction: float | None = None,
    further: Sequence[ScheduledEvaluator] = (),
    fitted: Fitted | None = None,
) -> JsonObject:
    """Train to the last step, or until it stops early, from wherever `first_state` begins; return `summary.json`.

    Args:
      run: the parts, from `assemble`.
      data: open; `data.test` is what the run is evaluated on.
      workdir: claimed.
      first_state: restores a checkpoint, fits given weights, or draws the parameters.
      interruption: of the command; may end the run after any step.
      split: what `data.test` is, the prefix of its results: "test", or "validation" in a search.
      steps_after: of the runs that follow in the same command, for the time that is shown.
      pause_fraction: of the steps; the run is saved after the last evaluation up to there, and ends.
      further: evaluations besides those of the config, for a caller with evaluators of its own.
      fitted: the weights that a fine-tuning run starts with, whose licence and preprocessing go into the metadata.

    Raises:
      ValueError: something in the config, the data or the checkpoints that the user can change.
      FloatingPointError: the loss, a gradient or a parameter is not finite; `divergence.json` says at which step.
      SaveError: a checkpoint could not be written.
      WorkdirLost: the folder is not the run's any more.
      Interrupted: SIGTERM or Ctrl-C; the state is saved.
      Paused: it has been trained to `pause_fraction`.
    """
    began = time.perf_counter()
    config = with_best_metric(run.config, data)
    total = run.steps.total
    is_first = hosts.is_first()
    config = with_stated_mode(config, further)
    folder = workdir.folder
    keeping = config.checkpoint
    pause_step = _pause_step(run.steps, pause_fraction)
    with contextlib.ExitStack() as stack:
        evaluations = [
            *build_evaluations(run, data, split, interruption.check),
            *further,
        ]  # or refuses the config
        own = CheckpointReader(folder)
        metadata = overview.checkpoint_metadata(run, data, fitted)
        state, origin = first_state(own, metadata)
        start_step = int(jax.device_get(state.step))
        before: JsonObject = own.metadata(start_step) if own.all_steps() else {"wall_seconds": 0.0}
        run.trace_train_step()  # the last check of the user's code: a failure so far leaves no folder behind
        writers = stack.enter_context(
            contextlib.closing(Writers(folder, config, start_step, enabled=is_first))
        )
        forget_divergence(folder)
        stopping = EarlyStopping(config, before)
        store = CheckpointStore(
            folder,
            keep_latest=keeping.keep_latest,
            keep_best=keeping.keep_best,
            best_metric=keeping.best_metric,
            best_mode=require_direction(config, keeping.best_metric).mode
            if keeping.keep_best
            else "max",
            check_workdir=workdir.check,
        )
        stack.callback(store.close)
        display = stack.enter_context(
            contextlib.closing(Display(total, start_step, enabled=is_first))
        )
        display.say(overview.opening(run, data, folder, split=split))
        if keeping.keep_best:
            display.say(
                f"best     {keeping.best_metric}, {require_direction(config, keeping.best_metric)}"
            )
        display.say(origin)
        began_compiling = time.perf_counter()
        train_step = run.compile_train_step(start_step)
        display.say(f"compiled the training step in {time.perf_counter() - began_compiling:.1f} s")
        leaves = pytree.named_leaves(
            state
        )  # what steps hand on; `state` is made of them when somebody asks for it

        profiler = stack.enter_context(
            contextlib.closing(Profiler(folder, config.logging, enabled=is_first))
        )
        batches, unreadable = stack.enter_context(open_train_batches(run, data.train, start_step))
        unreadable.resume(start_step, _own_part(before.get("unreadable_records", [])))
        unreadable.defer_errors()  # the state is saved first
        stack.enter_context(jax.transfer_guard("disallow"))
        clock = TrainingClock(start_step, run.images, run.training_flops, peak_flops())
        watchdog = stack.enter_context(Watchdog(folder, start_step, config.logging.hang_seconds))
        log = Cadence(run.steps.log_every, total)
        save = Cadence(run.steps.checkpoint_every, total)
        train_metrics: dict[str, float] = {}
        emptied: list[int] = []  # steps without a readable image

        def wall_seconds() -> float:
            return before["wall_seconds"] + time.perf_counter() - began

        @contextlib.contextmanager
        def between_steps() -> Iterator[None]:
            """Stop the clock and the watchdog, and allow transfers to the host."""
            with clock.pause(), watchdog.pause(), jax.transfer_guard("allow"):
                workdir.check()
                yield

        def report(step: int, metrics: dict[str, float]) -> None:
            if metrics.pop(READABLE_IMAGES) == 0:
                emptied.append(step)
                return
            try:
                require_finite(step, metrics)
            except FloatingPointError as error:
                with between_steps():
                    store.wait()
                    raise FloatingPointError(
                        f"{error} {record_divergence(folder, run, data, step, metrics)}"
                    ) from None
            display.advance()
            if step == start_step + ESTIMATE_AFTER_STEPS:
                seconds = clock.seconds_left(step, total + steps_after)
                display.say(
                    estimate_text(seconds, run.batch_sharding.mesh.devices.flat[0].platform)
                )
            is_due = log.is_due(
                step
            )  # also after the last step, so the summary repeats what the last line says
            if is_due:
                workdir.check()
                store.check()
                metrics |= clock.rates(step) | {"unreadable_images": len(unreadable.met_by(step))}
                metrics["wall_seconds"] = wall_seconds()
                train_metrics.update(metrics)
                writers.write(step, metrics)
            if is_due or display.is_bar:
                to_end = clock.seconds_left(step, total + steps_after) if steps_after else None
                display.show(
                    step, clock.rates(step) | metrics, clock.seconds_left(step, total), to_end
                )

        def evaluate(step: int) -> dict[str, float]:
            due = [evaluation for evaluation in evaluations if evaluation.cadence.is_due(step)]
            if results := run_all(due, state):
                writers.write(step, results)
                display.say(overview.results_line(step, total, results))
            stopping.note(step, results)
            return results

        def metrics_of(results: dict[str, float]) -> dict[str, float]:
            """Return the metrics of a checkpoint; none without the best one: another evaluator may have been due."""
            return results if math.isfinite(results.get(keeping.best_metric, math.nan)) else {}

        def save_state(step: int, results: dict[str, float], *, owes_evaluation: bool) -> None:
            progress = {
                "wall_seconds": wall_seconds(),
                "owes_evaluation": owes_evaluation,
                "unreadable_records": hosts.gather(unreadable.met_by(step)),
            }
            progress |= stopping.metadata()
            writers.flush()
            store.save(
                step, items_of(state), metadata=metadata | progress, metrics=metrics_of(results)
            )

        late = LateMetrics(report)
        results: dict[str, float] = {}
        if before.get("owes_evaluation"):
            with between_steps():
                results = evaluate(start_step)
                owed = {"owes_evaluation": False} | stopping.metadata()
                store.complete(start_step, metadata=owed, metrics=metrics_of(results))
        last_step = start_step
        for step in range(start_step + 1, total + 1):
            if stopping.reason_to_stop():
                break
            if pause_step is not None and step > pause_step:
                with between_steps():
                    store.wait()
                raise Paused(step - 1, total)
            last_step = step
            profiler.before_step(step)
            leaves, metrics = train_step(leaves, clock.next_batch(batches, late.is_busy))
            late.push(step, metrics)
            profiler.after_step(step, metrics)
            watchdog.step_done(step)

            if unreadable.problem:
                interruption.request()
            is_stopping = interruption.is_requested() or bool(emptied)
            is_save_due = save.is_due(step) or step == pause_step
            is_evaluated = any(evaluation.cadence.is_due(step) for evaluation in evaluations)
            if is_evaluated or is_save_due or is_stopping:
                late.flush()
                with between_steps():
                    state = run.state_from(leaves)
                    results = {}
                    if not is_stopping:
                        try:
                            results = evaluate(step)
                        except (
                            Interrupted
                        ):  # a request to stop does not wait for an evaluation to end
                            is_stopping = True
                        except TooManyUnreadable:  # in every process
                            save_state(step, {}, owes_evaluation=True)
                            store.wait()
                            raise
                    is_best_candidate = keeping.keep_best and keeping.best_metric in results
                    if is_stopping or is_save_due or is_best_candidate:
                        save_state(step, results, owes_evaluation=is_evaluated and not results)
                    if is_stopping:
                        store.wait()
                        _require_readable_batches(unreadable.problem, emptied, step)
            if is_stopping:
                raise Interrupted(
                    f"stopped after step {step} of {total}, which is saved; the same command resumes it"
                )

        with between_steps():
            _require_readable_batches(unreadable.problem, emptied, last_step)
            if last_step < total:
                display.say(f"step {last_step:>6}/{total}  {stopping.reason_to_stop()}")
            store.wait()
            best_step = stopping.best_of(own.all_steps())
            state = run.state_from(leaves)
            if is_earlier := best_step not in (None, last_step):
                jax.tree.map(lambda leaf: leaf.delete(), leaves)  # there may be no room for both
                state = restore(run, own, best_step, metadata)
            if last_step == start_step:
                train_metrics.update(last_training_line(folder))
            if (
                is_earlier or last_step < total or not results
            ):  # or only some were due, or nothing was left to train
                results = run_all(evaluations, state)
            num_missing = len(data.test) - int(results.get(f"{split}_images", len(data.test)))
            summary = overview.summary(run, state, last_step, train_metrics, results, num_missing)
            if best_step is not None:
                summary |= {"best_step": best_step, "stopped_early": last_step < total}
    summary["wall_seconds"] = wall_seconds()
    if is_first:
        write_summary(folder, summary)
        print(overview.closing(summary, folder, split=split), flush=True)
    return summary


def _require_readable_batches(problem: str, emptied: Sequence[int], step: int) -> None:
    """Raise TooManyUnreadable in every process if one has met too many unreadable images, or a step had no others.

    Args:
      problem: of this process; "" without any.
      emptied: steps without a readable image, the same in every process.
      step: the last one, whose state is saved.
    """
    problems = [text for text in hosts.gather(problem) if text]
    if emptied and not problems:
        problems = [
            f"Step {emptied[0]}: no image of the batch can be read. Replace them, or use a larger global_batch."
        ]
    if problems:
        raise TooManyUnreadable(f"{problems[0]} The state after step {step} is saved.")


def _pause_step(steps: RunSteps, fraction: float | None) -> int | None:
    """Return the last step with an evaluation up to a fraction of all; None for a run that does not pause."""
    if fraction is None:
        return None
    step = int(fraction * steps.total) // steps.evaluate_every * steps.evaluate_every
    if step == 0:
        raise ValueError(
            f"config.evaluation.every: the first evaluation, after {steps.evaluate_every} steps, must be within "
            f"{fraction:.0%} of the {steps.total} steps. Evaluate more often, or pause later."
        )
    return step


def _own_part(parts: Sequence[Sequence[int]]) -> Sequence[int]:
    """Return the unreadable records of this process; those of all if the number of processes has changed."""
    if len(parts) == jax.process_count():
        return parts[jax.process_index()]
    return list(itertools.chain.from_iterable(parts))
