"""Renew the tables of `vit_jax/bench/README.md`: `python -m tests.bench.record [TABLE ...]`.

    python -m tests.bench.record                          # all tables that need minutes
    python -m tests.bench.record input --tensorflow=PYTHON

Figures are stored in tests/golden/bench.json with commit, date and machine; tables without a name
on the command line are renewed unless they need an idle machine or another library. Images are
written to `--folder` once.
"""

import argparse
import importlib
import pathlib
import tempfile
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from docs.tables import describe_origin, find_origin, table
from tests.bench import accelerators
from tests.bench.store import describe_machine, load, store

FOLDER = pathlib.Path(tempfile.gettempdir()) / "vit_jax_bench"


class Column(NamedTuple):
    """A column of a table: its title, the figure of a row, and the format of its number."""

    title: str
    figure: str
    format: str = "{}"


class Table(NamedTuple):
    """A table of the page.

    Attributes:
      name: between its markers, and on the command line.
      rows: names of its rows in their order.
      columns: after the name of the row.
      measure: "module:function", which returns the figures of each row from the words of the
        command line. Other tables need no import of it.
      first: title of the first column.
      options: further words of its command.
      note: a sentence below the table.
      is_skipped: True for a table that is renewed only by its name.
    """

    name: str
    rows: tuple[str, ...]
    columns: tuple[Column, ...]
    measure: str
    first: str = ""
    options: str = ""
    note: str = ""
    is_skipped: bool = False

    @property
    def command(self) -> str:
        """The command that renews the table."""
        name = f'"{self.name}"' if " " in self.name else self.name
        return f"python -m tests.bench.record {name}{self.options}"

    def format(self) -> str:
        """Return the table with its command and the origin of its figures."""
        stored = load().get(self.name)
        if stored is None:
            return f"Not measured yet: `{self.command}`\n"
        lines = []
        for name in self.rows:
            figures = stored[name]
            cells = [_format_cell(figures, column) for column in self.columns]
            lines.append([name, *cells])
        titles = [self.first, *(column.title for column in self.columns)]
        return table(titles, lines) + describe_origin(self.command, stored.values(), self.note)


def _format_cell(figures: Mapping[str, Any], column: Column) -> str:
    value = figures.get(column.figure)
    if value is None:
        return "–"
    return column.format.format(value)


def renew_table(chosen: Table, words: argparse.Namespace) -> None:
    """Measure a table and store its figures.

    Raises:
      ValueError: the measured rows are not those of the table.
    """
    origin = find_origin() | {"measured_on": describe_machine()}
    module, _, function = chosen.measure.partition(":")
    rows = getattr(importlib.import_module(module), function)(words)
    if tuple(rows) != chosen.rows:
        raise ValueError(f"{chosen.name}: measured {list(rows)}, and has rows {list(chosen.rows)}.")
    store(chosen.name, {name: figures | origin for name, figures in rows.items()})


MEASURED = (
    Table(
        "digits",
        ("CPU ms a step", "CPU s to compile", "temporary memory by XLA, MB"),
        (
            Column("`model.scan_unroll=1`", "loop", "{:.1f}"),
            Column("4", "unrolled", "{:.1f}"),
            Column("ratio", "ratio", "{:.2f}"),
        ),
        "tests.bench.digits:measure_unrolling",
    ),
    Table(
        "digits loop",
        ("step", "input", "input with step", "loop", "save, steps wait"),
        (
            Column("least median, ms", "least", "{:.1f}"),
            Column("largest, ms", "most", "{:.1f}"),
        ),
        "tests.bench.digits:measure_loop",
        note="Needs an idle machine, so only its name renews it.",
        is_skipped=True,
    ),
    Table(
        "input",
        (
            "big_vision's operations in tf.data",
            "ours",
            "ours, short side 256 by `vit-jax prepare`",
        ),
        (
            Column("CPU ms an image", "cpu_ms_per_image", "{:.2f}"),
            Column("x tf.data", "times_as_fast", "{:.2f}"),
            Column("peak resident, MiB", "peak_mib", "{:.0f}"),
        ),
        "tests.bench.input_against_tf_data:measure_rows",
        first="program",
        options=" --tensorflow=PYTHON",
        is_skipped=True,
    ),
    Table(
        "augmentations",
        (
            "RandAugment (2, 10)",
            "ThreeAugment",
            "colour jitter of 0.3",
            "random erasing of each image",
            "default crop, with decoding",
            "the same, `train_interpolation=bicubic`",
            "`train_crop=simple`, with decoding",
            "the same, bicubic",
        ),
        (Column("CPU ms an image", "ms", "{:.2f}"),),
        "tests.bench.augmentations:measure_rows",
    ),
    Table(
        "sources",
        ("ArrayRecord (`tfds:`)", "`folder:`", "`wds:`", "`parquet:`"),
        (
            Column("in order", "in order", "{:,.0f}"),
            Column("at random", "at random", "{:,.0f}"),
            Column("training", "training", "{:,.0f}"),
            Column("training, x folder", "ratio", "{:.2f}"),
        ),
        "tests.bench.sources:measure_rows",
        first="source",
    ),
    Table(
        "prepare",
        (
            "20,000 JPEGs of 64 x 64 pixels, 2 kB",
            "20,000 JPEGs of 64 x 64 pixels, 2 kB, `--check`",
            "4,000 JPEGs of ImageNet's sizes, 106 kB",
            "4,000 JPEGs of ImageNet's sizes, 106 kB, `--check`",
        ),
        (
            Column("CPU ms an image", "cpu_ms", "{:.2f}"),
            Column("core hours for 14,197,122, extrapolated", "core_hours", "{:.1f}"),
            Column("peak resident, MiB", "peak_mib", "{:.0f}"),
        ),
        "tests.bench.prepare_tars:measure_rows",
    ),
)
TABLES: dict[str, Callable[[], str]] = {one.name: one.format for one in MEASURED}
TABLES[accelerators.NAME] = accelerators.format_table
"""The functions of all tables of the page."""


def parse_words() -> argparse.Namespace:
    """Return the words of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("tables", nargs="*", metavar="TABLE", help=f"of {', '.join(TABLES)}")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=pathlib.Path, default=FOLDER, help="images, made once")
    parser.add_argument("--tensorflow", help="Python of an environment with tensorflow-cpu and cv2")
    words = parser.parse_args()

    unknown = set(words.tables) - set(TABLES)
    if unknown:
        parser.error(f"{', '.join(sorted(unknown))}: must be one of {', '.join(TABLES)}.")
    return words


def main() -> None:
    """Renew the named tables, or all that need neither an idle machine nor another library."""
    words = parse_words()
    is_default = not words.tables
    for one in MEASURED:
        if one.name in words.tables or (is_default and not one.is_skipped):
            renew_table(one, words)
        elif is_default:
            print(f"{one.name}: skipped. {one.command}", flush=True)
    if is_default or accelerators.NAME in words.tables:
        accelerators.store_plans()


if __name__ == "__main__":
    main()
