"""The results of a study or a sweep: NAME.json, NAME.md, and a study's picture, from whatever runs have ended."""

import json
import math
import pathlib
import shlex
import statistics
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from vit_jax import drawing
from vit_jax.checkpoint.store import is_loss
from vit_jax.config.validate import result_names
from vit_jax.files import write_atomically
from vit_jax.sweeps.grid import SEED, Grid, Run
from vit_jax.sweeps.picture import draw
from vit_jax.tables import aligned
from vit_jax.train.assemble import architecture_of
from vit_jax.train.run_files import DIVERGED, read_metrics, read_summary

RUNS = "runs"
_COSTS = ("exaflops", "parameters", "wall_seconds")
_OF_SUMMARY = (*_COSTS, "train_loss", "images_per_second", "steps", "images", "learning_rate", "unreadable_images")
Row = dict[str, Any]


def folder_of(workdir: pathlib.Path, run: Run) -> pathlib.Path:
    """Return the workdir of a run."""
    return workdir / RUNS / run.name


def require_measures(grid: Grid) -> None:
    """Raises ValueError where a run that trains will not have a measure, before any has trained."""
    for run in grid.runs if grid.study.is_trained else ():
        known, own = result_names(run.config)
        known += () if grid.study.stops_early else _OF_SUMMARY
        for name in grid.study.measures:
            if name not in known and not name.startswith(own):
                more = ", and what one's own evaluators find" if own else ""
                option = grid.study.measure_option
                raise ValueError(f"{run.name} will have no {name} ({option}); it will have {', '.join(known)}{more}.")


def outcome_of(grid: Grid, run: Run, workdir: pathlib.Path) -> dict[str, Any] | None:
    """The measures and costs of a run, and what it was chosen by; None while it has not ended.

    Raises:
      ValueError: it has no such measure.
    """
    study, folder = grid.study, folder_of(workdir, run)
    summary = read_summary(folder)
    if summary is None or DIVERGED in summary:
        return summary
    chosen_by = run.config.checkpoint.best_metric
    found = summary
    if study.stops_early:
        lines = [line for line in read_metrics(folder) if chosen_by in line]
        found = max(lines, key=lambda line: rank(line, chosen_by), default={})
    needed = dict.fromkeys(study.measures, study.measure_option)
    if study.stops_early or any(axis.is_searched for axis in grid.axes):
        needed = {chosen_by: "config.checkpoint.best_metric"} | needed
    if missing := [name for name in needed if not isinstance(found.get(name), int | float)]:
        have = ", ".join(name for name in found if name.endswith(("_accuracy", "_loss", "_second", "_batch")))
        raise ValueError(f"{run.name} has no {missing[0]} ({needed[missing[0]]}); it has {have or 'no evaluation'}.")
    values = {name: found[name] for name in study.measures} | {chosen_by: found.get(chosen_by)}
    costs = {name: summary[name] for name in _COSTS if name in summary}
    return (
        values | costs | {"step": found.get("step", summary.get("steps")), "folder": str(folder.relative_to(workdir))}
    )


def settings_of(grid: Grid) -> dict[tuple[str, ...], list[Run]]:
    """Return the runs by what is shown of their points: not the seed, nor axes that are searched."""
    shown, groups = _shown(grid), dict[tuple[str, ...], list[Run]]()
    for run in grid.runs:
        groups.setdefault(tuple(run.point[name] for name in shown), []).append(run)
    return groups


def _shown(grid: Grid) -> list[str]:
    names = [axis.name for axis in grid.axes if not axis.is_searched and axis.name != SEED.name]
    return names + (["machine"] if "machine" in grid.runs[0].point else [])


def rows_of(grid: Grid, workdir: pathlib.Path, stopped: Mapping[str, float] = MappingProxyType({})) -> list[Row]:
    """One row for each point of what is shown: over seeds the mean and the extremes, searched axes at their best.

    `stopped` has the value, by name, of each run that is not trained to the end.
    """
    rows = []
    for point, runs in settings_of(grid).items():
        outcomes = [(run, outcome_of(grid, run, workdir)) for run in runs]
        finite = [(run, outcome) for run, outcome in outcomes if outcome is not None and DIVERGED not in outcome]
        row: Row = dict(zip(_shown(grid), point, strict=True)) | ({} if grid.study.is_sweep else _kind(runs[0]))
        missing = [run.name for run, outcome in outcomes if outcome is None and run.name not in stopped]
        ended = [outcome for _, outcome in outcomes if outcome is not None]
        row |= {"runs": len(runs), "ended": len(ended), "missing": missing}
        row |= {DIVERGED: sum(DIVERGED in outcome for outcome in ended)}
        if early := [stopped[run.name] for run, outcome in outcomes if outcome is None and run.name in stopped]:
            row["stopped_at"] = statistics.fmean(early) if all(map(math.isfinite, early)) else None
        rows.append(row | _figures(grid, _best_of_each_seed(grid, finite)))
    base = next((row["exaflops"] for row in rows if row.get("shape") == "base" and "exaflops" in row), None)
    for row in rows:
        if base is not None and "exaflops" in row:
            row["relative_compute"] = row["exaflops"] / base
    return rows


def best_row(grid: Grid, rows: Sequence[Row]) -> Row | None:
    """Return the setting of the best mean over seeds, of equal ones the first; None while there is none.

    All runs of it have ended, and none has diverged.
    """
    (metric,) = grid.study.measures
    finite = [row for row in rows if math.isfinite(row.get(metric, math.nan))]
    able = [row for row in finite if row["ended"] == row["runs"] and not row[DIVERGED]]
    return max(able, key=lambda row: rank(row, metric), default=None)


def command_of(grid: Grid, row: Row, workdir: pathlib.Path) -> str:
    """Return the command that trains the setting of a row again, with the recipe's seed, in its own workdir."""
    runs = settings_of(grid)[tuple(row[name] for name in _shown(grid))]
    verb = "finetune" if grid.is_finetuning else "pretrain"
    overrides = runs[0].overrides[: -1 if SEED.name in runs[0].point else None]  # the seed comes last
    here, place = pathlib.Path.cwd(), workdir / "best"
    place = place.relative_to(here) if place.is_relative_to(here) else place
    return shlex.join(["vit-jax", verb, f"--config={runs[0].recipe}", *overrides, f"--workdir={place}"])


def _best_of_each_seed(grid: Grid, outcomes: Sequence[tuple[Run, Row]]) -> list[tuple[Run, Row]]:
    """Of the values of searched axes those that the run's own evaluation finds best, seed by seed."""
    best: dict[str | None, tuple[Run, Row]] = {}
    for run, outcome in outcomes:
        name, seed = run.config.checkpoint.best_metric, run.point.get("seed")
        if seed not in best or rank(outcome, name) > rank(best[seed][1], name):
            best[seed] = run, outcome
    return list(best.values())


def rank(results: Mapping[str, Any], metric: str) -> float:
    """Return a result such that higher is better."""
    return -results[metric] if is_loss(metric) else results[metric]


def _figures(grid: Grid, outcomes: Sequence[tuple[Run, Row]]) -> Row:
    if not outcomes:
        return {}
    found: Row = {}
    for measure in grid.study.measures:
        values = [outcome[measure] for _, outcome in outcomes]
        found |= {
            measure: statistics.fmean(values),
            f"{measure}_low": min(values),
            f"{measure}_high": max(values),
        }
        if grid.study.is_sweep and len(values) > 1:
            found[f"{measure}_deviation"] = statistics.stdev(values)
    for axis in grid.axes:
        if axis.is_searched:
            found[axis.name] = " / ".join(dict.fromkeys(run.point[axis.name] for run, _ in outcomes))
    found |= {name: value for name, value in outcomes[0][1].items() if name in (*_COSTS, "step")}
    return found | {"folders": [outcome["folder"] for _, outcome in outcomes]}


def _kind(run: Run) -> Row:
    """What points have in common that are drawn alike."""
    a = architecture_of(run.config, num_classes=1)
    family = "Axial-ViT" if a.block == "axial" else {"vit": "ViT", "resnet": "ResNet", "hybrid": "hybrid"}[a.family]
    dimension = {"dimension": run.point["shape"].partition(":")[0]} if "shape" in run.point else {}
    return {"family": family} | dimension


def write_results(
    grid: Grid,
    workdir: pathlib.Path,
    *,
    with_paper: bool = False,
    stopped: Mapping[str, float] = MappingProxyType({}),
) -> str:
    """Writes the results that are there in each format; returns the Markdown, of a sweep with the best command."""
    study, rows = grid.study, rows_of(grid, workdir, stopped)
    table = to_markdown(grid, rows, [name for row in rows for name in row["missing"]])
    data, file = grid.runs[0].config.data, "sweep" if study.is_sweep else "study"
    content: dict[str, Any] = {"study": study.name, "about": study.about, "recipe": grid.recipe}
    content |= {"data": data, "measures": study.measures, "rows": rows}
    workdir.mkdir(parents=True, exist_ok=True)
    if study.is_sweep and (best := best_row(grid, rows)):
        content |= {"best": best, "command": command_of(grid, best, workdir)}
        (metric,), so_far = study.measures, " so far" if any(row["missing"] for row in rows) else ""
        named = ", ".join(f"{name}={best[name]}" for name in _shown(grid)) or "the recipe"
        table += f"\nBest{so_far}: {named}, {metric} {_cell(metric, best[metric])}\n\n    {content['command']}\n"
    write_atomically(workdir / f"{file}.json", json.dumps(content, indent=2) + "\n")
    write_atomically(workdir / f"{file}.md", table)
    if not study.is_sweep:
        dataset = (data or grid.recipe).rpartition("/")[2]  # of a folder its name
        figure = draw(study, rows, title=f"{study.title}: {dataset}", with_paper=with_paper)
        for form in ("png", "svg"):
            write_atomically(workdir / f"{file}.{form}", drawing.to_bytes(figure, form))
    return table


def to_markdown(grid: Grid, rows: Sequence[Row], missing: Sequence[str]) -> str:
    """A line for each point that has a result; then what is missing."""
    study, words = grid.study, [axis.name for axis in grid.axes if axis.name != SEED.name] + ["machine"]
    names = [name for name in words if any(name in row for row in rows)]
    has_seeds = any(axis.name == SEED.name for axis in grid.axes)
    spread = "± deviation" if study.is_sweep else "lowest to highest"
    costs = [name for name in _COSTS if any(name in row for row in rows)]
    head = [*names]
    for measure in study.measures:
        head += [measure, *([spread] if has_seeds else [])]
    head += [*(["best step"] if study.stops_early else []), *costs, "runs ended"]
    lines = []
    for row in rows:
        line = [str(row.get(name, "–")) for name in names]
        for measure in study.measures:
            line.append(_cell(measure, row.get(measure)))
            if has_seeds:
                ends = ("deviation",) if study.is_sweep else ("low", "high")
                line.append(" to ".join(_cell(measure, row.get(f"{measure}_{end}")) for end in ends))
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
