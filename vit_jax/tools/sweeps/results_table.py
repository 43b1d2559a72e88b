"""Write the results of a study or a sweep: NAME.json, NAME.md, and the plot of a study."""

import json
import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

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


class Column(NamedTuple):
    """The head of a column, and its cell in each row."""

    head: str
    cells: list[str]


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
    content: dict[str, object] = {
        "study": study.name,
        "about": study.about,
        "recipe": grid.recipe,
        "data": grid.runs[0].config.data,
        "measures": study.measures,
        "rows": rows,
    }
    if study.is_sweep:
        best = select_best_row(grid, rows)
        if best is not None:
            command = build_command(grid, best, workdir)
            description = _describe_best(grid, rows, best)
            content["best"] = best
            content["command"] = command
            table += f"\n{description}\n\n    {command}\n"

    workdir.mkdir(parents=True, exist_ok=True)
    stem = "sweep" if study.is_sweep else "study"
    file = workdir / stem
    text = json.dumps(content, indent=2)
    write_atomically(file.with_suffix(".json"), f"{text}\n")
    write_atomically(file.with_suffix(".md"), table)
    if not study.is_sweep:
        _write_plot(grid, rows, file, with_paper=with_paper)
    return table


def _describe_best(grid: Grid, rows: Sequence[Row], best: Row) -> str:
    """Return the values and the metric of the best setting as one line."""
    (metric,) = grid.study.measures
    has_missing_runs = any(row["missing"] for row in rows)
    title = "Best so far" if has_missing_runs else "Best"

    values = [f"{name}={best[name]}" for name in list_shown_axes(grid)]
    setting = ", ".join(values) or "the recipe"

    number = _format_number(metric, best[metric])
    spread = _describe_spread(metric, best)
    direction = require_direction(grid.runs[0].config, metric)
    return f"{title}: {setting}, {metric} {number}{spread} ({WORDS[direction.mode]})"


def _describe_spread(metric: str, row: Row) -> str:
    """Return the deviation of an accuracy over seeds, or its interval on few images, if any."""
    if not metric.endswith("_accuracy"):
        return ""
    if f"{metric}_deviation" in row:
        deviation = _format_deviation(metric, row)
        return f" ± {deviation}"
    if f"{metric}_interval" in row:
        interval = format_interval(row[f"{metric}_interval"])
        return f" ({interval})"
    return ""


def _write_plot(
    grid: Grid,
    rows: Sequence[Row],
    file: pathlib.Path,
    *,
    with_paper: bool,
) -> None:
    """Write the plot as PNG and SVG, with the name of the data, without folder, in its title."""
    study = grid.study
    data = grid.runs[0].config.data or grid.recipe
    _, _, dataset = data.rpartition("/")
    title = f"{study.title}: {dataset}"
    figure = draw(study, rows, title=title, with_paper=with_paper)
    for form in ("png", "svg"):
        content = drawing.to_bytes(figure, form)
        write_atomically(file.with_suffix(f".{form}"), content)


def to_markdown(grid: Grid, rows: Sequence[Row]) -> str:
    """Return a table with a line for each setting, then the names of the missing runs."""
    axes = [axis.name for axis in grid.axes if axis.name != SEED.name]
    text_columns = _list_present([*axes, "machine"], rows)
    columns = [_build_text_column(name, rows) for name in text_columns]
    columns += _build_result_columns(grid, rows)

    heads = [column.head for column in columns]
    cells = [column.cells for column in columns]
    lines = list(zip(*cells, strict=True))
    table = align_table(heads, lines, text_columns)

    missing = list[str]()
    for row in rows:
        missing += row["missing"]
    if missing:
        names = ", ".join(missing)
        table += f"\nNot ended: {names}.\n"
    return table


def _build_result_columns(grid: Grid, rows: Sequence[Row]) -> list[Column]:
    """Return the columns of measures, costs and states of the runs."""
    columns = []
    for measure in grid.study.measures:
        columns.append(_build_number_column(measure, rows))
        columns += _build_spread_columns(measure, grid, rows)

    if grid.study.stops_early:
        steps = _build_number_column("step", rows)
        columns.append(steps._replace(head="best step"))
    for cost in _list_present(COSTS, rows):
        columns.append(_build_number_column(cost, rows))

    progress = [_format_progress(grid.study, row) for row in rows]
    columns.append(Column("runs ended", progress))
    return columns


def _build_spread_columns(
    measure: str,
    grid: Grid,
    rows: Sequence[Row],
) -> list[Column]:
    """Return the column with the spread of a measure over seeds or images, if it is known."""
    if any(axis.name == SEED.name for axis in grid.axes):
        if grid.study.is_sweep:
            deviations = [_format_deviation(measure, row) for row in rows]
            return [Column("± deviation", deviations)]
        ranges = [_format_extremes(measure, row) for row in rows]
        return [Column("lowest to highest", ranges)]

    if any(f"{measure}_interval" in row for row in rows):
        intervals = [_format_interval(measure, row) for row in rows]
        return [Column("95 % interval", intervals)]
    return []


def _build_text_column(name: str, rows: Sequence[Row]) -> Column:
    """Return the values of a name as they are; a dash for no value."""
    cells = [str(row.get(name, "–")) for row in rows]
    return Column(name, cells)


def _build_number_column(name: str, rows: Sequence[Row]) -> Column:
    """Return the formatted numbers of a name."""
    cells = [_format_number(name, row.get(name)) for row in rows]
    return Column(name, cells)


def _list_present(names: Sequence[str], rows: Sequence[Row]) -> list[str]:
    """Return the names that at least one row has."""
    present = set[str]()
    for row in rows:
        present |= row.keys()
    return [name for name in names if name in present]


# Single cells.


def _format_deviation(measure: str, row: Row) -> str:
    """Return the standard deviation over seeds."""
    deviation = row.get(f"{measure}_deviation")
    return _format_number(measure, deviation)


def _format_extremes(measure: str, row: Row) -> str:
    """Return the lowest and the highest value over seeds."""
    low = _format_number(measure, row.get(f"{measure}_low"))
    high = _format_number(measure, row.get(f"{measure}_high"))
    return f"{low} to {high}"


def _format_interval(measure: str, row: Row) -> str:
    """Return the confidence interval of the only value."""
    interval = row.get(f"{measure}_interval", (None, None))
    low, high = [_format_number(measure, bound) for bound in interval]
    return f"{low} to {high}"


def _format_progress(study: Study, row: Row) -> str:
    """Return the number of runs that ended, diverged, or were stopped with their last value."""
    progress = f"{row['ended']} of {row['runs']}"
    if row[DIVERGED]:
        progress += f", {row[DIVERGED]} diverged"
    if "stopped_at" in row:
        last_value = _format_number(study.measures[0], row["stopped_at"])
        progress += f", stopped at {last_value}"
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
