"""The choice of a learning rate: a trial of each on a held-out part of train, and which one wins."""

import dataclasses
import pathlib
from collections.abc import Callable, Mapping

import jax

from vit_jax.config import FinetuneConfig, SearchConfig, StopEarlyConfig, resolve
from vit_jax.config.metric_names import MULTILABEL_RESULTS
from vit_jax.data.records import few
from vit_jax.data.subset import classes_without_examples, hold_out
from vit_jax.storage.files import JsonObject
from vit_jax.train import series
from vit_jax.train.inputs import Datasets
from vit_jax.train.lifecycle.lock import WorkdirLock
from vit_jax.train.lifecycle.workdir import TRIALS, claim
from vit_jax.train.run_files import read_summary
from vit_jax.train.series import run_once, say

ACCURACY = "validation_accuracy"
LOSS = "validation_loss"
PRECISION = (
    f"validation_{MULTILABEL_RESULTS[0]}"  # in its place, where images may have several labels
)

TrainWith = Callable[[FinetuneConfig, Datasets, WorkdirLock, str, int], JsonObject]
"""(config, data, workdir, name of the split that `data.test` is, steps of the runs that follow) -> the content of
`summary.json`."""
Trials = dict[float, JsonObject]


def choose_learning_rate(
    config: FinetuneConfig, data: Datasets, folder: pathlib.Path, train_with: TrainWith
) -> tuple[FinetuneConfig, Trials]:
    """Train with each learning rate on train less a held-out part; a trial that has ended is not repeated.

    Config, data and folder (claimed) are of the final run; each trial has a workdir in its sub-folder `search/`.
    Returns the config with the best rate and no search, and each trial's summary.

    Raises:
      ValueError: no trial's loss stayed finite.
    """
    parts = Datasets(*hold_out(data.train, config.search.validation_fraction, config.seed))
    if unseen := classes_without_examples(parts.test):
        say(f"note     these classes have no validation image in the search: {few(unseen)}")
    rates = config.search.learning_rates
    trials = {}
    trial_steps, final_steps = (
        resolve(one, num_examples=len(source), num_devices=jax.device_count()).total
        for one, source in ((trial_config(config, rates[0]), parts.train), (config, data.train))
    )
    say(
        f"search   {len(rates)} trials of {trial_steps:,} steps, tested on {len(parts.test):,} images held out of "
        f"training; then {final_steps:,} steps on all with the best learning rate"
    )
    for number, rate in enumerate(rates, 1):
        steps_after = (len(rates) - number) * trial_steps + final_steps

        def perform(trial: FinetuneConfig, workdir: str, steps_after: int = steps_after) -> None:
            with claim(workdir, trial) as claimed:
                train_with(trial, parts, claimed, "validation", steps_after)

        trial = trial_config(config, rate)
        place = folder / TRIALS / f"learning_rate={rate!r}"
        title = f"trial {number} of {len(rates)}: learning rate {rate:g}"
        read_summary(place, (LOSS,), (ACCURACY, PRECISION))
        trials[rate] = run_once(trial, place, perform, title, split="validation", is_trial=True)
    best = choose(trials)
    say(f"the best of {len(rates)}: learning rate {best:g}")
    return with_learning_rate(config, best), trials


def with_learning_rate(config: FinetuneConfig, rate: float) -> FinetuneConfig:
    """The run with this learning rate and no search."""
    schedule = dataclasses.replace(config.schedule, learning_rate=rate)
    return dataclasses.replace(config, schedule=schedule, search=SearchConfig())


def trial_config(config: FinetuneConfig, rate: float) -> FinetuneConfig:
    """The config of a trial: evaluated once, at its end, on the held-out part of train; only its summary is kept."""
    return dataclasses.replace(
        with_learning_rate(config, rate),
        logging=dataclasses.replace(
            config.logging, parameters=False
        ),  # they are listed once, by the final run
        evaluation=dataclasses.replace(config.evaluation, every=config.total, evaluators={}),
        stop_early=StopEarlyConfig(),
        checkpoint=dataclasses.replace(
            config.checkpoint, keep_latest=1, keep_best=0, best_metric="test_accuracy"
        ),
    )


def choose(results: Mapping[float, JsonObject]) -> float:
    """The rate of the best validation accuracy or precision; of several that of the lowest loss, then the lowest rate.

    Raises:
      ValueError: not one trial stayed finite.
    """
    outcomes = {
        rate: [series.outcome_of(summary, "validation")] for rate, summary in results.items()
    }
    if all(outcome.accuracy is None for (outcome,) in outcomes.values()):
        rates = ", ".join(f"{rate:g}" for rate in results)
        raise ValueError(
            f"With none of the learning rates {rates} the loss stayed finite: try lower ones."
        )
    return series.choose(outcomes)


def table(results: Mapping[float, JsonObject], best: float) -> str:
    """Return a table with one line for each trial; the chosen one is marked."""
    name = PRECISION if any(PRECISION in summary for summary in results.values()) else ACCURACY
    title = name.replace("_", " ")
    lines = [f"learning rate  {title}  validation loss"]
    for rate, summary in results.items():
        outcome = series.outcome_of(summary, "validation")
        figures = "diverged"
        if outcome.accuracy is not None:
            figures = f"{outcome.accuracy:>{len(title)}.2%}  {outcome.loss:>15.4f}"
        mark = "  <- chosen" if rate == best else ""
        lines.append(f"{rate:<13g}  {figures:>{len(title) + 17}}{mark}")
    return "\n".join(lines)
