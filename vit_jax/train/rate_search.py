"""Choose a learning rate: a trial of each on train less a held-out part, and the best of them."""

import dataclasses
import pathlib
from collections.abc import Callable, Mapping

import jax

from vit_jax.config import FinetuneConfig, SearchConfig, StopEarlyConfig, resolve
from vit_jax.config.metric_names import MULTILABEL_RESULTS
from vit_jax.data.records import few
from vit_jax.data.subset import find_classes_without_examples, hold_out
from vit_jax.evals.intervals import describe_interval
from vit_jax.storage.files import JsonObject
from vit_jax.train import series
from vit_jax.train.inputs import Datasets
from vit_jax.train.lifecycle.lock import WorkdirLock
from vit_jax.train.lifecycle.workdir import TRIALS, claim
from vit_jax.train.run_files import read_summary
from vit_jax.train.series import run_once, say

ACCURACY = "validation_accuracy"
LOSS = "validation_loss"
PRECISION = f"validation_{MULTILABEL_RESULTS[0]}"  # for images with any number of labels
MARK = "  <- chosen"

TrainWith = Callable[[FinetuneConfig, Datasets, WorkdirLock, int], JsonObject]
"""(config, data, workdir, steps of the runs that follow) -> `summary.json`."""
Trials = dict[float, JsonObject]


def choose_learning_rate(
    config: FinetuneConfig,
    data: Datasets,
    folder: pathlib.Path,
    train_with: TrainWith,
    *,
    requested: FinetuneConfig | None = None,
) -> tuple[FinetuneConfig, Trials]:
    """Train with each learning rate on train less a held-out part; keep trials that have ended.

    Args:
      config: config of the final run.
      data: data of the final run.
      folder: its workdir, claimed; each trial has a workdir in the sub-folder `search/`.
      train_with: performs a trial.
      requested: config of the final run before it chose its layout; None: the same.

    Returns:
      The config with the best rate and no search, and each trial's summary.

    Raises:
      ValueError: the loss diverged in all trials.
    """
    held_out = hold_out(data.train, config.search.validation_fraction, config.seed)
    parts = Datasets(*held_out, test_name="validation")
    unseen = find_classes_without_examples(parts.test)
    if unseen:
        say(f"note     these classes have no validation image in the search: {few(unseen)}")
    rates = config.search.learning_rates
    trial_steps = _count_steps(trial_config(config, rates[0]), len(parts.train))
    final_steps = _count_steps(config, len(data.train))
    say(
        f"search   {len(rates)} trials of {trial_steps:,} steps, "
        f"tested on {len(parts.test):,} images held out of training; "
        f"then {final_steps:,} steps on all with the best learning rate"
    )

    trials = {}
    for number, rate in enumerate(rates, 1):
        later_steps = (len(rates) - number) * trial_steps + final_steps

        def perform(trial: FinetuneConfig, workdir: str, later_steps: int = later_steps) -> None:
            requested_trial = trial_config(requested or config, trial.schedule.learning_rate)
            with claim(workdir, trial, requested_trial) as claimed:
                train_with(trial, parts, claimed, later_steps)

        trial = trial_config(config, rate)
        workdir = folder / TRIALS / f"learning_rate={rate!r}"
        title = f"trial {number} of {len(rates)}: learning rate {rate:g}"

        read_summary(workdir, (LOSS,), (ACCURACY, PRECISION))
        trials[rate] = run_once(trial, workdir, perform, title, split="validation", is_trial=True)

    best = choose(trials)
    say(f"the best of {len(rates)}: learning rate {best:g}")
    return with_learning_rate(config, best), trials


def _count_steps(config: FinetuneConfig, num_examples: int) -> int:
    """Return the steps of a run on a training set of this size."""
    steps = resolve(config, num_examples=num_examples, num_devices=jax.device_count())
    return steps.total


def with_learning_rate(config: FinetuneConfig, rate: float) -> FinetuneConfig:
    """Return the run with this learning rate and no search."""
    schedule = dataclasses.replace(config.schedule, learning_rate=rate)
    return dataclasses.replace(config, schedule=schedule, search=SearchConfig())


def trial_config(config: FinetuneConfig, rate: float) -> FinetuneConfig:
    """Return the config of a trial, which is evaluated at its end and leaves its summary only."""
    # The final run lists the parameters.
    logging = dataclasses.replace(config.logging, parameters=False)
    evaluation = dataclasses.replace(config.evaluation, every=config.total, evaluators={})
    checkpoint = dataclasses.replace(
        config.checkpoint,
        keep_latest=1,
        keep_best=0,
        best_metric="test_accuracy",
    )
    return dataclasses.replace(
        with_learning_rate(config, rate),
        logging=logging,
        evaluation=evaluation,
        stop_early=StopEarlyConfig(),
        checkpoint=checkpoint,
    )


def choose(results: Mapping[float, JsonObject]) -> float:
    """Return the rate with the best validation accuracy or precision.

    Of several, the one with the lowest loss, then the lowest rate.

    Raises:
      ValueError: the loss diverged in all trials.
    """
    results_by_rate = {}
    for rate, summary in results.items():
        results_by_rate[rate] = [series.parse_result(summary, "validation")]
    if all(result.accuracy is None for (result,) in results_by_rate.values()):
        rates = ", ".join(map("{:g}".format, results))
        raise ValueError(
            f"With none of the learning rates {rates} the loss stayed finite: try lower ones."
        )
    return series.choose(results_by_rate)


def table(results: Mapping[float, JsonObject], best: float) -> str:
    """Return a table with one line for each trial; the chosen one is marked.

    Accuracies on few validation images have their interval.
    """
    name = ACCURACY
    if any(PRECISION in summary for summary in results.values()):
        name = PRECISION
    title = name.replace("_", " ")
    trials = {rate: series.parse_result(summary, "validation") for rate, summary in results.items()}
    intervals = {}
    for rate, result in trials.items():
        if name == ACCURACY and result.accuracy is not None:
            intervals[rate] = describe_interval(result.accuracy, result.num_images)
    interval_width = max(map(len, intervals.values()), default=0)

    width = len(title) + interval_width
    lines = [f"learning rate  {title:<{width}}  validation loss"]
    for rate, result in trials.items():
        figures = "diverged"
        if result.accuracy is not None:
            interval = intervals.get(rate, "")
            accuracy = f"{result.accuracy:>{len(title)}.2%}{interval:<{interval_width}}"
            figures = f"{accuracy}  {result.loss:>15.4f}"
        line = f"{rate:<13g}  {figures:>{width + 17}}"
        if rate == best:
            line += MARK
        lines.append(line)
    return "\n".join(lines)
