"""The results of VTAB as Markdown, CSV and JSON: tasks, means of groups and of all, the paper's beside them."""

import json
import statistics
from collections.abc import Sequence
from typing import Any

from vit_jax.evals.intervals import wilson_interval
from vit_jax.storage.files import write_atomically
from vit_jax.text.tables import aligned
from vit_jax.text.tables import to_csv as rows_to_csv
from vit_jax.tools.sweeps.suite import PUBLISHED
from vit_jax.tools.sweeps.vtab import WEIGHTS_FILE, Sweep
from vit_jax.train.run_files import read_start

FILE = "results"  # in the sweep's folder, with the ending of each format
Row = dict[str, Any]
_HEAD = ("task", "group", "top-1 %", "95 %", "test images", "learning rate", "steps")
_WORDS = (
    "task",
    "group",
    "data",
    "this machine",
    "final run",
)  # columns that are aligned to the left


def results_of(sweep: Sweep) -> list[Row]:
    """Return one row for each task whose final run has ended and not diverged.

    Accuracies are fractions.
    """
    rows = []
    for task, (setting, outcome) in sweep.finals().items():
        if (accuracy := outcome.accuracy) is not None:
            trial = sweep.outcome(task, "trials", setting)
            num_images = outcome.num_images
            row = {"task": task.name, "group": task.group, "test_accuracy": accuracy}
            row |= {
                "interval": wilson_interval(accuracy * num_images, num_images),
                "test_images": num_images,
            }  # 95 %
            row |= {"learning_rate": setting.learning_rate, "steps": setting.num_steps}
            row |= {
                "validation_accuracy": trial.accuracy if trial else None,
                "published_percent": task.published,
            }
            rows.append(row)
    return rows


def means_of(sweep: Sweep, rows: Sequence[Row]) -> list[Row]:
    """Return unweighted means of each group of several, and of all tasks; the paper's if it has all these tasks."""
    groups = list(dict.fromkeys(task.group for task in sweep.asked))
    means = []
    for group in [*(groups if len(groups) > 1 else []), None]:
        members = [row for row in rows if group in (row["group"], None)]
        figures = [row["published_percent"] for row in members]
        if members:
            mean = {
                "name": group or "all tasks",
                "accuracy": statistics.fmean(row["test_accuracy"] for row in members),
            }
            mean |= {
                "num_tasks": len(members),
                "of": sum(group in (task.group, None) for task in sweep.asked),
            }
            published = (
                tuple(map(statistics.fmean, zip(*figures, strict=True))) if all(figures) else ()
            )
            means.append(mean | {"published": published})
    return means


def to_markdown(sweep: Sweep, rows: Sequence[Row]) -> str:
    """Return a table of top-1 in percent by task, then the means with their numbers of tasks."""
    columns = PUBLISHED if any(row["published_percent"] for row in rows) else ()

    def published(figures: Sequence[float], digits: int) -> list[str]:
        return [f"{figure:.{digits}f}" for figure in figures] or ["–"] * len(columns)

    lines = []
    for row in rows:
        line = [row["task"], row["group"], f"{100 * row['test_accuracy']:.2f}"]
        line += [
            " to ".join(f"{100 * end:.2f}" for end in row["interval"]),
            f"{row['test_images']:,}",
        ]
        line += [f"{row['learning_rate']:g}", f"{row['steps']:,}"]
        lines.append([*line, *published(row["published_percent"], 1)])
    for mean in means_of(sweep, rows):
        line = [f"**{mean['name']}**", "", f"**{100 * mean['accuracy']:.2f}**", ""]
        line += [f"{mean['num_tasks']} of {mean['of']} tasks", "", ""]
        lines.append([*line, *published(mean["published"], 2)])
    have = {row["task"] for row in rows}
    missing = [task.name for task in sweep.asked if task.name not in have]
    note = f"\nWithout a result: {', '.join(missing)}.\n" if missing else ""
    return aligned([*_HEAD, *columns], lines, _WORDS) + note


def trials_to_markdown(sweep: Sweep) -> str:
    """Return a table of the mean validation accuracy of each setting over the tasks."""
    lines = []
    chosen = sweep.chosen(sweep.tasks[0])
    trials = [sweep.trials(task) for task in sweep.tasks]
    for setting in sweep.tried:
        accuracies = [outcomes[setting].rank[0] for outcomes in trials if setting in outcomes]
        mark = " (chosen)" if setting == chosen else ""
        mean = f"{100 * statistics.fmean(accuracies):.2f}{mark}" if accuracies else "–"
        lines.append(
            [f"{setting.learning_rate:g}", f"{setting.num_steps:,}", f"{len(accuracies)}", mean]
        )
    return aligned(["learning rate", "steps", "tasks", "mean validation top-1 %"], lines)


def plan_to_markdown(sweep: Sweep) -> str:
    """Return a table of finished and missing runs of a sweep by task, and those left for this machine."""
    lines = []
    steps_left = 0
    for task, chosen in sweep.choices().items():
        trials = sweep.trials(task)
        own = task in sweep.own
        is_done = chosen is not None and sweep.outcome(task, "final", chosen) is not None
        longest = max(setting.num_steps for setting in sweep.settings)
        final = 0 if is_done else chosen.num_steps if chosen else longest
        steps_left += own * (
            sum(setting.num_steps for setting in sweep.tried if setting not in trials) + final
        )
        done = f"{len(trials)} of {len(sweep.tried)}"
        lines.append(
            [
                task.name,
                task.group,
                task.data,
                "yes" if own else "no",
                done,
                "done" if is_done else "to do",
            ]
        )
    batch = sweep.config.global_batch
    (height, width) = sweep.config.input.image_size
    return aligned(
        ["task", "group", "data", "this machine", "trials done", "final run"], lines, _WORDS
    ) + (
        f"\nLeft for this machine: at most {steps_left:,} steps of {batch} images, {steps_left * batch:,} images of "
        f"{height}x{width} pixels.\n"
    )


def to_json(sweep: Sweep, rows: Sequence[Row]) -> dict[str, Any]:
    """Return the table, each trial, and how settings were chosen."""
    trials = []
    for task in sweep.tasks:
        for setting in sweep.settings:
            if trial := sweep.outcome(task, "trials", setting):
                row = {
                    "task": task.name,
                    "learning_rate": setting.learning_rate,
                    "steps": setting.num_steps,
                }
                trials.append(row | {"validation_accuracy": trial.accuracy})
    return {
        "weights": read_start(sweep.folder / WEIGHTS_FILE),
        "sweep": "shared" if sweep.is_shared else "per_task",
        "trials": trials,
        "tasks": rows,
        "means": means_of(sweep, rows),
        "published": PUBLISHED,
    }


def write_results(sweep: Sweep) -> str:
    """Write the results so far in each format; return the Markdown. CSV has no means."""
    rows = results_of(sweep)
    table = f"{trials_to_markdown(sweep)}\n" if sweep.tried and sweep.is_shared else ""
    table += to_markdown(sweep, rows)
    names = [
        "task",
        "group",
        "test_accuracy",
        "low",
        "high",
        "test_images",
        "learning_rate",
        "steps",
    ]
    head = [*names, "validation_accuracy", *(f"paper_percent: {column}" for column in PUBLISHED)]
    cells = [
        [part for cell in row.values() for part in (cell if isinstance(cell, tuple) else (cell,))]
        for row in rows
    ]
    in_json = json.dumps(to_json(sweep, rows), indent=2) + "\n"
    for ending, content in {
        "md": table,
        "csv": rows_to_csv([head, *cells]),
        "json": in_json,
    }.items():
        write_atomically(sweep.folder / f"{FILE}.{ending}", content)
    return table
