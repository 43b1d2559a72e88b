"""A sweep: the trials and final runs of its tasks, in order, none of them twice; several machines may share the tasks.

All state is in the runs' own folders: a run that has ended has a `summary.json`, one that was interrupted resumes.
"""

import dataclasses
import json
import pathlib
import shutil
from collections.abc import Iterator, Sequence

from vit_jax import hosts
from vit_jax.checkpoint.store import FOLDER as CHECKPOINTS
from vit_jax.config import FinetuneConfig
from vit_jax.data.sources import open_source
from vit_jax.files import write_atomically
from vit_jax.train import workdir as workdirs
from vit_jax.train.finetune import tune
from vit_jax.train.interruption import Interrupted
from vit_jax.train.overview import parameters_sha256
from vit_jax.train.search import say
from vit_jax.train.writers import write_summary
from vit_jax.transfer.vtab.runs import Outcome, Part, Setting, choose, config_of_run, folder_of_run, outcome_of
from vit_jax.transfer.vtab.suite import Task
from vit_jax.weights import load_weights

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

    def missing_trials(self, tasks: Sequence[Task]) -> Iterator[tuple[Task, Setting]]:
        """Those that have not ended, task by task."""
        for task in tasks if len(self.settings) > 1 else ():
            yield from ((task, setting) for setting in self.settings if self.outcome(task, "trials", setting) is None)

    def chosen(self, task: Task) -> Setting | None:
        """The setting of a task's final run; None while trials are missing."""
        if len(self.settings) == 1:
            return self.settings[0]
        tasks = self.tasks if self.is_shared else (task,)
        trials = {setting: [self.outcome(task, "trials", setting) for task in tasks] for setting in self.settings}
        complete = {setting: [o for o in outcomes if o is not None] for setting, outcomes in trials.items()}
        return choose(complete) if all(len(outcomes) == len(tasks) for outcomes in complete.values()) else None

    def finals(self) -> dict[Task, tuple[Setting, Outcome]]:
        """Settings and outcomes of the final runs that have ended."""
        found = {}
        for task in self.tasks:
            setting = self.chosen(task)
            if setting is not None and (outcome := self.outcome(task, "final", setting)) is not None:
                found[task] = (setting, outcome)
        return found


def unavailable(tasks: Sequence[Task], config: FinetuneConfig) -> dict[Task, str]:
    """Why a task's data cannot be opened, of those whose data cannot."""
    problems = {}
    for task in tasks:
        try:
            for split in (task.train, task.validation, task.train_and_validation, task.test):
                open_source(task.data, split, config.input, config.seed)
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
    _require_same_weights(sweep)
    for tasks in [sweep.own] if sweep.is_shared else [(task,) for task in sweep.own]:
        for task in tasks if len(sweep.settings) > 1 else ():
            for setting in sweep.settings:
                _run(sweep, task, "trials", setting)
        for task in tasks:
            setting = _agreed_choice(sweep, task)
            _run(sweep, task, "final", setting)


def _agreed_choice(sweep: Sweep, task: Task) -> Setting:
    """The setting of a final run, as the first process finds it."""
    setting = sweep.chosen(task)
    found = json.loads(hosts.gather(json.dumps(setting and dataclasses.astuple(setting)))[0])
    if found is None:
        missing = dict.fromkeys(task.name for task, _ in sweep.missing_trials(sweep.tasks))
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
    if hosts.gather("ended" if outcome_of(folder) else "")[0]:
        workdirs.require_same_config(folder, config)
    else:
        say(f"\n{task.name}, {name}: {setting}")
        try:
            tune(config, str(folder))
        except FloatingPointError as error:
            say(f"{task.name}, {name}: {error}")
            if hosts.is_first():  # so that it is not tried again
                write_summary(folder, {"test_accuracy": None, "test_loss": None, "diverged": str(error)})
    if part == "trials" and hosts.is_first():
        shutil.rmtree(folder / CHECKPOINTS, ignore_errors=True)


def _require_same_weights(sweep: Sweep) -> None:
    """Records the weights when the sweep begins; they must be the same when it goes on."""
    weights = load_weights(str(sweep.config.init_from))
    file, digest = sweep.folder / WEIGHTS_FILE, parameters_sha256(weights.parameters)
    if hosts.is_first():
        sweep.folder.mkdir(parents=True, exist_ok=True)
        if not file.exists():
            record = {"init_from": sweep.config.init_from, "source": weights.source, "parameters_sha256": digest}
            write_atomically(file, json.dumps(record, indent=2) + "\n")
    hosts.wait_for_all("weights of the sweep recorded")
    if (stored := json.loads(file.read_text()))["parameters_sha256"] != digest:
        raise ValueError(
            f"workdir {str(sweep.folder)!r} holds a sweep of other weights than {sweep.config.init_from!r} has now: of "
            f"{stored['init_from']!r}, as it was then. Choose another workdir."
        )
