"""What the runs of a study came to: `study.json`, `study.md`, and the picture, from whatever runs have ended."""

import json
import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from vit_jax import drawing
from vit_jax.checkpoint.store import is_loss
from vit_jax.config.validate import result_names
from vit_jax.files import write_atomically
from vit_jax.sweeps.grid import Grid, Run
from vit_jax.sweeps.picture import draw
from vit_jax.tables import aligned
from vit_jax.train.assemble import architecture_of
from vit_jax.train.run_files import DIVERGED, read_metrics, read_summary

FILE = "study"  # in the study's folder, with the ending of each format
RUNS = "runs"
_COSTS = ("exaflops", "parameters", "wall_seconds")
_OF_SUMMARY = (*_COSTS, "train_loss", "images_per_second", "steps", "images", "learning_rate", "unreadable_images")
Row = dict[str, Any]


def folder_of(workdir: pathlib.Path, run: Run) -> pathlib.Path:
    """A run's own workdir."""
    return workdir / RUNS / run.name


def require_measures(grid: Grid) -> None:
    """Raises ValueError where a run that trains will not have a measure, before any has trained."""
    for run in grid.runs if grid.study.is_trained else ():
        known, own = result_names(run.config)
        known += () if grid.study.stops_early else _OF_SUMMARY
        for name in grid.study.measures:
            if name not in known and not name.startswith(own):
                more = ", and what one's own evaluators find" if own else ""
                raise ValueError(
                    f"{run.name} will have no {name} (--measures=); it will have {', '.join(known)}{more}."
                )


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
        found = max(lines, key=lambda line: _rank(line, chosen_by), default={})
    needed = dict.fromkeys(study.measures, "--measures=")
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


def rows_of(grid: Grid, workdir: pathlib.Path) -> list[Row]:
    """One row for each point of what is shown: over seeds the mean and the extremes, searched axes at their best."""
    shown = [axis.name for axis in grid.axes if not axis.is_searched and axis.name != "seed"]
    if "machine" in grid.runs[0].point:
        shown.append("machine")
    groups: dict[tuple[str, ...], list[Run]] = {}
    for run in grid.runs:
        groups.setdefault(tuple(run.point[name] for name in shown), []).append(run)
    rows = []
    for point, runs in groups.items():
        outcomes = [(run, outcome_of(grid, run, workdir)) for run in runs]
        finite = [(run, outcome) for run, outcome in outcomes if outcome is not None and DIVERGED not in outcome]
        row: Row = dict(zip(shown, point, strict=True)) | _kind(runs[0])
        missing = [run.name for run, outcome in outcomes if outcome is None]
        row |= {"runs": len(runs), "ended": len(runs) - len(missing), "missing": missing}
        row |= {DIVERGED: sum(outcome is not None and DIVERGED in outcome for _, outcome in outcomes)}
        rows.append(row | _figures(grid, _best_of_each_seed(grid, finite)))
    base = next((row["exaflops"] for row in rows if row.get("shape") == "base" and "exaflops" in row), None)
    for row in rows:
        if base is not None and "exaflops" in row:
            row["relative_compute"] = row["exaflops"] / base
    return rows


def _best_of_each_seed(grid: Grid, outcomes: Sequence[tuple[Run, Row]]) -> list[tuple[Run, Row]]:
    """Of the values of searched axes those that the run's own evaluation finds best, seed by seed."""
    best: dict[str | None, tuple[Run, Row]] = {}
    for run, outcome in outcomes:
        name, seed = run.config.checkpoint.best_metric, run.point.get("seed")
        if seed not in best or _rank(outcome, name) > _rank(best[seed][1], name):
            best[seed] = run, outcome
    return list(best.values())


def _rank(results: Mapping[str, Any], metric: str) -> float:
    """The higher, the better."""
    return -results[metric] if is_loss(metric) else results[metric]


def _figures(grid: Grid, outcomes: Sequence[tuple[Run, Row]]) -> Row:
    if not outcomes:
        return {}
    found: Row = {}
    for measure in grid.study.measures:
        values = [outcome[measure] for _, outcome in outcomes]
        found |= {
            measure: math.fsum(values) / len(values),
            f"{measure}_low": min(values),
            f"{measure}_high": max(values),
        }
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


def write_results(grid: Grid, workdir: pathlib.Path, *, with_paper: bool = False) -> str:
    """Writes the results that are there in each format; returns the Markdown."""
    rows = rows_of(grid, workdir)
    table = to_markdown(grid, rows, [name for row in rows for name in row["missing"]])
    content = {"study": grid.study.name, "about": grid.study.about, "recipe": grid.recipe}
    data = grid.runs[0].config.data
    content |= {"data": data, "measures": grid.study.measures, "rows": rows}  # type: ignore[dict-item]
    workdir.mkdir(parents=True, exist_ok=True)
    write_atomically(workdir / f"{FILE}.json", json.dumps(content, indent=2) + "\n")
    write_atomically(workdir / f"{FILE}.md", table)
    dataset = (data or grid.recipe).rpartition("/")[2]  # of a folder its name
    figure = draw(grid.study, rows, title=f"{grid.study.title}: {dataset}", with_paper=with_paper)
    for form in ("png", "svg"):
        write_atomically(workdir / f"{FILE}.{form}", drawing.to_bytes(figure, form))
    return table


def to_markdown(grid: Grid, rows: Sequence[Row], missing: Sequence[str]) -> str:
    """A line for each point that has a result; then what is missing."""
    words = [axis.name for axis in grid.axes if axis.name != "seed"] + ["machine"]
    names = [name for name in words if any(name in row for row in rows)]
    has_seeds = any(axis.name == "seed" for axis in grid.axes)
    has_steps, costs = grid.study.stops_early, [name for name in _COSTS if any(name in row for row in rows)]
    head = [*names]
    for measure in grid.study.measures:
        head += [measure, *(["lowest to highest"] if has_seeds else [])]
    head += [*(["best step"] if has_steps else []), *costs, "runs ended"]
    lines = []
    for row in rows:
        line = [str(row.get(name, "–")) for name in names]
        for measure in grid.study.measures:
            line.append(_cell(measure, row.get(measure)))
            if has_seeds:
                low, high = (_cell(measure, row.get(f"{measure}_{end}")) for end in ("low", "high"))
                line.append(f"{low} to {high}")
        line += [_cell("step", row.get("step"))] if has_steps else []
        line += [_cell(name, row.get(name)) for name in costs]
        ended = f"{row['ended']} of {row['runs']}"
        lines.append([*line, f"{ended}, {row[DIVERGED]} diverged" if row[DIVERGED] else ended])
    note = f"\nNot ended: {', '.join(missing)}.\n" if missing else ""
    return aligned(head, lines, names) + note


def _cell(name: str, value: float | None) -> str:
    if value is None:
        return "–"
    if name.endswith("_accuracy"):
        return f"{value:.2%}"
    return f"{value:,.0f}" if value == round(value) or value >= 100 else f"{value:.3g}"
