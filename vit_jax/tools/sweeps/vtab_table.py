"""The results of VTAB as Markdown, CSV and JSON, with the paper's results beside them."""

import collections
import json
import statistics
from collections.abc import Collection, Sequence

from vit_jax.evals.intervals import wilson_interval
from vit_jax.storage.files import JsonObject, write_atomically
from vit_jax.text.tables import align_table
from vit_jax.text.tables import to_csv as rows_to_csv
from vit_jax.tools.sweeps.suite import PUBLISHED, Task
from vit_jax.tools.sweeps.vtab import WEIGHTS_FILE, Setting, Sweep
from vit_jax.train.run_files import read_start
from vit_jax.train.series import RunResult

FILE = "results"  # in the sweep's folder, with the ending of each format
Row = JsonObject
_RESULTS_HEAD = ("task", "group", "top-1 %", "95 %", "test images", "learning rate", "steps")
_PLAN_HEAD = ("task", "group", "data", "this machine", "trials done", "final run")
_TRIALS_HEAD = ("learning rate", "steps", "tasks", "mean validation top-1 %")
_TEXT_COLUMNS = ("task", "group", "data", "this machine", "final run")
_CSV_HEAD = (
    "task",
    "group",
    "test_accuracy",
    "low",
    "high",
    "test_images",
    "learning_rate",
    "steps",
    "validation_accuracy",
    *(f"paper_percent: {column}" for column in PUBLISHED),
)


def build_rows(sweep: Sweep) -> list[Row]:
    """Return one row for each task whose final run has ended and not diverged.

    Accuracies are fractions.
    """
    rows = []
    for task, (setting, result) in sweep.read_final_results().items():
        if result.accuracy is not None:
            rows.append(_build_row(sweep, task, setting, result, result.accuracy))
    return rows


def _build_row(
    sweep: Sweep,
    task: Task,
    setting: Setting,
    result: RunResult,
    accuracy: float,
) -> Row:
    validation_accuracy = None
    trial = sweep.read_result(task, "trials", setting)
    if trial:
        validation_accuracy = trial.accuracy
    num_correct = accuracy * result.num_images
    return {
        "task": task.name,
        "group": task.group,
        "test_accuracy": accuracy,
        "interval": wilson_interval(num_correct, result.num_images),  # 95 %
        "test_images": result.num_images,
        "learning_rate": setting.learning_rate,
        "steps": setting.num_steps,
        "validation_accuracy": validation_accuracy,
        "published_percent": task.published,
    }


def compute_means(sweep: Sweep, rows: Sequence[Row]) -> list[Row]:
    """Return unweighted means of each group of several, and of all tasks.

    The paper's means are added if it has all these tasks.
    """
    requested = collections.Counter(task.group for task in sweep.requested)
    means = []
    if len(requested) > 1:
        for group, num_requested in requested.items():
            members = [row for row in rows if row["group"] == group]
            if members:
                means.append(_compute_mean(group, members, num_requested))
    if rows:
        means.append(_compute_mean("all tasks", rows, len(sweep.requested)))
    return means


def _compute_mean(name: str, rows: Sequence[Row], num_requested: int) -> Row:
    accuracies = []
    published_by_task = []
    for row in rows:
        accuracies.append(row["test_accuracy"])
        published_by_task.append(row["published_percent"])

    published: tuple[float, ...] = ()
    if all(published_by_task):
        columns = zip(*published_by_task, strict=True)
        published = tuple(map(statistics.fmean, columns))
    return {
        "name": name,
        "accuracy": statistics.fmean(accuracies),
        "num_tasks": len(rows),
        "of": num_requested,
        "published": published,
    }


def to_markdown(sweep: Sweep, rows: Sequence[Row]) -> str:
    """Return a table of top-1 in percent by task, then the means with their numbers of tasks."""
    has_published = any(row["published_percent"] for row in rows)
    columns = PUBLISHED if has_published else ()
    num_published = len(columns)
    lines = []
    for row in rows:
        lines.append(_format_task(row, num_published))
    for mean in compute_means(sweep, rows):
        lines.append(_format_mean(mean, num_published))
    head = [*_RESULTS_HEAD, *columns]
    table = align_table(head, lines, _TEXT_COLUMNS)

    finished = {row["task"] for row in rows}
    missing = [task.name for task in sweep.requested if task.name not in finished]
    if missing:
        names = ", ".join(missing)
        table += f"\nWithout a result: {names}.\n"
    return table


def _format_task(row: Row, num_published: int) -> list[str]:
    low, high = row["interval"]
    published = [f"{percent:.1f}" for percent in row["published_percent"]]
    return [
        row["task"],
        row["group"],
        f"{100 * row['test_accuracy']:.2f}",
        f"{100 * low:.2f} to {100 * high:.2f}",
        f"{row['test_images']:,}",
        f"{row['learning_rate']:g}",
        f"{row['steps']:,}",
        *(published or ["–"] * num_published),
    ]


def _format_mean(mean: Row, num_published: int) -> list[str]:
    published = [f"{percent:.2f}" for percent in mean["published"]]
    return [
        f"**{mean['name']}**",
        "",
        f"**{100 * mean['accuracy']:.2f}**",
        "",
        f"{mean['num_tasks']} of {mean['of']} tasks",
        "",
        "",
        *(published or ["–"] * num_published),
    ]


def trials_to_markdown(sweep: Sweep) -> str:
    """Return a table of the mean validation accuracy of each setting over the tasks."""
    chosen = sweep.choose_setting(sweep.tasks[0])
    trials_by_task = [sweep.read_trials(task) for task in sweep.tasks]
    lines = []
    for setting in sweep.trial_settings:
        accuracies = []
        for trials in trials_by_task:
            if setting in trials:
                accuracy, *_ = trials[setting].rank
                accuracies.append(accuracy)

        mean = "–"
        if accuracies:
            mean = f"{100 * statistics.fmean(accuracies):.2f}"
            if setting == chosen:
                mean += " (chosen)"
        line = [
            f"{setting.learning_rate:g}",
            f"{setting.num_steps:,}",
            f"{len(accuracies)}",
            mean,
        ]
        lines.append(line)
    return align_table(_TRIALS_HEAD, lines)


def plan_to_markdown(sweep: Sweep) -> str:
    """Return a table of runs by task, and the number of steps left for this machine."""
    lines = []
    steps_left = 0
    for task, setting in sweep.choose_settings().items():
        trials = sweep.read_trials(task)
        is_local = task in sweep.local_tasks
        is_done = False
        if setting is not None:
            is_done = sweep.read_result(task, "final", setting) is not None
        if is_local:
            steps_left += _count_trial_steps(sweep, trials)
        if is_local and not is_done:
            steps_left += _count_final_steps(sweep, setting)
        lines.append(
            [
                task.name,
                task.group,
                task.data,
                "yes" if is_local else "no",
                f"{len(trials)} of {len(sweep.trial_settings)}",
                "done" if is_done else "to do",
            ]
        )

    batch = sweep.config.global_batch
    height, width = sweep.config.input.pixels
    summary = (
        f"Left for this machine: at most {steps_left:,} steps of {batch} images, "
        f"{steps_left * batch:,} images of {height}x{width} pixels."
    )
    table = align_table(_PLAN_HEAD, lines, _TEXT_COLUMNS)
    return f"{table}\n{summary}\n"


def _count_trial_steps(sweep: Sweep, finished: Collection[Setting]) -> int:
    """Return the number of steps of the missing trials of a task."""
    return sum(setting.num_steps for setting in sweep.trial_settings if setting not in finished)


def _count_final_steps(sweep: Sweep, setting: Setting | None) -> int:
    """Return the number of steps of a final run: at most the longest, if it is not chosen."""
    if setting is not None:
        return setting.num_steps
    return max(setting.num_steps for setting in sweep.settings)


def to_json(sweep: Sweep, rows: Sequence[Row]) -> JsonObject:
    """Return the table, each trial, and how settings were chosen."""
    trials = []
    for task in sweep.tasks:
        for setting in sweep.settings:
            result = sweep.read_result(task, "trials", setting)
            if result is None:
                continue
            trials.append(
                {
                    "task": task.name,
                    "learning_rate": setting.learning_rate,
                    "steps": setting.num_steps,
                    "validation_accuracy": result.accuracy,
                }
            )
    return {
        "weights": read_start(sweep.folder / WEIGHTS_FILE),
        "sweep": "shared" if sweep.is_shared else "per_task",
        "trials": trials,
        "tasks": rows,
        "means": compute_means(sweep, rows),
        "published": PUBLISHED,
    }


def write_results(sweep: Sweep) -> str:
    """Write the results so far in each format; return the Markdown. CSV has no means."""
    rows = build_rows(sweep)
    table = to_markdown(sweep, rows)
    if sweep.trial_settings and sweep.is_shared:
        table = f"{trials_to_markdown(sweep)}\n{table}"
    values = [_flatten(row) for row in rows]
    json_text = json.dumps(to_json(sweep, rows), indent=2)
    content = {
        "md": table,
        "csv": rows_to_csv([_CSV_HEAD, *values]),
        "json": f"{json_text}\n",
    }
    for ending, text in content.items():
        write_atomically(sweep.folder / f"{FILE}.{ending}", text)
    return table


def _flatten(row: Row) -> list[object]:
    """Return the values of a row, with those of the interval and of the paper one by one."""
    values: list[object] = []
    for value in row.values():
        if isinstance(value, tuple):
            values += value
        else:
            values.append(value)
    return values
