"""Read the results of runs, and combine them to one row for each setting."""

import math
import pathlib
import shlex
import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from vit_jax.config.directions import require_direction
from vit_jax.config.evaluation_rules import list_result_names
from vit_jax.evals.intervals import find_interval_of_few
from vit_jax.storage.files import JsonObject
from vit_jax.tools.sweeps.grid import SEED, Grid, Run, Study
from vit_jax.train.run_files import DIVERGED, read_metrics, read_summary
from vit_jax.train.state_builder import architecture_of

RUNS = "runs"
COSTS = ("exaflops", "parameters", "wall_seconds")
_SUMMARY_RESULTS = (
    *COSTS,
    "train_loss",
    "images_per_second",
    "steps",
    "images",
    "learning_rate",
    "unreadable_images",
)
_EVALUATION_RESULTS = ("_accuracy", "_loss", "_second", "_batch")  # ends of their names
_FAMILIES = {"vit": "ViT", "resnet": "ResNet", "hybrid": "hybrid"}
Row = JsonObject


class FinishedRun(NamedTuple):
    """A run that has ended, and its results (`read_record`)."""

    run: Run
    record: Row

    def score_best_metric(self) -> float:
        """Return the metric that selects runs, higher for a better run."""
        return score(self.record, self.run, self.run.config.checkpoint.best_metric)


def get_run_folder(workdir: pathlib.Path, run: Run) -> pathlib.Path:
    """Return the workdir of a run."""
    return workdir / RUNS / run.name


def require_measures(grid: Grid) -> None:
    """Raise ValueError if a run will not have a measure, before the first run trains."""
    study = grid.study
    if study.is_trained:
        for run in grid.runs:
            _require_known_measures(study, run)
            _require_directions(grid, run)
    if study.is_sweep:
        _require_one_direction(grid)


def _require_known_measures(study: Study, run: Run) -> None:
    """Raise ValueError for a measure that neither evaluations nor the summary will have."""
    known, custom_prefixes = list_result_names(run.config)
    if not study.stops_early:
        known += _SUMMARY_RESULTS
    for name in study.measures:
        if name in known or name.startswith(custom_prefixes):
            continue
        available = ", ".join(known)
        if custom_prefixes:
            available += ", results of custom evaluators"
        raise ValueError(
            f"{run.name} will have no {name} ({study.measure_option}); it will have {available}."
        )


def _require_directions(grid: Grid, run: Run) -> None:
    """Raise ValueError if runs are compared by a result of unknown direction."""
    if grid.study.is_sweep:
        for name in grid.study.measures:
            require_direction(run.config, name)
    if _selects_by_metric(grid):
        require_direction(run.config, run.config.checkpoint.best_metric)


def _require_one_direction(grid: Grid) -> None:
    """Raise ValueError if a measure is to be high in one run and low in another."""
    for name in grid.study.measures:
        modes = set()
        for run in grid.runs:
            direction = require_direction(run.config, name)
            modes.add(direction.mode)
        if len(modes) > 1:
            raise ValueError(
                f"{grid.study.measure_option}{name}: must have one direction, "
                "and runs state max and min."
            )


def _selects_by_metric(grid: Grid) -> bool:
    """Return True if the best metric selects an evaluation or a value of a searched axis."""
    return grid.study.stops_early or any(axis.is_searched for axis in grid.axes)


def read_record(grid: Grid, run: Run, workdir: pathlib.Path) -> Row | None:
    """Return measures, costs and the metric that runs are selected by; None for an unfinished run.

    Raises:
      ValueError: a measure is missing.
    """
    folder = get_run_folder(workdir, run)
    summary = read_summary(folder)
    if summary is None or DIVERGED in summary:
        return summary

    metric = run.config.checkpoint.best_metric
    results = summary
    if grid.study.stops_early:
        results = _read_best_evaluation(folder, run, metric)
    _require_results(grid, run, results)

    record = {}
    for name in grid.study.measures:
        record[name] = results[name]
        if name.endswith("_accuracy"):
            prefix = name.removesuffix("accuracy")
            record[f"{name}_images"] = summary.get(f"{prefix}images", 0)
    record[metric] = results.get(metric)
    record |= _select_present(COSTS, summary)
    record["step"] = results.get("step", summary.get("steps"))
    record["folder"] = str(folder.relative_to(workdir))
    return record


def _select_present(names: Sequence[str], values: Row) -> Row:
    """Return the values of those names that have one."""
    return {name: values[name] for name in names if name in values}


def _read_best_evaluation(
    folder: pathlib.Path,
    run: Run,
    metric: str,
) -> Row:
    """Return the evaluation with the best value of the metric; {} without an evaluation."""
    evaluations = [line for line in read_metrics(folder) if metric in line]
    return max(
        evaluations,
        key=lambda line: score(line, run, metric),
        default={},
    )


def _require_results(
    grid: Grid,
    run: Run,
    results: JsonObject,
) -> None:
    """Raise ValueError if a finished run lacks a measure, or the metric that selects runs."""
    options = dict.fromkeys(grid.study.measures, grid.study.measure_option)
    if _selects_by_metric(grid):
        selection = {run.config.checkpoint.best_metric: "config.checkpoint.best_metric"}
        options = selection | options
    for name, option in options.items():
        if isinstance(results.get(name), int | float):
            continue
        available = [result for result in results if result.endswith(_EVALUATION_RESULTS)]
        names = ", ".join(available) or "no evaluation"
        raise ValueError(f"{run.name} has no {name} ({option}); it has {names}.")


def score(results: JsonObject, run: Run, metric: str) -> float:
    """Return a result of a run, negated if lower is better."""
    if require_direction(run.config, metric).mode == "max":
        return results[metric]
    return -results[metric]


def group_by_setting(grid: Grid) -> dict[tuple[str, ...], list[Run]]:
    """Return the runs by the values of the shown axes."""
    names = list_shown_axes(grid)
    groups: dict[tuple[str, ...], list[Run]] = {}
    for run in grid.runs:
        setting = tuple(run.point[name] for name in names)
        runs = groups.setdefault(setting, [])
        runs.append(run)
    return groups


def list_shown_axes(grid: Grid) -> list[str]:
    """Return the names of all axes but the seed and searched axes."""
    hidden = {axis.name for axis in grid.axes if axis.is_searched}
    hidden.add(SEED.name)
    return [name for name in grid.runs[0].point if name not in hidden]


def build_rows(
    grid: Grid,
    workdir: pathlib.Path,
    stopped: Mapping[str, float] | None = None,
) -> list[Row]:
    """Return one row for each shown setting.

    It has mean and extremes over seeds, and searched axes at their best.

    `stopped` has the last value, by name, of each run that is not trained to the end.
    """
    if stopped is None:
        stopped = {}

    rows = []
    names = list_shown_axes(grid)
    for setting, runs in group_by_setting(grid).items():
        row: Row = dict(zip(names, setting, strict=True))
        if not grid.study.is_sweep:
            row |= _describe_model(runs[0])
        row |= _summarise_runs(grid, runs, workdir, stopped)
        rows.append(row)

    _add_relative_compute(rows)
    return rows


def _describe_model(run: Run) -> Row:
    """Return the properties that select the colour of a point."""
    architecture = architecture_of(run.config, num_classes=1)
    family = _FAMILIES[architecture.family]
    if architecture.block == "axial":
        family = "Axial-ViT"
    row = {"family": family}
    if "shape" in run.point:
        row["dimension"] = run.point["shape"].partition(":")[0]
    return row


def _summarise_runs(
    grid: Grid,
    runs: Sequence[Run],
    workdir: pathlib.Path,
    stopped: Mapping[str, float],
) -> Row:
    """Return the numbers of runs by state, and the results over the seeds."""
    finished = list[FinishedRun]()
    missing = list[str]()
    stopped_values = list[float]()
    num_diverged = 0
    for run in runs:
        record = read_record(grid, run, workdir)
        if record is None and run.name in stopped:
            stopped_values.append(stopped[run.name])
        elif record is None:
            missing.append(run.name)
        elif DIVERGED in record:
            num_diverged += 1
        else:
            finished.append(FinishedRun(run, record))

    row: Row = {
        "runs": len(runs),
        "ended": len(finished) + num_diverged,
        "missing": missing,
        DIVERGED: num_diverged,
    }
    if stopped_values:
        row["stopped_at"] = None
        if all(map(math.isfinite, stopped_values)):
            row["stopped_at"] = statistics.fmean(stopped_values)

    selected = _select_best_of_each_seed(finished)
    if selected:
        row |= _combine_seeds(grid, selected)
    return row


def _select_best_of_each_seed(finished: Sequence[FinishedRun]) -> list[FinishedRun]:
    """Return, for each seed, the run of the searched axes with the best evaluation."""
    best: dict[str | None, FinishedRun] = {}
    for candidate in finished:
        seed = candidate.run.point.get(SEED.name)
        if seed not in best or candidate.score_best_metric() > best[seed].score_best_metric():
            best[seed] = candidate
    return list(best.values())


def _combine_seeds(grid: Grid, selected: Sequence[FinishedRun]) -> Row:
    """Return mean and extremes of each measure, searched values, and costs of the first seed."""
    row: Row = {}
    for measure in grid.study.measures:
        row |= _combine_measure(measure, selected, is_sweep=grid.study.is_sweep)

    for axis in grid.axes:
        if axis.is_searched:
            best_values = [one.run.point[axis.name] for one in selected]
            unique_values = dict.fromkeys(best_values)
            row[axis.name] = " / ".join(unique_values)

    row |= _select_present((*COSTS, "step"), selected[0].record)
    row["folders"] = [one.record["folder"] for one in selected]
    return row


def _combine_measure(
    measure: str,
    selected: Sequence[FinishedRun],
    *,
    is_sweep: bool,
) -> Row:
    """Return mean, extremes and spread of a measure over seeds; of one seed its interval."""
    values = [one.record[measure] for one in selected]
    row: Row = {
        measure: statistics.fmean(values),
        f"{measure}_low": min(values),
        f"{measure}_high": max(values),
    }
    if len(values) > 1:
        if is_sweep:
            row[f"{measure}_deviation"] = statistics.stdev(values)
        return row

    num_images = selected[0].record.get(f"{measure}_images", 0)
    interval = find_interval_of_few(values[0], num_images)
    if interval is not None:
        row[f"{measure}_interval"] = interval
    return row


def _add_relative_compute(rows: Sequence[Row]) -> None:
    """Divide the compute of each row by the compute of the base shape, if there is one."""
    with_compute = [row for row in rows if "exaflops" in row]
    bases = [row for row in with_compute if row.get("shape") == "base"]
    if not bases:
        return
    base_exaflops = bases[0]["exaflops"]
    for row in with_compute:
        row["relative_compute"] = row["exaflops"] / base_exaflops


def select_best_row(grid: Grid, rows: Sequence[Row]) -> Row | None:
    """Return the setting with the best mean over seeds among those whose runs have all ended."""
    (metric,) = grid.study.measures
    candidates = []
    for row in rows:
        has_ended = row["ended"] == row["runs"] and not row[DIVERGED]
        mean = row.get(metric, math.nan)
        if has_ended and math.isfinite(mean):
            candidates.append(row)
    return max(
        candidates,
        key=lambda row: score(row, grid.runs[0], metric),
        default=None,
    )


def build_command(grid: Grid, row: Row, workdir: pathlib.Path) -> str:
    """Return the command that trains the setting of a row with the recipe's seed."""
    setting = tuple(row[name] for name in list_shown_axes(grid))
    run, *_ = group_by_setting(grid)[setting]
    overrides = run.overrides
    if SEED.name in run.point:
        overrides = overrides[:-1]  # the seed comes last

    folder = workdir / "best"
    working_directory = pathlib.Path.cwd()
    if folder.is_relative_to(working_directory):
        folder = folder.relative_to(working_directory)
    words = [
        "vit-jax",
        "finetune" if grid.is_finetuning else "pretrain",
        f"--config={run.recipe}",
        *overrides,
        f"--workdir={folder}",
    ]
    return shlex.join(words)
