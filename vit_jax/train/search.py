"""The choice of a learning rate: what a trial is, and which one wins."""

import dataclasses
import math
import pathlib
import shutil
from collections.abc import Mapping
from typing import Any

from vit_jax import hosts
from vit_jax.checkpoint.store import FOLDER as CHECKPOINTS
from vit_jax.config import FinetuneConfig, SearchConfig
from vit_jax.train.workdir import TRIALS
from vit_jax.train.writers import write_summary

FOLDER = TRIALS
ACCURACY, LOSS = "validation_accuracy", "validation_loss"


def with_learning_rate(config: FinetuneConfig, rate: float) -> FinetuneConfig:
    """The run with this learning rate and no search."""
    schedule = dataclasses.replace(config.schedule, learning_rate=rate)
    return dataclasses.replace(config, schedule=schedule, search=SearchConfig())


def trial_config(config: FinetuneConfig, rate: float) -> FinetuneConfig:
    """A trial: judged once, at its end, by the held-out part of train; nothing of it is kept but its figures."""
    return dataclasses.replace(
        with_learning_rate(config, rate),
        evaluation=dataclasses.replace(config.evaluation, every=config.total),
        checkpoint=dataclasses.replace(config.checkpoint, keep_latest=1, keep_best=0),
    )


def choose(results: Mapping[float, Mapping[str, Any]]) -> float:
    """The rate of the best validation accuracy; of several the one with the lowest loss, then the lowest rate.

    Raises:
      ValueError: not one trial stayed finite.
    """
    finite = {rate: summary for rate, summary in results.items() if _is_finite(summary)}
    if not finite:
        rates = ", ".join(f"{rate:g}" for rate in results)
        raise ValueError(f"With none of the learning rates {rates} the loss stayed finite: try lower ones.")
    return min(finite, key=lambda rate: (-finite[rate][ACCURACY], finite[rate][LOSS], rate))


def table(results: Mapping[float, Mapping[str, Any]], best: float) -> str:
    """One line for each trial; the chosen one is marked."""
    lines = ["learning rate  validation accuracy  validation loss"]
    for rate, summary in results.items():
        mark = "  <- chosen" if rate == best else ""
        figures = "diverged"
        if _is_finite(summary):
            figures = f"{summary[ACCURACY]:>19.2%}  {summary[LOSS]:>15.4f}"
        lines.append(f"{rate:<13g}  {figures:>36}{mark}")
    return "\n".join(lines)


def _is_finite(summary: Mapping[str, Any]) -> bool:
    """The last update may be the one that spoils a network: then only its evaluation shows it."""
    return summary[LOSS] is not None and math.isfinite(summary[LOSS])


def diverged(folder: pathlib.Path, why: str) -> dict[str, Any]:
    """The summary of a trial whose loss did not stay finite, written so that it is not tried again."""
    summary = {ACCURACY: None, LOSS: None, "diverged": why}
    if hosts.is_first():
        write_summary(folder, summary)
    return summary


def forget_checkpoints(folder: pathlib.Path) -> None:
    """A trial that has ended needs none."""
    if hosts.is_first():
        shutil.rmtree(folder / CHECKPOINTS, ignore_errors=True)
