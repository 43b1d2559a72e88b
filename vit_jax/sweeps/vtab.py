"""A sweep: the trials and final runs of its tasks, in order, none of them twice; several machines may share the tasks.

All state is in the runs' own folders: a run that has ended has a `summary.json`, one that was interrupted resumes.
"""

import dataclasses
import json
import pathlib
import shutil
from collections.abc import Sequence

from vit_jax import hosts
from vit_jax.checkpoint.store import FOLDER as CHECKPOINTS
from vit_jax.config import FinetuneConfig
from vit_jax.data.sources import open_source
from vit_jax.files import write_atomically
from vit_jax.sweeps.vtab_runs import Outcome, Part, Setting, choose, config_of_run, folder_of_run, outcome_of
from vit_jax.train import workdir as workdirs
from vit_jax.train.finetune import tune
from vit_jax.train.interruption import Interrupted
from vit_jax.train.overview import parameters_sha256
from vit_jax.train.run_files import read_start
from vit_jax.train.series import run_once
from vit_jax.train.start import initial_weights
from vit_jax.transfer.vtab.suite import Task

WEIGHTS_FILE = "weights.json"


class Unfinished(Interrupted):
    """The runs of this machine have ended, and the next ones need those of others."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sweep:
    """Which runs there are.

    Attributes:
      asked: for in the command.
      tasks: those of them whose data are there, on every machine.
      own: those whose runs this machine does.
      settings: that are compared; a single one needs no trials.
      is_shared: one setting for all tasks, by the mean over their validation examples; else each task has its own.
      config: a recipe for fine-tuning, with `init_from`; what depends on task and setting is replaced.
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
        """What a run came to; None while it has not ended."""
        return outcome_of(folder_of_run(self.folder, task, part, setting))

    @property
    def tried(self) -> tuple[Setting, ...]:
        """The settings of trials."""
        return self.settings if len(self.settings) > 1 else ()

    def untried(self, task: Task) -> list[Setting]:
        """Those whose trial has not ended."""
        return [setting for setting in self.tried if self.outcome(task, "trials", setting) is None]

    def chosen(self, task: Task) -> Setting | None:
        """The setting of a task's final run; None while trials are missing.

        Raises:
          ValueError: not one trial of any task stayed finite.
        """
        if not self.tried:
            return self.settings[0]
        tasks = self.tasks if self.is_shared else (task,)
        trials = {setting: [self.outcome(task, "trials", setting) for task in tasks] for setting in self.tried}
        ended = {setting: [outcome for outcome in found if outcome is not None] for setting, found in trials.items()}
        if any(len(outcomes) < len(tasks) for outcomes in ended.values()):
            return None
        if self.is_shared and all(outcome.accuracy is None for outcomes in ended.values() for outcome in outcomes):
            raise ValueError("No trial's loss stayed finite: try lower learning rates (--learning_rates=).")
        return choose(ended)

    def choices(self) -> dict[Task, Setting | None]:
        """`chosen` of every task; a shared choice is made of all outcomes once."""
        if self.is_shared:
            return dict.fromkeys(self.tasks, self.chosen(self.tasks[0]))
        return {task: self.chosen(task) for task in self.tasks}

    def finals(self) -> dict[Task, tuple[Setting, Outcome]]:
        """Settings and outcomes of the final runs that have ended."""
        found = {}
        for task, setting in self.choices().items():
            if setting is not None and (outcome := self.outcome(task, "final", setting)) is not None:
                found[task] = (setting, outcome)
        return found


def unavailable(tasks: Sequence[Task], config: FinetuneConfig) -> dict[Task, str]:
    """Why a task's data cannot be opened, of those whose data cannot."""
    problems = {}
    for task in tasks:
        try:
            for split in (task.train, task.validation, task.train_and_validation, task.test):
                if open_source(task.data, split, config.input, config.seed).is_multilabel:
                    raise ValueError(f"{task.data}: its images may have several labels, and a task has one for each.")
        except ValueError as error:
            problems[task] = str(error)
    return problems


def run_sweep(sweep: Sweep) -> None:
    """Does what is left of this machine's runs: with a shared choice all trials first, then the final runs.

    Every process of the machine's run calls this, after `hosts.start`.

    Raises:
      ValueError: the workdir is of other weights, or a run in it of another config; otherwise as `finetune`.
      Unfinished: trials of other machines are missing.
      Interrupted: SIGTERM or Ctrl-C; the run it arrived in is saved.
    """
    with workdirs.refused_without_trace(sweep.folder, WEIGHTS_FILE):
        _require_same_weights(sweep)
        _run_all(sweep)


def _run_all(sweep: Sweep) -> None:
    for tasks in [sweep.own] if sweep.is_shared else [(task,) for task in sweep.own]:
        for task in tasks:
            for setting in sweep.tried:
                _run(sweep, task, "trials", setting)
        for task in tasks:
            _run(sweep, task, "final", _agreed_choice(sweep, task))


def _agreed_choice(sweep: Sweep, task: Task) -> Setting:
    """The setting of a final run, as the first process finds it."""
    setting = sweep.chosen(task)
    found = json.loads(hosts.gather(json.dumps(setting and dataclasses.astuple(setting)))[0])
    if found is None:
        missing = [task.name for task in sweep.tasks if sweep.untried(task)]
        raise Unfinished(
            "The trials of this machine's tasks have ended. The setting is chosen over all tasks, and trials of "
            f"{', '.join(missing)} are missing in {sweep.folder}. The same command goes on when the machines that "
            "have these tasks have done them."
        )
    return Setting(*found)


def _run(sweep: Sweep, task: Task, part: Part, setting: Setting) -> None:
    """Trains and evaluates, unless that has been done; of a trial only its results are kept."""
    config = config_of_run(sweep.config, task, part, setting)
    folder = folder_of_run(sweep.folder, task, part, setting)
    name = {"trials": "trial", "final": "final run"}[part]
    run_once(config, folder, tune, f"{task.name}, {name}: {setting}")
    if part == "trials" and hosts.is_first():
        shutil.rmtree(folder / CHECKPOINTS, ignore_errors=True)


def _require_same_weights(sweep: Sweep) -> None:
    """Records the weights when the sweep begins; they must be the same when it goes on."""
    weights = initial_weights(sweep.config)
    file, digest = sweep.folder / WEIGHTS_FILE, parameters_sha256(weights.parameters)
    if hosts.is_first():
        sweep.folder.mkdir(parents=True, exist_ok=True)
        if not file.exists():
            record = {"init_from": sweep.config.init_from, "source": weights.source, "parameters_sha256": digest}
            write_atomically(file, json.dumps(record, indent=2) + "\n")
    hosts.wait_for_all("weights of the sweep recorded")
    if (stored := read_start(file))["parameters_sha256"] != digest:
        raise ValueError(
            f"workdir {str(sweep.folder)!r} holds a sweep of other weights than {sweep.config.init_from!r} has now: of "
            f"{stored.get('init_from')!r}, as it was then. Choose another workdir."
        )
