"""VTAB-1k: each task is trained with the setting that is best on validation examples.

With a shared setting the trials of all tasks come first. Several machines may share the tasks.
"""

import dataclasses
import itertools
import json
import pathlib
from collections.abc import Sequence
from typing import Literal

from vit_jax import hosts
from vit_jax.config import Duration, FinetuneConfig, InputConfig, StopEarlyConfig
from vit_jax.data.sources import open_source
from vit_jax.pytree import parameters_sha256
from vit_jax.storage.files import write_atomically
from vit_jax.tools.sweeps.suite import Task
from vit_jax.train.finetune import tune
from vit_jax.train.lifecycle import workdir as workdirs
from vit_jax.train.rate_search import trial_config, with_learning_rate
from vit_jax.train.run_files import read_start, read_summary
from vit_jax.train.series import RunResult, Unfinished, choose, parse_result, run_once, share_first
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


def choose_learning_rates(config: FinetuneConfig) -> tuple[float, ...]:
    """Return 0.3 of the recipe's learning rate, and this rate: of the paper's recipe `LEARNING_RATES`.

    These are also the rates for a recipe that searches its own.
    """
    rate = config.schedule.learning_rate
    if not rate:
        return LEARNING_RATES
    return float(f"{0.3 * rate:.2g}"), rate


def build_settings(
    learning_rates: Sequence[float] = LEARNING_RATES,
    lengths: Sequence[tuple[int, int]] = LENGTHS,
) -> tuple[Setting, ...]:
    """Return every learning rate with every length (steps, and warm-up steps among them)."""
    settings = []
    for num_steps, warmup_steps in lengths:
        for learning_rate in learning_rates:
            settings.append(Setting(num_steps, warmup_steps, learning_rate))
    return tuple(settings)


def get_run_folder(
    workdir: pathlib.Path,
    task: Task,
    part: Part,
    setting: Setting,
) -> pathlib.Path:
    """Return the workdir of a run."""
    name = f"learning_rate={setting.learning_rate!r},steps={setting.num_steps}"
    return workdir / task.name / part / name


def build_run_config(
    config: FinetuneConfig,
    task: Task,
    part: Part,
    setting: Setting,
) -> FinetuneConfig:
    """Return the recipe with a task's data and a setting, evaluated once, at its end.

    A trial is tested on the validation examples, a final run on the test images.
    """
    total = Duration(f"{setting.num_steps} steps")
    warmup = Duration(f"{setting.warmup_steps} steps")
    config = dataclasses.replace(
        config,
        data=task.data,
        total=total,
        input=_build_input(config.input, task, part),
        schedule=dataclasses.replace(config.schedule, warmup=warmup),
        evaluation=dataclasses.replace(config.evaluation, every=total),
        checkpoint=dataclasses.replace(config.checkpoint, keep_latest=1, keep_best=0),
        stop_early=StopEarlyConfig(),
    )
    if part == "trials":
        return trial_config(config, setting.learning_rate)
    return with_learning_rate(config, setting.learning_rate)


def _build_input(inputs: InputConfig, task: Task, part: Part) -> InputConfig:
    """Return the recipe's input with the splits and the augmentations of a task."""
    inputs = dataclasses.replace(
        inputs,
        train_split=task.train if part == "trials" else task.train_and_validation,
        test_split=task.validation if part == "trials" else task.test,
        flip=inputs.flip and task.flip,
    )
    if task.crop:
        return inputs
    return dataclasses.replace(
        inputs,
        train_crop="none",
        train_resize_pixels=None,
        shift_pixels=0,
        crop_area_fraction=InputConfig.crop_area_fraction,
        crop_distribution=InputConfig.crop_distribution,
    )


def read_result(folder: pathlib.Path) -> RunResult | None:
    """Return the result of a run; None if it has not ended."""
    summary = read_summary(folder, ("test_accuracy",), ("test_loss",))
    if summary is None:
        return None
    return parse_result(summary)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sweep:
    """All runs on a suite of tasks.

    Attributes:
      requested: the tasks of the command.
      tasks: requested tasks whose data can be opened, on every machine.
      local_tasks: the tasks of this machine.
      settings: to compare; a single one needs no trials.
      is_shared: one setting for all tasks, by the mean over their validation examples; else one for
        each task.
      config: a recipe for fine-tuning, with `init_from`; fields of task and setting are replaced.
      folder: the workdir of the sweep.
    """

    requested: tuple[Task, ...]
    tasks: tuple[Task, ...]
    local_tasks: tuple[Task, ...]
    settings: tuple[Setting, ...]
    is_shared: bool
    config: FinetuneConfig
    folder: pathlib.Path

    @property
    def trial_settings(self) -> tuple[Setting, ...]:
        """The settings that have trials: none if there is only one setting."""
        if len(self.settings) == 1:
            return ()
        return self.settings

    def read_result(
        self,
        task: Task,
        part: Part,
        setting: Setting,
    ) -> RunResult | None:
        """Return the result of a run; None if it has not ended."""
        return read_result(get_run_folder(self.folder, task, part, setting))

    def read_trials(self, task: Task) -> dict[Setting, RunResult]:
        """Return the results of the trials that have ended."""
        trials = {}
        for setting in self.trial_settings:
            result = self.read_result(task, "trials", setting)
            if result is not None:
                trials[setting] = result
        return trials

    def choose_setting(self, task: Task) -> Setting | None:
        """Return the setting of a task's final run; None if trials are missing.

        Raises:
          ValueError: the loss diverged in all trials.
        """
        if not self.trial_settings:
            return self.settings[0]

        tasks = self.tasks if self.is_shared else (task,)
        results: dict[Setting, list[RunResult]] = {setting: [] for setting in self.trial_settings}
        for trials in map(self.read_trials, tasks):
            if len(trials) < len(self.trial_settings):
                return None
            for setting, result in trials.items():
                results[setting].append(result)

        all_results = itertools.chain(*results.values())
        if self.is_shared and all(result.accuracy is None for result in all_results):
            raise ValueError(
                "No trial's loss stayed finite: try lower learning rates (--learning_rates=)."
            )
        return choose(results)

    def choose_settings(self) -> dict[Task, Setting | None]:
        """Return the setting of the final run of every task."""
        if self.is_shared:
            return dict.fromkeys(self.tasks, self.choose_setting(self.tasks[0]))
        return {task: self.choose_setting(task) for task in self.tasks}

    def read_final_results(self) -> dict[Task, tuple[Setting, RunResult]]:
        """Return settings and results of the final runs that have ended."""
        results = {}
        for task, setting in self.choose_settings().items():
            if setting is None:
                continue
            result = self.read_result(task, "final", setting)
            if result is not None:
                results[task] = (setting, result)
        return results


def find_unavailable(tasks: Sequence[Task], config: FinetuneConfig) -> dict[Task, str]:
    """Return the tasks whose data cannot be used, with the reason."""
    problems = {}
    for task in tasks:
        try:
            _open_splits(task, config)
        except ValueError as error:
            problems[task] = str(error)
    return problems


def _open_splits(task: Task, config: FinetuneConfig) -> None:
    """Open every split of a task; raise ValueError if one is missing or multi-label."""
    for split in (task.train, task.validation, task.train_and_validation, task.test):
        source = open_source(task.data, split, config.input, config.seed)
        if source.is_multilabel:
            raise ValueError(
                f"{task.data}: its images may have several labels, and a task has one for each."
            )


def run_sweep(sweep: Sweep) -> None:
    """Perform this machine's unfinished runs.

    With a shared setting all trials come first, then the final runs.

    Every process of the machine's run calls this, after `hosts.start`.

    Raises:
      ValueError: the workdir is of other weights, or a run in it of another config; otherwise as
        `finetune`.
      Unfinished: trials of other machines are missing.
      Interrupted: SIGTERM or Ctrl-C; the run it arrived in is saved.
    """
    with workdirs.undo_after_rejection(sweep.folder, WEIGHTS_FILE):
        _require_same_weights(sweep)
        groups: list[tuple[Task, ...]] = [sweep.local_tasks]
        if not sweep.is_shared:
            groups = [(task,) for task in sweep.local_tasks]
        for tasks in groups:
            for task, setting in itertools.product(tasks, sweep.trial_settings):
                _run(sweep, task, "trials", setting)
            for task in tasks:
                _run(sweep, task, "final", _agree_on_setting(sweep, task))


def _agree_on_setting(sweep: Sweep, task: Task) -> Setting:
    """Return the setting of a final run, as the first process chooses it."""
    setting = sweep.choose_setting(task)
    values = share_first(setting and dataclasses.astuple(setting))
    if values is None:
        num_trials = len(sweep.trial_settings)
        missing = [task.name for task in sweep.tasks if len(sweep.read_trials(task)) < num_trials]
        raise Unfinished(
            "The trials of this machine's tasks have ended. The setting is chosen over all tasks, "
            f"and trials of {', '.join(missing)} are missing in {sweep.folder}. "
            "The same command goes on when they have ended."
        )
    return Setting(*values)


def _run(sweep: Sweep, task: Task, part: Part, setting: Setting) -> None:
    """Train and evaluate, unless that has been done."""
    config = build_run_config(sweep.config, task, part, setting)
    folder = get_run_folder(sweep.folder, task, part, setting)
    name = {"trials": "trial", "final": "final run"}[part]
    title = f"\n{task.name}, {name}: {setting}"
    run_once(config, folder, tune, title, is_trial=part == "trials")


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

    stored = read_start(file)
    if stored["parameters_sha256"] != digest:
        raise ValueError(
            f"workdir {str(sweep.folder)!r} holds a sweep of other weights than "
            f"{sweep.config.init_from!r} has now: of "
            f"{stored.get('init_from')!r}, as it was then. Choose another workdir."
        )
