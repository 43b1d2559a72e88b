"""Write the results of a study or a sweep: NAME.json, NAME.md, and the plot of a study."""

import itertools
import json
import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from vit_jax.config.directions import WORDS, require_direction
from vit_jax.evals.intervals import format_interval
from vit_jax.storage.files import write_atomically
from vit_jax.text.tables import align_table
from vit_jax.tools.figures import drawing
from vit_jax.tools.sweeps.grid import SEED, Grid, Study
from vit_jax.tools.sweeps.plots import draw
from vit_jax.tools.sweeps.results import (
    COSTS,
    Row,
    build_command,
    build_rows,
    list_shown_axes,
    select_best_row,
)
from vit_jax.train.run_files import DIVERGED

Column = tuple[str, list[str]]
"""The head of a column, and its cell in each row."""


def write_results(
    grid: Grid,
    workdir: pathlib.Path,
    *,
    with_paper: bool = False,
    stopped: Mapping[str, float] | None = None,
) -> str:
    """Write the results so far in each format; return the Markdown.

    A sweep has the best command at the end.
    """
    study = grid.study
    rows = build_rows(grid, workdir, stopped)
    table = to_markdown(grid, rows)
    content: dict[str, Any] = {
        "study": study.name,
        "about": study.about,
        "recipe": grid.recipe,
        "data": grid.runs[0].config.data,
        "measures": study.measures,
        "rows": rows,
    }
    best = select_best_row(grid, rows) if study.is_sweep else None
    if best is not None:
        command = build_command(grid, best, workdir)
        content |= {"best": best, "command": command}
        table += f"\n{_describe_best(grid, rows, best)}\n\n    {command}\n"

    workdir.mkdir(parents=True, exist_ok=True)
    name = "sweep" if study.is_sweep else "study"
    write_atomically(workdir / f"{name}.json", json.dumps(content, indent=2) + "\n")
    write_atomically(workdir / f"{name}.md", table)
    if not study.is_sweep:
        _write_plot(grid, rows, workdir / name, with_paper=with_paper)
    return table


def _describe_best(grid: Grid, rows: Sequence[Row], best: Row) -> str:
    """Return the values and the metric of the best setting as one line."""
    (metric,) = grid.study.measures
    is_complete = not any(row["missing"] for row in rows)
    title = "Best" if is_complete else "Best so far"
    setting = ", ".join(f"{name}={best[name]}" for name in list_shown_axes(grid))
    direction = require_direction(grid.runs[0].config, metric)
    value = _format_number(metric, best[metric]) + _describe_spread(metric, best)
    return f"{title}: {setting or 'the recipe'}, {metric} {value} ({WORDS[direction.mode]})"


def _describe_spread(metric: str, row: Row) -> str:
    """Return the deviation of an accuracy over seeds, or its interval on few images, if any."""
    if not metric.endswith("_accuracy"):
        return ""
    if f"{metric}_deviation" in row:
        return f" ± {_read_deviation(metric, row)}"
    if f"{metric}_interval" in row:
        return f" ({format_interval(row[f'{metric}_interval'])})"
    return ""


def _write_plot(grid: Grid, rows: Sequence[Row], file: pathlib.Path, *, with_paper: bool) -> None:
    """Write the plot as PNG and SVG, with the name of the data, without folder, in its title."""
    study = grid.study
    dataset = (grid.runs[0].config.data or grid.recipe).rpartition("/")[2]
    figure = draw(study, rows, title=f"{study.title}: {dataset}", with_paper=with_paper)
    for form in ("png", "svg"):
        write_atomically(file.with_suffix(f".{form}"), drawing.to_bytes(figure, form))


def to_markdown(grid: Grid, rows: Sequence[Row]) -> str:
    """Return a table with a line for each setting, then the names of the missing runs."""
    axes = [axis.name for axis in grid.axes if axis.name != SEED.name]
    text_columns = _list_present([*axes, "machine"], rows)
    columns = [_build_text_column(name, rows) for name in text_columns]
    columns += _build_result_columns(grid, rows)
    head, cells = zip(*columns, strict=True)
    table = align_table(head, list(zip(*cells, strict=True)), text_columns)

    missing = itertools.chain.from_iterable(row["missing"] for row in rows)
    names = ", ".join(missing)
    if names:
        table += f"\nNot ended: {names}.\n"
    return table


def _build_result_columns(grid: Grid, rows: Sequence[Row]) -> list[Column]:
    """Return the columns of measures, costs and states of the runs."""
    study = grid.study
    has_seeds = any(axis.name == SEED.name for axis in grid.axes)
    columns = []
    for measure in study.measures:
        columns.append(_build_number_column(measure, rows))
        if has_seeds and study.is_sweep:
            columns.append(("± deviation", [_read_deviation(measure, row) for row in rows]))
        elif has_seeds:
            columns.append(("lowest to highest", [_read_extremes(measure, row) for row in rows]))
        elif any(f"{measure}_interval" in row for row in rows):
            columns.append(("95 % interval", [_read_interval(measure, row) for row in rows]))
    if study.stops_early:
        _, steps = _build_number_column("step", rows)
        columns.append(("best step", steps))
    for cost in _list_present(COSTS, rows):
        columns.append(_build_number_column(cost, rows))
    columns.append(("runs ended", [_read_progress(study, row) for row in rows]))
    return columns


def _build_text_column(name: str, rows: Sequence[Row]) -> Column:
    return name, [str(row.get(name, "–")) for row in rows]


def _build_number_column(name: str, rows: Sequence[Row]) -> Column:
    return name, [_format_number(name, row.get(name)) for row in rows]


def _list_present(names: Sequence[str], rows: Sequence[Row]) -> list[str]:
    """Return the names that at least one row has."""
    present = {name for row in rows for name in row}
    return [name for name in names if name in present]


def _read_deviation(measure: str, row: Row) -> str:
    return _format_number(measure, row.get(f"{measure}_deviation"))


def _read_extremes(measure: str, row: Row) -> str:
    low = _format_number(measure, row.get(f"{measure}_low"))
    high = _format_number(measure, row.get(f"{measure}_high"))
    return f"{low} to {high}"


def _read_interval(measure: str, row: Row) -> str:
    low, high = row.get(f"{measure}_interval", (None, None))
    return f"{_format_number(measure, low)} to {_format_number(measure, high)}"


def _read_progress(study: Study, row: Row) -> str:
    progress = f"{row['ended']} of {row['runs']}"
    if row[DIVERGED]:
        progress += f", {row[DIVERGED]} diverged"
    if "stopped_at" in row:
        progress += f", stopped at {_format_number(study.measures[0], row['stopped_at'])}"
    return progress


def _format_number(name: str, value: float | None) -> str:
    """Return an accuracy in percent, or a number with three digits; a dash if not finite."""
    if value is None or not math.isfinite(value):
        return "–"
    if name.endswith("_accuracy"):
        return f"{value:.2%}"
    if value == round(value) or value >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"
