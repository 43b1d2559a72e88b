"""Results of a study or a sweep: NAME.json, NAME.md, and a study's picture, of the runs that have ended."""

import json
import math
import pathlib
import shlex
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from vit_jax.config.directions import WORDS, require_direction
from vit_jax.config.evaluation_rules import result_names
from vit_jax.storage.files import write_atomically
from vit_jax.text.tables import aligned
from vit_jax.tools.figures import drawing
from vit_jax.tools.sweeps.grid import SEED, Grid, Run
from vit_jax.tools.sweeps.picture import draw
from vit_jax.train.assemble import architecture_of
from vit_jax.train.run_files import DIVERGED, read_metrics, read_summary

RUNS = "runs"
_COSTS = ("exaflops", "parameters", "wall_seconds")
_OF_SUMMARY = (
    *_COSTS,
    "train_loss",
    "images_per_second",
    "steps",
    "images",
    "learning_rate",
    "unreadable_images",
)
Row = dict[str, Any]


def folder_of(workdir: pathlib.Path, run: Run) -> pathlib.Path:
    """Return the workdir of a run."""
    return workdir / RUNS / run.name


def require_measures(grid: Grid) -> None:
    """Raise ValueError if a run will not have a measure, before any has trained."""
    for run in grid.runs if grid.study.is_trained else ():
        known, own = result_names(run.config)
        known += () if grid.study.stops_early else _OF_SUMMARY
        for name in grid.study.measures:
            if name not in known and not name.startswith(own):
                have = ", ".join([*known, *(["results of custom evaluators"] if own else [])])
                raise ValueError(
                    f"{run.name} will have no {name} ({grid.study.measure_option}); it will have {have}."
                )
        _require_directions(grid, run)
    for name in grid.study.measures if grid.study.is_sweep else ():
        modes = {require_direction(run.config, name).mode for run in grid.runs}
        if len(modes) > 1:
            raise ValueError(
                f"{grid.study.measure_option}{name}: must have one direction, and runs state max and min."
            )


def _require_directions(grid: Grid, run: Run) -> None:
    """Raise ValueError if runs are compared by a result of unknown direction."""
    if grid.study.is_sweep:
        for name in grid.study.measures:
            require_direction(run.config, name)
    if grid.study.stops_early or any(axis.is_searched for axis in grid.axes):
        require_direction(run.config, run.config.checkpoint.best_metric)


def outcome_of(grid: Grid, run: Run, workdir: pathlib.Path) -> dict[str, Any] | None:
    """Return measures, costs and the result that runs are chosen by; None for a run that has not ended.

    Raises:
      ValueError: a measure is missing.
    """
    study = grid.study
    folder = folder_of(workdir, run)
    summary = read_summary(folder)
    if summary is None or DIVERGED in summary:
        return summary
    chosen_by = run.config.checkpoint.best_metric
    results = summary
    if study.stops_early:
        lines = [line for line in read_metrics(folder) if chosen_by in line]
        results = max(lines, key=lambda line: rank(line, run, chosen_by), default={})
    needed = dict.fromkeys(study.measures, study.measure_option)
    if study.stops_early or any(axis.is_searched for axis in grid.axes):
        needed = {chosen_by: "config.checkpoint.best_metric"} | needed
    if missing := [name for name in needed if not isinstance(results.get(name), int | float)]:
        have = ", ".join(
            name for name in results if name.endswith(("_accuracy", "_loss", "_second", "_batch"))
        )
        raise ValueError(
            f"{run.name} has no {missing[0]} ({needed[missing[0]]}); it has {have or 'no evaluation'}."
        )
    values = {name: results[name] for name in study.measures} | {chosen_by: results.get(chosen_by)}
    costs = {name: summary[name] for name in _COSTS if name in summary}
    place = {
        "step": results.get("step", summary.get("steps")),
        "folder": str(folder.relative_to(workdir)),
    }
    return values | costs | place


def settings_of(grid: Grid) -> dict[tuple[str, ...], list[Run]]:
    """Return the runs by the values of the shown axes: not the seed, nor axes that are searched."""
    shown = _shown(grid)
    groups = dict[tuple[str, ...], list[Run]]()
    for run in grid.runs:
        groups.setdefault(tuple(run.point[name] for name in shown), []).append(run)
    return groups


def _shown(grid: Grid) -> list[str]:
    hidden = {axis.name for axis in grid.axes if axis.is_searched or axis.name == SEED.name}
    return [name for name in grid.runs[0].point if name not in hidden]


def rows_of(
    grid: Grid, workdir: pathlib.Path, stopped: Mapping[str, float] | None = None
) -> list[Row]:
    """Return one row for each shown setting: over seeds the mean and the extremes, searched axes at their best.

    `stopped` has the value, by name, of each run that is not trained to the end.
    """
    rows = list[Row]()
    stopped = stopped or {}
    for point, runs in settings_of(grid).items():
        outcomes = [(run, outcome_of(grid, run, workdir)) for run in runs]
        ended = [(run, outcome) for run, outcome in outcomes if outcome is not None]
        finite = [(run, outcome) for run, outcome in ended if DIVERGED not in outcome]
        left = [run.name for run, outcome in outcomes if outcome is None]
        row: Row = dict(zip(_shown(grid), point, strict=True)) | (
            {} if grid.study.is_sweep else _kind(runs[0])
        )
        row |= {
            "runs": len(runs),
            "ended": len(ended),
            "missing": [name for name in left if name not in stopped],
        }
        row |= {DIVERGED: len(ended) - len(finite)}
        if early := [stopped[name] for name in left if name in stopped]:
            row["stopped_at"] = statistics.fmean(early) if all(map(math.isfinite, early)) else None
        rows.append(row | _figures(grid, _best_of_each_seed(grid, finite)))
    base = next(
        (row["exaflops"] for row in rows if row.get("shape") == "base" and "exaflops" in row), None
    )
    for row in rows:
        if base is not None and "exaflops" in row:
            row["relative_compute"] = row["exaflops"] / base
    return rows


def best_row(grid: Grid, rows: Sequence[Row]) -> Row | None:
    """Return the setting with the best mean over seeds, of those whose runs have all ended; None without one."""
    (metric,) = grid.study.measures
    finite = [row for row in rows if math.isfinite(row.get(metric, math.nan))]
    able = [row for row in finite if row["ended"] == row["runs"] and not row[DIVERGED]]
    return max(able, key=lambda row: rank(row, grid.runs[0], metric), default=None)


def command_of(grid: Grid, row: Row, workdir: pathlib.Path) -> str:
    """Return the command that trains the setting of a row again, with the recipe's seed, in another workdir."""
    runs = settings_of(grid)[tuple(row[name] for name in _shown(grid))]
    verb = "finetune" if grid.is_finetuning else "pretrain"
    overrides = runs[0].overrides[
        : -1 if SEED.name in runs[0].point else None
    ]  # the seed comes last
    here = pathlib.Path.cwd()
    place = workdir / "best"
    place = place.relative_to(here) if place.is_relative_to(here) else place
    return shlex.join(
        ["vit-jax", verb, f"--config={runs[0].recipe}", *overrides, f"--workdir={place}"]
    )


def _best_of_each_seed(grid: Grid, outcomes: Sequence[tuple[Run, Row]]) -> list[tuple[Run, Row]]:
    """Return, for each seed, the run of the searched axes with the best evaluation."""
    best: dict[str | None, tuple[Run, Row]] = {}
    for run, outcome in outcomes:
        name = run.config.checkpoint.best_metric
        seed = run.point.get(SEED.name)
        if seed not in best or rank(outcome, run, name) > rank(best[seed][1], run, name):
            best[seed] = run, outcome
    return list(best.values())


def rank(results: Mapping[str, Any], run: Run, metric: str) -> float:
    """Return a result of a run, negated if lower is better."""
    sign = 1 if require_direction(run.config, metric).mode == "max" else -1
    return results[metric] * sign


def _figures(grid: Grid, outcomes: Sequence[tuple[Run, Row]]) -> Row:
    if not outcomes:
        return {}
    row: Row = {}
    for measure in grid.study.measures:
        values = [outcome[measure] for _, outcome in outcomes]
        row |= {
            measure: statistics.fmean(values),
            f"{measure}_low": min(values),
            f"{measure}_high": max(values),
        }
        if grid.study.is_sweep and len(values) > 1:
            row[f"{measure}_deviation"] = statistics.stdev(values)
    for axis in grid.axes:
        if axis.is_searched:
            row[axis.name] = " / ".join(dict.fromkeys(run.point[axis.name] for run, _ in outcomes))
    row |= {name: value for name, value in outcomes[0][1].items() if name in (*_COSTS, "step")}
    return row | {"folders": [outcome["folder"] for _, outcome in outcomes]}


def _kind(run: Run) -> Row:
    """Return the properties that choose the colour of a point."""
    a = architecture_of(run.config, num_classes=1)
    family = (
        "Axial-ViT"
        if a.block == "axial"
        else {"vit": "ViT", "resnet": "ResNet", "hybrid": "hybrid"}[a.family]
    )
    dimension = {"dimension": run.point["shape"].partition(":")[0]} if "shape" in run.point else {}
    return {"family": family} | dimension


def write_results(
    grid: Grid,
    workdir: pathlib.Path,
    *,
    with_paper: bool = False,
    stopped: Mapping[str, float] | None = None,
) -> str:
    """Write the results so far in each format; return the Markdown, of a sweep with the best command."""
    study = grid.study
    rows = rows_of(grid, workdir, stopped)
    table = to_markdown(grid, rows, [name for row in rows for name in row["missing"]])
    data = grid.runs[0].config.data
    file = "sweep" if study.is_sweep else "study"
    content: dict[str, Any] = {"study": study.name, "about": study.about, "recipe": grid.recipe}
    content |= {"data": data, "measures": study.measures, "rows": rows}
    workdir.mkdir(parents=True, exist_ok=True)
    if study.is_sweep and (best := best_row(grid, rows)):
        content |= {"best": best, "command": command_of(grid, best, workdir)}
        (metric,), so_far = study.measures, " so far" if any(row["missing"] for row in rows) else ""
        named = ", ".join(f"{name}={best[name]}" for name in _shown(grid)) or "the recipe"
        better = WORDS[require_direction(grid.runs[0].config, metric).mode]
        value = f"{_cell(metric, best[metric])} ({better})"
        table += f"\nBest{so_far}: {named}, {metric} {value}\n\n    {content['command']}\n"
    write_atomically(workdir / f"{file}.json", json.dumps(content, indent=2) + "\n")
    write_atomically(workdir / f"{file}.md", table)
    if not study.is_sweep:
        dataset = (data or grid.recipe).rpartition("/")[2]  # of a folder its name
        figure = draw(study, rows, title=f"{study.title}: {dataset}", with_paper=with_paper)
        for form in ("png", "svg"):
            write_atomically(workdir / f"{file}.{form}", drawing.to_bytes(figure, form))
    return table


def to_markdown(grid: Grid, rows: Sequence[Row], missing: Sequence[str]) -> str:
    """Return a line for each setting, then the missing runs."""
    study = grid.study
    words = [axis.name for axis in grid.axes if axis.name != SEED.name] + ["machine"]
    names = [name for name in words if any(name in row for row in rows)]
    has_seeds = any(axis.name == SEED.name for axis in grid.axes)
    spread = "± deviation" if study.is_sweep else "lowest to highest"
    costs = [name for name in _COSTS if any(name in row for row in rows)]
    measures = [
        name for measure in study.measures for name in (measure, *([spread] if has_seeds else []))
    ]
    head = [*names, *measures, *(["best step"] if study.stops_early else []), *costs, "runs ended"]
    lines = []
    for row in rows:
        line = [str(row.get(name, "–")) for name in names]
        for measure in study.measures:
            line.append(_cell(measure, row.get(measure)))
            if has_seeds:
                ends = ("deviation",) if study.is_sweep else ("low", "high")
                line.append(
                    " to ".join(_cell(measure, row.get(f"{measure}_{end}")) for end in ends)
                )
        line += [_cell("step", row.get("step"))] if study.stops_early else []
        line += [_cell(name, row.get(name)) for name in costs]
        ended = f"{row['ended']} of {row['runs']}"
        ended += f", {row[DIVERGED]} diverged" if row[DIVERGED] else ""
        if "stopped_at" in row:
            ended += f", stopped at {_cell(study.measures[0], row['stopped_at'])}"
        lines.append([*line, ended])
    note = f"\nNot ended: {', '.join(missing)}.\n" if missing else ""
    return aligned(head, lines, names) + note


def _cell(name: str, value: float | None) -> str:
    if value is None or not math.isfinite(value):
        return "–"
    if name.endswith("_accuracy"):
        return f"{value:.2%}"
    return f"{value:,.0f}" if value == round(value) or value >= 100 else f"{value:.3g}"
