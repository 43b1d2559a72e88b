"""The fine-tuning loop: given weights, a new head, own images. `train/README.md` says how it differs from pretrain.py.

With a grid of learning rates it first chooses one on a held-out part of train, as the paper does (ViT, App. B.1.1).
"""

import contextlib
import pathlib
import time
from typing import Any

import jax

from vit_jax import hosts
from vit_jax.checkpoint import CheckpointStore
from vit_jax.checkpoint.transfer import Fitted
from vit_jax.config import Architecture, FinetuneConfig, resolve
from vit_jax.cost.flops import training_flops_per_image
from vit_jax.data.records import few
from vit_jax.data.subset import classes_without_examples, hold_out
from vit_jax.data.unreadable import UnreadableLog
from vit_jax.evals import ClassificationEvaluator
from vit_jax.train import overview, search
from vit_jax.train import workdir as workdirs
from vit_jax.train.adapt import adapt
from vit_jax.train.assemble import Datasets, assemble, open_datasets, open_evaluation_batches, open_train_batches
from vit_jax.train.cadence import Cadence
from vit_jax.train.interruption import Interrupted, Interruption
from vit_jax.train.machine import peak_flops, timed, use_compilation_cache
from vit_jax.train.metrics import LateMetrics, require_finite
from vit_jax.train.profiling import Profiler
from vit_jax.train.progress import Display, TrainingClock
from vit_jax.train.start import continue_run, items_of, state_of_parameters
from vit_jax.train.watchdog import Watchdog
from vit_jax.train.writers import Writers, last_training_line, read_summary, write_summary


@hosts.ends_together(Interrupted)
def finetune(config: FinetuneConfig, workdir: str) -> dict[str, Any]:
    """Fine-tunes from the start, or on from wherever the workdir's last run was interrupted, in the search or after.

    Args:
      config: as loaded.
      workdir: the run's folder, shared by all processes; trials of the search lie in its sub-folder `search/`.

    Returns:
      The content of `summary.json`.

    Raises:
      ValueError: something in the config, the weights, the data or the workdir that the user can mend.
      FloatingPointError: the loss of the final run is not finite.
      SaveError: a checkpoint could not be written.
      Interrupted: SIGTERM or Ctrl-C; the state is saved.
    """
    hosts.start()
    use_compilation_cache(config.logging.compilation_cache)
    data = open_datasets(config)
    resolve(config, num_examples=len(data.train), num_devices=jax.device_count())  # before hours of search, not after
    workdirs.refuse_as_source(config.init_from, workdir)
    architecture, fitted, words = adapt(config, data.train)
    folder = workdirs.claim(workdir, config)
    start = overview.start_of(config, data, fitted.parameters)
    workdirs.require_same_start(folder, start, config.init_from)
    if hosts.is_first():
        print(words, flush=True)
    with Interruption() as interruption:  # around all runs: what arrives between two of them is not lost
        return _search_and_train(config, architecture, fitted, data, folder, interruption)


def _search_and_train(
    config: FinetuneConfig,
    architecture: Architecture,
    fitted: Fitted,
    data: Datasets,
    folder: pathlib.Path,
    interruption: Interruption,
) -> dict[str, Any]:
    results: dict[float, dict[str, Any]] = {}
    rates = config.search.learning_rates
    if rates:
        parts = Datasets(*hold_out(data.train, config.search.validation_fraction, config.seed))
        if hosts.is_first() and (unseen := classes_without_examples(parts.test)):
            print(f"note     these classes have no validation image in the search: {few(unseen)}", flush=True)
        for number, rate in enumerate(rates, 1):
            trial_folder = folder / search.FOLDER / f"learning_rate={rate!r}"
            summary = read_summary(trial_folder)
            if summary is None:
                trial = search.trial_config(config, rate)
                workdirs.claim(str(trial_folder), trial)
                if hosts.is_first():
                    print(f"trial {number} of {len(rates)}: learning rate {rate:g}", flush=True)
                try:
                    summary = _train(trial, architecture, fitted, parts, trial_folder, "validation", interruption)
                except FloatingPointError as error:
                    summary = search.diverged(trial_folder, str(error))
            search.forget_checkpoints(trial_folder)
            results[rate] = summary
        config = search.with_learning_rate(config, search.choose(results))
        if hosts.is_first():
            print(f"the best of {len(rates)}: learning rate {config.schedule.learning_rate:g}", flush=True)
    summary = _train(config, architecture, fitted, data, folder, "test", interruption)
    if results and hosts.is_first():
        print(search.table(results, config.schedule.learning_rate), flush=True)
    return summary


def _train(
    config: FinetuneConfig,
    architecture: Architecture,
    fitted: Fitted,
    data: Datasets,
    folder: pathlib.Path,
    split: str,
    interruption: Interruption,
) -> dict[str, Any]:
    """One run with one learning rate; `split` names what `data.test` is. Returns the content of `summary.json`."""
    began = time.perf_counter()
    is_first = hosts.is_first()
    run = assemble(config, architecture, num_examples=len(data.train), devices=jax.devices())
    total = run.steps.total
    metadata = overview.checkpoint_metadata(run, data)

    with contextlib.ExitStack() as stack:
        store = CheckpointStore(
            folder,
            keep_latest=config.checkpoint.keep_latest,
            keep_best=config.checkpoint.keep_best,
            best_metric=config.checkpoint.best_metric,
        )
        stack.callback(store.close)
        state, origin = continue_run(run, store, metadata) or (
            state_of_parameters(run, fitted.parameters, str(config.init_from)),
            f"starting at step 0 with the weights of {config.init_from}",
        )
        start_step = int(jax.device_get(state.step))
        before = {"wall_seconds": 0.0} if store.latest_step() is None else store.metadata(start_step)
        writers = Writers(folder, config, start_step, enabled=is_first)
        stack.callback(writers.close)

        display = Display(total, start_step, enabled=is_first)
        stack.callback(display.close)
        display.say(overview.opening(run, data, folder, split=split))
        display.say(origin)
        train_step, compile_seconds = timed(run.compile_train_step)
        display.say(f"compiled the training step in {compile_seconds:.1f} s")

        not_judged = UnreadableLog(data.test, config.input.max_unreadable)
        evaluator = ClassificationEvaluator(
            split, lambda: open_evaluation_batches(run, data.test, not_judged), run.evaluation_step, interruption.obey
        )
        profiler = Profiler(
            folder, config.logging.profile_start_step, config.logging.profile_num_steps, enabled=is_first
        )
        stack.callback(profiler.close)
        batches, unreadable = stack.enter_context(open_train_batches(run, data.train, start_step))
        stack.enter_context(jax.transfer_guard("disallow"))
        clock = TrainingClock(start_step, config.global_batch, training_flops_per_image(architecture), peak_flops())
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
            progress = {
                "wall_seconds": before["wall_seconds"] + time.perf_counter() - began,
                "owes_evaluation": evaluate.is_due(step) and not results,
            }
            store.save(step, items_of(state), metadata=metadata | progress, metrics=results)

        def evaluate_state(step: int) -> dict[str, float]:
            results = dict(evaluator.run(state))
            writers.write(step, results)
            display.say(overview.results_line(step, total, results))
            return results

        late = LateMetrics(report)
        results: dict[str, float] = {}
        if before.get("owes_evaluation"):
            with clock.pause(), watchdog.pause(), jax.transfer_guard("allow"):
                results = evaluate_state(start_step)
        for step in range(start_step + 1, total + 1):
            profiler.before_step(step)
            state, metrics = train_step(state, next(batches))
            late.push(step, metrics)
            profiler.after_step(step, metrics)
            watchdog.step_done(step)

            is_stopping = interruption.is_requested()
            if evaluate.is_due(step) or save.is_due(step) or is_stopping:
                late.flush()
                with clock.pause(), watchdog.pause(), jax.transfer_guard("allow"):
                    results = {}
                    if evaluate.is_due(step) and not is_stopping:
                        try:
                            results = evaluate_state(step)
                        except Interrupted:  # whoever asks for an end may not wait for an evaluation
                            is_stopping = True
                    if is_stopping or save.is_due(step) or (results and config.checkpoint.keep_best):
                        save_state(step, results)
                    if is_stopping:
                        store.wait()
            if is_stopping:
                raise Interrupted(f"stopped after step {step} of {total}, which is saved; the same command goes on")

        with clock.pause(), watchdog.pause(), jax.transfer_guard("allow"):
            results = results or dict(evaluator.run(state))  # nothing was left to train
            store.wait()
            summary = overview.summary(run, state, train_metrics | results, split=split)
    summary["wall_seconds"] = before["wall_seconds"] + time.perf_counter() - began
    summary["learning_rate"] = config.schedule.learning_rate
    if is_first:
        write_summary(folder, summary)
        print(overview.closing(summary, folder, split=split), flush=True)
    return summary
