"""The runs of a sweep: which settings are tried, the config and the folder of each run, and what it left there."""

import dataclasses
import itertools
import math
import pathlib
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from vit_jax.config import Duration, FinetuneConfig, InputConfig, StopEarlyConfig
from vit_jax.train.run_files import read_summary
from vit_jax.train.search import trial_config, with_learning_rate
from vit_jax.transfer.vtab.suite import Task

Part = Literal["trials", "final"]


@dataclasses.dataclass(frozen=True, order=True)
class Setting:
    """What is chosen on the validation examples."""

    num_steps: int
    warmup_steps: int
    learning_rate: float

    def __str__(self) -> str:
        return f"learning rate {self.learning_rate:g}, {self.num_steps:,} steps"


# The paper tries two rates and two lengths, does not say which, and names the best: 0.01 for 2,500 steps. 500 steps and
# both warm-ups are those of its authors' code; 0.003 is the next rate in Table 4.
LEARNING_RATES = (0.003, 0.01)
LENGTHS = ((500, 100), (2500, 200))


def grid(
    learning_rates: Sequence[float] = LEARNING_RATES, lengths: Sequence[tuple[int, int]] = LENGTHS
) -> tuple[Setting, ...]:
    """Every learning rate with every length (steps, and how many of them are the warm-up)."""
    return tuple(Setting(*length, rate) for length, rate in itertools.product(lengths, learning_rates))


class Outcome(NamedTuple):
    """What a run that has ended came to."""

    accuracy: float | None  # fraction of the validation or test images; None: its loss was not finite
    loss: float
    num_images: int

    @property
    def rank(self) -> tuple[float, float]:
        """Accuracy and loss of a run that diverged count as 0 and infinity."""
        return (0.0, math.inf) if self.accuracy is None else (self.accuracy, self.loss)


def folder_of_run(workdir: pathlib.Path, task: Task, part: Part, setting: Setting) -> pathlib.Path:
    """A run's own workdir."""
    return workdir / task.name / part / f"learning_rate={setting.learning_rate!r},steps={setting.num_steps}"


def config_of_run(config: FinetuneConfig, task: Task, part: Part, setting: Setting) -> FinetuneConfig:
    """The recipe with a task's data and a setting; evaluated once, at its end, on the images that it is not trained on.

    A trial is tested on the validation examples.
    """
    total = Duration(f"{setting.num_steps} steps")
    config = dataclasses.replace(
        config,
        data=task.data,
        total=total,
        input=_inputs(config.input, task, part),
        schedule=dataclasses.replace(config.schedule, warmup=Duration(f"{setting.warmup_steps} steps")),
        evaluation=dataclasses.replace(config.evaluation, every=total),
        checkpoint=dataclasses.replace(config.checkpoint, keep_latest=1, keep_best=0),
        stop_early=StopEarlyConfig(),
    )
    make = trial_config if part == "trials" else with_learning_rate
    return make(config, setting.learning_rate)


def _inputs(inputs: InputConfig, task: Task, part: Part) -> InputConfig:
    is_trial = part == "trials"
    fields: dict[str, Any] = {
        "train_split": task.train if is_trial else task.train_and_validation,
        "test_split": task.validation if is_trial else task.test,
        "flip": inputs.flip and task.flip,
    }
    if not task.crop:
        fields |= {"train_crop": "none", "train_resize_pixels": None, "shift_pixels": 0}
        fields |= {name: getattr(InputConfig, name) for name in ("crop_area_fraction", "crop_distribution")}
    return dataclasses.replace(inputs, **fields)


def outcome_of(folder: pathlib.Path) -> Outcome | None:
    """What a run came to; None while it has not ended."""
    summary = read_summary(folder, ("test_accuracy",), ("test_loss",))
    if summary is None:
        return None
    accuracy, loss = summary["test_accuracy"], summary["test_loss"]
    is_finite = loss is not None and math.isfinite(loss)
    num_images = int(summary.get("test_images", 0))
    return Outcome(accuracy if is_finite else None, loss if is_finite else math.inf, num_images)


def choose(trials: dict[Setting, list[Outcome]]) -> Setting:
    """The setting of the highest mean accuracy over the tasks, of which a trial that diverged adds none.

    Of several the one of the lowest mean loss, then the shortest, then the lowest rate.
    """

    def order(setting: Setting) -> tuple[float, float, Setting]:
        ranks = [outcome.rank for outcome in trials[setting]]
        accuracy, loss = (math.fsum(values) / len(ranks) for values in zip(*ranks, strict=True))
        return -accuracy, loss, setting

    return min(trials, key=order)
