"""The results of a sweep as Markdown, CSV and JSON: tasks, means of groups and of all, the paper's beside them."""

import json
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from vit_jax.evals.intervals import wilson
from vit_jax.files import write_atomically
from vit_jax.sweeps.vtab import WEIGHTS_FILE, Sweep
from vit_jax.tables import aligned
from vit_jax.tables import to_csv as rows_to_csv
from vit_jax.train.run_files import read_start
from vit_jax.transfer.vtab.suite import PUBLISHED, Task

FILE = "results"  # in the sweep's folder, with the ending of each format
_HEAD = ("task", "group", "top-1 %", "95 %", "test images", "learning rate", "steps")
_WORDS = ("task", "group", "data", "this machine", "final run")  # columns that are aligned to the left


class Result(NamedTuple):
    """A task whose final run has ended."""

    task: Task
    accuracy: float  # fraction of the test images
    interval: tuple[float, float]  # that the true accuracy lies in, 95 %
    test_images: int
    learning_rate: float
    steps: int
    validation_accuracy: float | None  # of the trial of this setting; None without trials


class Mean(NamedTuple):
    """Over the tasks of a group, or all, that are there; the paper's over the same tasks."""

    name: str
    accuracy: float
    num_tasks: int
    of: int
    published: tuple[float, ...]  # percent; () where the paper lacks one of the tasks


def results_of(sweep: Sweep) -> list[Result]:
    """In the order of the suite; a final run that diverged is not there."""
    found = []
    for task, (setting, outcome) in sweep.finals().items():
        trial = sweep.outcome(task, "trials", setting)
        if outcome.accuracy is not None:
            interval = wilson(outcome.accuracy * outcome.num_images, outcome.num_images)
            numbers = (outcome.accuracy, interval, outcome.num_images, setting.learning_rate, setting.num_steps)
            found.append(Result(task, *numbers, trial.accuracy if trial else None))
    return found


def means_of(sweep: Sweep, results: Sequence[Result]) -> list[Mean]:
    """Unweighted means of each group of several, and of all tasks."""
    groups = list(dict.fromkeys(task.group for task in sweep.asked))
    means = []
    for group in [*(groups if len(groups) > 1 else []), None]:
        members = [result for result in results if group in (result.task.group, None)]
        of = len([task for task in sweep.asked if group in (task.group, None)])
        if members:
            figures = [result.task.published for result in members]
            published = tuple(map(_mean, zip(*figures, strict=True))) if all(figures) else ()
            accuracy = _mean([result.accuracy for result in members])
            means.append(Mean(group or "all tasks", accuracy, len(members), of, published))
    return means


def to_markdown(sweep: Sweep, results: Sequence[Result]) -> str:
    """Percent of the test images, by task; then the means, with the number of tasks they are over."""
    columns = PUBLISHED if any(result.task.published for result in results) else ()
    lines = []
    for result in results:
        interval = " to ".join(f"{100 * end:.2f}" for end in result.interval)
        row = [result.task.name, result.task.group, f"{100 * result.accuracy:.2f}", interval]
        row += [f"{result.test_images:,}", f"{result.learning_rate:g}", f"{result.steps:,}"]
        lines.append([*row, *_figures(result.task.published, columns, digits=1)])
    for mean in means_of(sweep, results):
        accuracy, number = f"**{100 * mean.accuracy:.2f}**", f"{mean.num_tasks} of {mean.of} tasks"
        row = [f"**{mean.name}**", "", accuracy, "", number, "", ""]
        lines.append([*row, *_figures(mean.published, columns, digits=2)])
    missing = [task.name for task in sweep.asked if task not in {result.task for result in results}]
    note = f"\nWithout a result: {', '.join(missing)}.\n" if missing else ""
    return aligned([*_HEAD, *columns], lines, _WORDS) + note


def trials_to_markdown(sweep: Sweep) -> str:
    """The mean validation accuracy of each setting over the tasks, whose best is taken for all of them."""
    lines, chosen = [], sweep.chosen(sweep.tasks[0])
    for setting in sweep.tried:
        outcomes = [sweep.outcome(task, "trials", setting) for task in sweep.tasks]
        accuracies = [outcome.rank[0] for outcome in outcomes if outcome is not None]
        mark = " (chosen)" if setting == chosen else ""
        mean = f"{100 * _mean(accuracies):.2f}{mark}" if accuracies else "–"
        lines.append([f"{setting.learning_rate:g}", f"{setting.num_steps:,}", f"{len(accuracies)}", mean])
    return aligned(["learning rate", "steps", "tasks", "mean validation top-1 %"], lines)


def plan_to_markdown(sweep: Sweep) -> str:
    """What a sweep has done and has to do, by task; and what is left for this machine."""
    lines, steps_left = [], 0
    for task, chosen in sweep.choices().items():
        left = sweep.untried(task)
        is_done = chosen is not None and sweep.outcome(task, "final", chosen) is not None
        own = task in sweep.own
        longest = max(setting.num_steps for setting in sweep.settings)
        final = 0 if is_done else chosen.num_steps if chosen else longest
        steps_left += own * (sum(setting.num_steps for setting in left) + final)
        done = f"{len(sweep.tried) - len(left)} of {len(sweep.tried)}"
        lines.append([task.name, task.group, task.data, "yes" if own else "no", done, "done" if is_done else "to do"])
    batch, (height, width) = sweep.config.global_batch, sweep.config.input.image_size
    return aligned(["task", "group", "data", "this machine", "trials done", "final run"], lines, _WORDS) + (
        f"\nLeft for this machine: at most {steps_left:,} steps of {batch} images, {steps_left * batch:,} images of "
        f"{height}x{width} pixels.\n"
    )


def to_csv(results: Sequence[Result]) -> str:
    """One line for each task, and none for means; accuracies are fractions, and the paper's percent as printed."""
    names = ("test_accuracy", "low", "high", *Result._fields[3:])
    rows: list[list[Any]] = [["task", "group", *names, *(f"paper_percent: {column}" for column in PUBLISHED)]]
    for task, accuracy, interval, *numbers in results:
        rows.append([task.name, task.group, accuracy, *interval, *numbers, *task.published])
    return rows_to_csv(rows)


def to_json(sweep: Sweep, results: Sequence[Result]) -> dict[str, Any]:
    """The table, each trial, and how settings were chosen."""
    runs = [
        (task, setting, sweep.outcome(task, "trials", setting)) for task in sweep.tasks for setting in sweep.settings
    ]
    return {
        "weights": read_start(sweep.folder / WEIGHTS_FILE),
        "sweep": "shared" if sweep.is_shared else "per_task",
        "trials": [
            {
                "task": task.name,
                "learning_rate": setting.learning_rate,
                "steps": setting.num_steps,
                "validation_accuracy": trial.accuracy,
            }
            for task, setting, trial in runs
            if trial is not None
        ],
        "tasks": [
            {"task": result.task.name, "group": result.task.group}
            | dict(zip(("test_accuracy", *Result._fields[2:]), result[1:], strict=True))
            | {"published_percent": result.task.published}
            for result in results
        ],
        "means": [mean._asdict() for mean in means_of(sweep, results)],
        "published": PUBLISHED,
    }


def write_results(sweep: Sweep) -> str:
    """Writes the results that are there in each format; returns the Markdown."""
    results = results_of(sweep)
    trials = f"{trials_to_markdown(sweep)}\n" if sweep.tried and sweep.is_shared else ""
    table = trials + to_markdown(sweep, results)
    in_json = json.dumps(to_json(sweep, results), indent=2) + "\n"
    contents = {"md": table, "csv": to_csv(results), "json": in_json}
    for ending, content in contents.items():
        write_atomically(sweep.folder / f"{FILE}.{ending}", content)
    return table


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _figures(published: Sequence[float], columns: Sequence[str], digits: int) -> list[str]:
    return [f"{figure:.{digits}f}" for figure in published] or ["–"] * len(columns)
