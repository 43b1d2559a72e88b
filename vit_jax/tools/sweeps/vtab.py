"""VTAB-1k: settings are compared on the validation examples of tasks; each task is then trained with the best one.

With a shared choice the trials of all tasks come first. Several machines may share the tasks.
"""

import dataclasses
import itertools
import json
import pathlib
from collections.abc import Sequence
from typing import Any, Literal

from vit_jax import hosts
from vit_jax.config import Duration, FinetuneConfig, InputConfig, StopEarlyConfig
from vit_jax.data.sources import open_source
from vit_jax.pytree import parameters_sha256
from vit_jax.storage.files import write_atomically
from vit_jax.tools.sweeps.suite import Task
from vit_jax.train import series
from vit_jax.train.finetune import tune
from vit_jax.train.lifecycle import workdir as workdirs
from vit_jax.train.rate_search import trial_config, with_learning_rate
from vit_jax.train.run_files import read_start, read_summary
from vit_jax.train.series import Outcome, Unfinished, choose, of_first, run_once
from vit_jax.train.starting_weights import initial_weights

WEIGHTS_FILE = "weights.json"
Part = Literal["trials", "final"]


@dataclasses.dataclass(frozen=True, order=True)
class Setting:
    """A setting that is chosen on the validation examples."""

    num_steps: int
    warmup_steps: int
    learning_rate: float

    def __str__(self) -> str:
        return f"learning rate {self.learning_rate:g}, {self.num_steps:,} steps"


# The paper tries two rates and two lengths, does not say which, and names the best: 0.01 for 2,500
# steps. 500 steps and both warm-ups are those of its authors' code; 0.003 is the next rate in Table
# 4.
LEARNING_RATES = (0.003, 0.01)
LENGTHS = ((500, 100), (2500, 200))


def grid(
    learning_rates: Sequence[float] = LEARNING_RATES, lengths: Sequence[tuple[int, int]] = LENGTHS
) -> tuple[Setting, ...]:
    """Return every learning rate with every length (steps, and warm-up steps among them)."""
    return tuple(
        Setting(*length, rate) for length, rate in itertools.product(lengths, learning_rates)
    )


def folder_of_run(workdir: pathlib.Path, task: Task, part: Part, setting: Setting) -> pathlib.Path:
    """Return the workdir of a run."""
    return (
        workdir
        / task.name
        / part
        / f"learning_rate={setting.learning_rate!r},steps={setting.num_steps}"
    )


def config_of_run(
    config: FinetuneConfig, task: Task, part: Part, setting: Setting
) -> FinetuneConfig:
    """Return the recipe with a task's data and a setting, evaluated once, at its end.

    A trial is tested on the validation examples, a final run on the test images.
    """
    total = Duration(f"{setting.num_steps} steps")
    config = dataclasses.replace(
        config,
        data=task.data,
        total=total,
        input=_inputs(config.input, task, part),
        schedule=dataclasses.replace(
            config.schedule, warmup=Duration(f"{setting.warmup_steps} steps")
        ),
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
        fields |= {
            name: getattr(InputConfig, name) for name in ("crop_area_fraction", "crop_distribution")
        }
    return dataclasses.replace(inputs, **fields)


def outcome_of(folder: pathlib.Path) -> Outcome | None:
    """Return the results of a run; None if it has not ended."""
    summary = read_summary(folder, ("test_accuracy",), ("test_loss",))
    return None if summary is None else series.outcome_of(summary)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sweep:
    """All runs on a suite of tasks.

    Attributes:
      asked: the tasks of the command.
      tasks: those of them whose data can be opened, on every machine.
      own: the tasks of this machine.
      settings: to compare; a single one needs no trials.
      is_shared: one setting for all tasks, by the mean over their validation examples; else one for
        each task.
      config: a recipe for fine-tuning, with `init_from`; fields of task and setting are replaced.
      folder: the workdir of the sweep.
    """

    asked: tuple[Task, ...]
    tasks: tuple[Task, ...]
    own: tuple[Task, ...]
    settings: tuple[Setting, ...]
    is_shared: bool
    config: FinetuneConfig
    folder: pathlib.Path

    def outcome(self, task: Task, part: Part, setting: Setting) -> Outcome | None:
        """Return the results of a run; None if it has not ended."""
        return outcome_of(folder_of_run(self.folder, task, part, setting))

    @property
    def tried(self) -> tuple[Setting, ...]:
        """Settings that have trials."""
        return self.settings if len(self.settings) > 1 else ()

    def trials(self, task: Task) -> dict[Setting, Outcome]:
        """Return the results of the trials that have ended."""
        return {
            setting: outcome
            for setting in self.tried
            if (outcome := self.outcome(task, "trials", setting))
        }

    def chosen(self, task: Task) -> Setting | None:
        """Return the setting of a task's final run; None if trials are missing.

        Raises:
          ValueError: the loss diverged in all trials.
        """
        if not self.tried:
            return self.settings[0]
        trials = [self.trials(task) for task in (self.tasks if self.is_shared else (task,))]
        if any(len(outcomes) < len(self.tried) for outcomes in trials):
            return None
        if self.is_shared and all(
            outcome.accuracy is None for outcomes in trials for outcome in outcomes.values()
        ):
            raise ValueError(
                "No trial's loss stayed finite: try lower learning rates (--learning_rates=)."
            )
        return choose(
            {setting: [outcomes[setting] for outcomes in trials] for setting in self.tried}
        )

    def choices(self) -> dict[Task, Setting | None]:
        """Return `chosen` for every task."""
        if self.is_shared:
            return dict.fromkeys(self.tasks, self.chosen(self.tasks[0]))
        return {task: self.chosen(task) for task in self.tasks}

    def finals(self) -> dict[Task, tuple[Setting, Outcome]]:
        """Return settings and outcomes of the final runs that have ended."""
        return {
            task: (setting, outcome)
            for task, setting in self.choices().items()
            if setting and (outcome := self.outcome(task, "final", setting))
        }


def unavailable(tasks: Sequence[Task], config: FinetuneConfig) -> dict[Task, str]:
    """Return the tasks whose data cannot be opened, with the reason."""
    problems = {}
    for task in tasks:
        try:
            for split in (task.train, task.validation, task.train_and_validation, task.test):
                if open_source(task.data, split, config.input, config.seed).is_multilabel:
                    problems[task] = (
                        f"{task.data}: its images may have several labels, and a task has one for each."
                    )
        except ValueError as error:
            problems[task] = str(error)
    return problems


def run_sweep(sweep: Sweep) -> None:
    """Perform the runs of this machine that are left: with a shared choice all trials first, then the final runs.

    Every process of the machine's run calls this, after `hosts.start`.

    Raises:
      ValueError: the workdir is of other weights, or a run in it of another config; otherwise as
        `finetune`.
      Unfinished: trials of other machines are missing.
      Interrupted: SIGTERM or Ctrl-C; the run it arrived in is saved.
    """
    with workdirs.undo_after_rejection(sweep.folder, WEIGHTS_FILE):
        _require_same_weights(sweep)
        for tasks in [sweep.own] if sweep.is_shared else [(task,) for task in sweep.own]:
            for task, setting in itertools.product(tasks, sweep.tried):
                _run(sweep, task, "trials", setting)
            for task in tasks:
                _run(sweep, task, "final", _agreed_choice(sweep, task))


def _agreed_choice(sweep: Sweep, task: Task) -> Setting:
    """Return the setting of a final run, as the first process chooses it."""
    setting = sweep.chosen(task)
    values = of_first(setting and dataclasses.astuple(setting))
    if values is None:
        missing = [task.name for task in sweep.tasks if len(sweep.trials(task)) < len(sweep.tried)]
        raise Unfinished(
            "The trials of this machine's tasks have ended. The setting is chosen over all tasks, and trials of "
            f"{', '.join(missing)} are missing in {sweep.folder}. The same command goes on when they have ended."
        )
    return Setting(*values)


def _run(sweep: Sweep, task: Task, part: Part, setting: Setting) -> None:
    """Train and evaluate, unless that has been done."""
    config = config_of_run(sweep.config, task, part, setting)
    folder = folder_of_run(sweep.folder, task, part, setting)
    name = {"trials": "trial", "final": "final run"}[part]
    run_once(config, folder, tune, f"\n{task.name}, {name}: {setting}", is_trial=part == "trials")


def _require_same_weights(sweep: Sweep) -> None:
    """Record the weights when the sweep begins; require the same when it resumes."""
    weights = initial_weights(sweep.config)
    file = sweep.folder / WEIGHTS_FILE
    digest = parameters_sha256(weights.parameters)
    if hosts.is_first():
        sweep.folder.mkdir(parents=True, exist_ok=True)
        if not file.exists():
            record = {
                "init_from": sweep.config.init_from,
                "source": weights.source,
                "parameters_sha256": digest,
            }
            write_atomically(file, json.dumps(record, indent=2) + "\n")
    hosts.wait_for_all("weights of the sweep recorded")
    if (stored := read_start(file))["parameters_sha256"] != digest:
        raise ValueError(
            f"workdir {str(sweep.folder)!r} holds a sweep of other weights than {sweep.config.init_from!r} has now: of "
            f"{stored.get('init_from')!r}, as it was then. Choose another workdir."
        )
