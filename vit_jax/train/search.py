"""The choice of a learning rate: a trial of each on a held-out part of train, and which one wins."""

import dataclasses
import math
import pathlib
import shutil
from collections.abc import Callable, Mapping
from typing import Any

import jax

from vit_jax import hosts
from vit_jax.checkpoint.store import FOLDER as CHECKPOINTS
from vit_jax.config import FinetuneConfig, SearchConfig, StopEarlyConfig, resolve
from vit_jax.config.schema import MULTILABEL_RESULTS
from vit_jax.data.records import few
from vit_jax.data.subset import classes_without_examples, hold_out
from vit_jax.train.assemble import Datasets
from vit_jax.train.lock import WorkdirLock
from vit_jax.train.run_files import DIVERGED, read_summary, write_summary
from vit_jax.train.workdir import TRIALS, claim

ACCURACY, LOSS = "validation_accuracy", "validation_loss"
PRECISION = f"validation_{MULTILABEL_RESULTS[0]}"  # in its place, where images may have several labels

TrainWith = Callable[[FinetuneConfig, Datasets, WorkdirLock, str, int], dict[str, Any]]
"""(config, data, workdir, name of the split that `data.test` is, steps of the runs that follow) -> the content of
`summary.json`."""
Trials = dict[float, dict[str, Any]]


def choose_learning_rate(
    config: FinetuneConfig, data: Datasets, folder: pathlib.Path, train_with: TrainWith
) -> tuple[FinetuneConfig, Trials]:
    """Trains with each learning rate on train less a held-out part; a trial that has ended is not repeated.

    Config, data and folder (claimed) are of the final run; each trial has a workdir in its sub-folder `search/`.
    Returns the config with the best rate and no search, and each trial's summary.

    Raises:
      ValueError: no trial's loss stayed finite.
    """
    parts = Datasets(*hold_out(data.train, config.search.validation_fraction, config.seed))
    if unseen := classes_without_examples(parts.test):
        say(f"note     these classes have no validation image in the search: {few(unseen)}")
    rates, trials = config.search.learning_rates, {}
    trial_steps, final_steps = (
        resolve(one, num_examples=len(source), num_devices=jax.device_count()).total
        for one, source in ((trial_config(config, rates[0]), parts.train), (config, data.train))
    )
    say(
        f"search   {len(rates)} trials of {trial_steps:,} steps, tested on {len(parts.test):,} images held out of "
        f"training; then {final_steps:,} steps on all with the best learning rate"
    )
    for number, rate in enumerate(rates, 1):
        trial_folder = folder / TRIALS / f"learning_rate={rate!r}"
        summary = read_summary(trial_folder, (LOSS,), (ACCURACY, PRECISION))
        if summary is None:
            trial = trial_config(config, rate)
            with claim(str(trial_folder), trial) as claimed:
                say(f"trial {number} of {len(rates)}: learning rate {rate:g}")
                try:
                    steps_after = (len(rates) - number) * trial_steps + final_steps
                    summary = train_with(trial, parts, claimed, "validation", steps_after)
                except FloatingPointError as error:
                    summary = {ACCURACY: None, LOSS: None, DIVERGED: str(error)}
                    if hosts.is_first():
                        write_summary(trial_folder, summary)  # so that it is not tried again
        if hosts.is_first():  # a trial that has ended needs no checkpoints
            shutil.rmtree(trial_folder / CHECKPOINTS, ignore_errors=True)
        trials[rate] = summary
    best = choose(trials)
    say(f"the best of {len(rates)}: learning rate {best:g}")
    return with_learning_rate(config, best), trials


def say(line: str) -> None:
    """Prints a line in the first process."""
    if hosts.is_first():
        print(line, flush=True)


def with_learning_rate(config: FinetuneConfig, rate: float) -> FinetuneConfig:
    """The run with this learning rate and no search."""
    schedule = dataclasses.replace(config.schedule, learning_rate=rate)
    return dataclasses.replace(config, schedule=schedule, search=SearchConfig())


def trial_config(config: FinetuneConfig, rate: float) -> FinetuneConfig:
    """The config of a trial: evaluated once, at its end, on the held-out part of train; only its summary is kept."""
    return dataclasses.replace(
        with_learning_rate(config, rate),
        logging=dataclasses.replace(config.logging, parameters=False),  # they are listed once, by the final run
        evaluation=dataclasses.replace(config.evaluation, every=config.total, evaluators={}),
        stop_early=StopEarlyConfig(),
        checkpoint=dataclasses.replace(config.checkpoint, keep_latest=1, keep_best=0, best_metric="test_accuracy"),
    )


def choose(results: Mapping[float, Mapping[str, Any]]) -> float:
    """The rate of the best validation accuracy or precision; of several that of the lowest loss, then the lowest rate.

    Raises:
      ValueError: not one trial stayed finite.
    """
    finite = {rate: summary for rate, summary in results.items() if _is_finite(summary)}
    if not finite:
        rates = ", ".join(f"{rate:g}" for rate in results)
        raise ValueError(f"With none of the learning rates {rates} the loss stayed finite: try lower ones.")
    return min(finite, key=lambda rate: (-_main(finite[rate])[1], finite[rate][LOSS], rate))


def table(results: Mapping[float, Mapping[str, Any]], best: float) -> str:
    """One line for each trial; the chosen one is marked."""
    title = next(_main(summary)[0] for summary in results.values() if _is_finite(summary)).replace("_", " ")
    lines = [f"learning rate  {title}  validation loss"]
    for rate, summary in results.items():
        mark = "  <- chosen" if rate == best else ""
        figures = "diverged"
        if _is_finite(summary):
            figures = f"{_main(summary)[1]:>{len(title)}.2%}  {summary[LOSS]:>15.4f}"
        lines.append(f"{rate:<13g}  {figures:>{len(title) + 17}}{mark}")
    return "\n".join(lines)


def _main(summary: Mapping[str, Any]) -> tuple[str, float]:
    """What a trial is judged by, with its name."""
    name = PRECISION if PRECISION in summary else ACCURACY
    return name, summary[name]


def _is_finite(summary: Mapping[str, Any]) -> bool:
    """The last update may be the one that spoils a network: then only its evaluation shows it."""
    return None not in (summary[LOSS], _main(summary)[1]) and math.isfinite(summary[LOSS])
