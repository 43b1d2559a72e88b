"""The pre-training loop: from a config to a trained model in a workdir."""

import contextlib
import time
from typing import Any

import jax

from vit_jax import hosts
from vit_jax.checkpoint import CheckpointStore
from vit_jax.config import PretrainConfig
from vit_jax.cost.flops import training_flops_per_image
from vit_jax.evals import ClassificationEvaluator
from vit_jax.train import overview
from vit_jax.train import workdir as workdirs
from vit_jax.train.assemble import (
    architecture_of,
    assemble,
    open_datasets,
    open_evaluation_batches,
    open_train_batches,
)
from vit_jax.train.cadence import Cadence
from vit_jax.train.interruption import Interrupted, Interruption
from vit_jax.train.machine import peak_flops, timed, use_compilation_cache
from vit_jax.train.metrics import LateMetrics, require_finite
from vit_jax.train.profiling import Profiler
from vit_jax.train.progress import Display, TrainingClock
from vit_jax.train.start import items_of, start_state
from vit_jax.train.watchdog import Watchdog
from vit_jax.train.writers import Writers, last_training_line, write_summary


@hosts.ends_together(Interrupted)
def pretrain(config: PretrainConfig, workdir: str) -> dict[str, Any]:
    """Trains from the start, or on from the workdir's last checkpoint.

    Args:
      config: as loaded.
      workdir: the run's folder, shared by all processes.

    Returns:
      The content of `summary.json`.

    Raises:
      ValueError: something in the config, the data or the workdir that the user can mend.
      FloatingPointError: the loss is not finite.
      SaveError: a checkpoint could not be written.
      Interrupted: SIGTERM or Ctrl-C; the state is saved.
    """
    began = time.perf_counter()
    hosts.start()
    use_compilation_cache(config.logging.compilation_cache)
    is_first = hosts.is_first()
    data = open_datasets(config)
    devices = jax.devices()
    architecture = architecture_of(config, data.train.num_classes)
    run = assemble(config, architecture, num_examples=len(data.train), devices=devices)
    total = run.steps.total
    folder = workdirs.claim(workdir, config)
    metadata = overview.checkpoint_metadata(run, data)

    with Interruption() as interruption, contextlib.ExitStack() as stack:
        store = CheckpointStore(
            folder,
            keep_latest=config.checkpoint.keep_latest,
            keep_best=config.checkpoint.keep_best,
            best_metric=config.checkpoint.best_metric,
        )
        stack.callback(store.close)
        state, origin = start_state(run, store, metadata)
        start_step = int(jax.device_get(state.step))
        seconds_before = store.metadata(start_step)["wall_seconds"] if store.latest_step() is not None else 0.0
        writers = Writers(folder, config, start_step, enabled=is_first)
        stack.callback(writers.close)

        display = Display(total, start_step, enabled=is_first)
        stack.callback(display.close)
        display.say(overview.opening(run, data, folder))
        display.say(origin)
        train_step, compile_seconds = timed(run.compile_train_step)
        display.say(f"compiled the training step in {compile_seconds:.1f} s")

        evaluator = ClassificationEvaluator(
            "test", lambda: open_evaluation_batches(run, data.test), run.evaluation_step
        )
        profiler = Profiler(
            folder, config.logging.profile_start_step, config.logging.profile_num_steps, enabled=is_first
        )
        stack.callback(profiler.close)
        batches, unreadable = stack.enter_context(open_train_batches(run, data.train, start_step))
        stack.enter_context(jax.transfer_guard("disallow"))
        clock = TrainingClock(start_step, config.global_batch, training_flops_per_image(run.architecture), peak_flops())
        log, evaluate, save = (
            Cadence(every, total)
            for every in (run.steps.log_every, run.steps.evaluate_every, run.steps.checkpoint_every)
        )
        train_metrics = last_training_line(folder) if start_step >= total else {}
        watchdog = stack.enter_context(Watchdog(folder, start_step, config.logging.hang_seconds))

        def report(step: int, metrics: dict[str, float]) -> None:
            require_finite(step, metrics)
            display.advance()
            if log.is_due(step):  # also after the last step, so the summary repeats what the last line says
                store.check()
                metrics |= clock.rates(step) | {"unreadable_images": unreadable.count}
                train_metrics.update(metrics)
                writers.write(step, metrics)
                display.show(step, metrics, clock.seconds_left(step, total))

        def save_state(step: int, results: dict[str, float]) -> None:
            seconds = seconds_before + time.perf_counter() - began
            store.save(step, items_of(state), metadata=metadata | {"wall_seconds": seconds}, metrics=results)

        late = LateMetrics(report)
        results: dict[str, float] = {}
        for step in range(start_step + 1, total + 1):
            profiler.before_step(step)
            state, metrics = train_step(state, next(batches))
            late.push(step, metrics)
            profiler.after_step(step, metrics)
            watchdog.step_done(step)

            is_stopping = interruption.is_requested() and step < total
            if evaluate.is_due(step) or save.is_due(step) or is_stopping:
                late.flush()
                with clock.pause(), watchdog.pause(), jax.transfer_guard("allow"):
                    if is_stopping:  # first of all: whoever asks for an end may not wait for an evaluation
                        save_state(step, {})
                        store.wait()
                    results = dict(evaluator.run(state)) if evaluate.is_due(step) else {}
                    if results:
                        writers.write(step, results)
                        display.say(overview.results_line(step, total, results))
                    if not is_stopping and (save.is_due(step) or (results and config.checkpoint.keep_best)):
                        save_state(step, results)
            if is_stopping:
                raise Interrupted(f"stopped after step {step} of {total}, which is saved; the same command goes on")

        with clock.pause(), watchdog.pause(), jax.transfer_guard("allow"):
            results = results or dict(evaluator.run(state))  # nothing was left to train
            store.wait()
            summary = overview.summary(run, state, train_metrics | results, split="test")
    summary["wall_seconds"] = seconds_before + time.perf_counter() - began
    if is_first:
        write_summary(folder, summary)
        print(overview.closing(summary, folder, split="test"), flush=True)
    return summary
