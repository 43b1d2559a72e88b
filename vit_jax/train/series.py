"""Perform the runs of a sweep, a study, VTAB or a learning-rate search, each once.

All state is in the workdirs of the runs: a run that has ended has a `summary.json`, an interrupted
one resumes. Several machines may share the runs; the lock of a workdir keeps a second machine out
of a run in progress.
"""

import math
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from vit_jax import hosts
from vit_jax.checkpoint.reader import has_checkpoints
from vit_jax.checkpoint.store import FOLDER as CHECKPOINTS
from vit_jax.config import RunConfig
from vit_jax.config.metric_names import MULTILABEL_RESULTS
from vit_jax.storage.files import JsonObject, remove_tree
from vit_jax.train.lifecycle import workdir as workdirs
from vit_jax.train.lifecycle.interruption import Interrupted
from vit_jax.train.run_files import CONFIG_FILE, DIVERGED, read_pause, read_summary, write_summary

Perform = Callable[..., object]
"""Takes a config and a workdir; performs the run and writes `summary.json` there."""
Setting = TypeVar("Setting")  # with an order


class Unfinished(Interrupted):
    """The runs of this machine have ended; the next stage waits for other machines."""


class RunResult(NamedTuple):
    """The results of a run that has ended.

    Attributes:
      accuracy: fraction of the images, or mean average precision; None: the loss was not finite.
      loss: mean over the images.
      num_images: number of images of the split.
    """

    accuracy: float | None
    loss: float
    num_images: int

    @property
    def rank(self) -> tuple[float, float]:
        """Accuracy and loss, which of a run that diverged are 0 and infinity."""
        if self.accuracy is None:
            return (0.0, math.inf)
        return (self.accuracy, self.loss)


def parse_result(summary: JsonObject, split: str = "test") -> RunResult:
    """Return the results on a split; the last update diverged if the loss is not finite."""
    loss = summary[f"{split}_loss"]
    accuracy = summary.get(f"{split}_accuracy")
    accuracy = summary.get(f"{split}_{MULTILABEL_RESULTS[0]}", accuracy)
    num_images = int(summary.get(f"{split}_images", 0))
    if accuracy is None or loss is None or not math.isfinite(loss):
        return RunResult(None, math.inf, num_images)
    return RunResult(accuracy, loss, num_images)


def choose(trials: Mapping[Setting, Sequence[RunResult]]) -> Setting:
    """Return the setting with the highest mean accuracy.

    Of settings with equal accuracies, the one with the lowest mean loss, then the least setting.
    """

    def get_order(setting: Setting) -> tuple[float, float, Any]:
        ranks = [result.rank for result in trials[setting]]
        accuracies, losses = zip(*ranks, strict=True)
        mean_accuracy = math.fsum(accuracies) / len(ranks)
        mean_loss = math.fsum(losses) / len(ranks)
        return -mean_accuracy, mean_loss, setting

    return min(trials, key=get_order)


def state_of(workdir: pathlib.Path) -> str:
    """Return the state of a run: "ended", "diverged", "paused", "interrupted" or "new"."""
    summary = read_summary(workdir)
    if summary is not None and DIVERGED in summary:
        return "diverged"
    if summary is not None:
        return "ended"
    if not has_checkpoints(workdir) and not (workdir / CONFIG_FILE).exists():
        return "new"
    if read_pause(workdir):
        return "paused"
    return "interrupted"


def run_once(
    config: RunConfig,
    folder: pathlib.Path,
    perform: Perform,
    title: str,
    *,
    split: str = "test",
    is_trial: bool = False,
) -> JsonObject:
    """Perform a run in its workdir, or resume it, unless it has ended there.

    A run that diverged is not repeated. Every process of the machine's run calls this, after
    `hosts.start`.

    Args:
      config: config of the run.
      folder: its workdir.
      perform: performs it.
      title: printed before it.
      split: prefix of the results of a run that diverged, which are null.
      is_trial: its checkpoints are removed at the end.

    Returns:
      The content of `summary.json`, in every process as the first one reads it.

    Raises:
      ValueError: the workdir is of a run of another config; otherwise as `perform`.
    """
    summary = share_first(read_summary(folder))
    if summary is not None:
        workdirs.require_same_config(folder, config)
    else:
        say(title)
        try:
            perform(config, str(folder))
        except FloatingPointError as error:
            say(f"{title.strip()}: {error}")
            results = {f"{split}_accuracy": None, f"{split}_loss": None, DIVERGED: str(error)}
            if hosts.is_first():
                write_summary(folder, results)
        summary = share_first(read_summary(folder))
    if is_trial and hosts.is_first():
        remove_tree(folder / CHECKPOINTS)
    return summary


def share_first(value: Any) -> Any:
    """Return the first process's value, of JSON, in every process."""
    return hosts.gather(value)[0]


def say(line: str) -> None:
    """Print a line in the first process."""
    if hosts.is_first():
        print(line, flush=True)
