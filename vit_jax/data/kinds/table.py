"""Tables of images ("csv:FILE"): a line for each image, with its file, labels and perhaps split.

Labels of a multi-label image stand in one cell, so that lines stay readable with a thousand
classes, or are columns of 0 and 1. "csv:FILE#comma" names another separator of the labels in a
cell.
"""

import collections
import csv
import functools
import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from vit_jax.data.kinds.listing import FileSource, Listing, list_known_splits
from vit_jax.data.records import few
from vit_jax.storage.files import read_bounded, read_lines
from vit_jax.text.printable import printable

_SEPARATORS = ",\t;"
"""Separators of columns: in CSV, in TSV, and in CSV where numbers have a comma."""
MAX_BYTES = 2**30
"""Largest size of a table, enough for ten million lines of a hundred bytes."""
MAX_LINE_LETTERS = 2**20
_SHOWN = 3
"""Number of lines in a message."""
LABELS = "labels"
"""Name of the column with several labels in a cell, separated by `BETWEEN`."""
BETWEEN = "|"
"""This sign is rare in names, and no spreadsheet takes it for a separator of columns."""
LABEL_SEPARATORS = {
    "bar": BETWEEN,
    "comma": ",",
    "semicolon": ";",
    "tab": "\t",
    "slash": "/",
    "backslash": "\\",
    "plus": "+",
    "ampersand": "&",
    "newline": "\n",
    "space": " ",
}
"""Separators of the labels in a cell by their name in "csv:FILE#NAME"."""
_FILE_ENDINGS = (".csv", ".tsv", ".txt")
_FLAGS = {
    "0": False,
    "0.0": False,
    "1": True,
    "1.0": True,
}
"""Cells of a column that stands for a class."""
_NUM_FLAG_COLUMNS = 2
"""Least number of columns of 0 and 1 that are classes."""


class Row(NamedTuple):
    """One line of a table, the path of the image normalised."""

    line: int
    image: str
    labels: tuple[str, ...]
    split: str


_Line = tuple[int, list[str]]
"""The number of a line, and its cells."""


class _Content(NamedTuple):
    rows: list[Row]
    is_multilabel: bool


class Table(Listing):
    """A CSV file with columns `image` and `label`, and perhaps `split`; others are ignored.

    The column `labels` in place of `label` makes it multi-label: an image has any number of labels,
    also none. Columns of 0 and 1 in the place of both make it multi-label, too. Paths are relative
    to the folder of the file, or absolute, and may lead anywhere.
    """

    kind = "csv"
    unsplit = "which has no column 'split'"

    def __init__(self, path: Path) -> None:
        file, _, name = str(path).rpartition("#")
        names_separator = name in LABEL_SEPARATORS or file.lower().endswith(_FILE_ENDINGS)
        self._separator = ""
        if file and names_separator:
            self._separator = name
        if self._separator:
            path = Path(file)
            self.suffix = f"#{name}"
        super().__init__(path)

    def exists(self) -> bool:
        return self.path.is_file()

    def require(self) -> None:
        if self.path.exists() and not self.exists():
            raise ValueError(
                f"csv:{self.path}: must be a regular file. Write its lines to a file first.",
            )
        if not self.exists():
            raise ValueError(
                f"There is no {str(self.path)!r}; "
                "give csv:FILE with columns image, label, perhaps split.",
            )

    def splits(self, *names: str) -> list[str]:
        splits = {row.split for row in self._table.rows}
        return sorted(splits - {""})

    def require_splits(self, *names: str) -> None:
        known = list_known_splits(names)
        known_names = ", ".join(sorted(known))
        wrong = [row for row in self._table.rows if row.split not in known]
        self._reject(wrong, f"of no known split ({known_names})", "split")

    def classes(self, split: str | None) -> list[str]:
        classes = set[str]()
        for row in self._select_rows(split):
            classes.update(row.labels)
        return sorted(classes)

    def read(self, split: str | None, class_names: tuple[str, ...]) -> FileSource:
        """Return the images in the order of the lines.

        Raises:
          ValueError: files that do not exist.
        """
        rows = self._select_rows(split)
        root = self.path.absolute().parent
        missing = [row for row in rows if not os.path.exists(root / row.image)]
        self._reject(missing, "name files that do not exist")

        images = [row.image for row in rows]
        if self._table.is_multilabel:
            labels = _build_multilabels(rows, class_names)
        else:
            labels = _build_labels(rows, class_names)
        return FileSource(images, class_names, labels, root=str(root))

    def _select_rows(self, split: str | None) -> list[Row]:
        if split is None:
            return self._table.rows
        return [row for row in self._table.rows if row.split == split]

    @functools.cached_property
    def _table(self) -> "_Content":
        """The content of the file.

        Raises:
          ValueError: the file cannot be read, lacks a column or has one twice; cells are missing,
            empty or too many; an image is listed twice.
        """
        header, lines = _read_cells(self.path)
        self._require_cells(header, lines)
        images = self._read_column(header, lines, "image")
        is_multilabel = "label" not in header
        if {"label", LABELS}.isdisjoint(header) and self._has_flags(header, lines):
            labels_of_lines = self._read_flags(header, lines)
        else:
            labels_of_lines = self._read_labels(header, lines)

        has_split = "split" in header
        splits = [""] * len(lines)
        if has_split:
            splits = self._read_column(header, lines, "split")

        rows = []
        columns = zip(lines, images, labels_of_lines, splits, strict=True)
        for (line, _), image, labels, split in columns:
            path = image and os.path.normpath(image)
            rows.append(Row(line, path, labels, split))
        self._require_complete(rows, is_multilabel, has_split)
        self._require_distinct(rows)
        return _Content(rows, is_multilabel)

    def _require_complete(self, rows: list[Row], is_multilabel: bool, has_split: bool) -> None:
        """Raise ValueError for lines without an image, a label or a split."""
        self._reject(_find_incomplete(rows, "image"), "have no image")
        if not is_multilabel:
            self._reject(_find_incomplete(rows, "labels"), "have no label")
        if has_split:
            without_split = _find_incomplete(rows, "split")
            self._reject(without_split, "have no split, and others have one")

    def _require_distinct(self, rows: list[Row]) -> None:
        """Raise ValueError for an image that several lines name."""
        root = self.path.absolute().parent
        rows_of_file = collections.defaultdict[str, list[Row]](list)
        for row in rows:
            file = os.path.normpath(root / row.image)
            rows_of_file[file].append(row)

        repeated = []
        for same in rows_of_file.values():
            if len(same) > 1:
                repeated += same
        repeated.sort(key=lambda row: row.line)
        self._reject(repeated, "name an image that another line names too")

    def _require_cells(self, header: list[str], lines: list[_Line]) -> None:
        """Raise ValueError unless each line has a cell for each column."""
        for line, cells in lines:
            if len(cells) != len(header):
                raise ValueError(
                    f"{str(self.path)!r}, line {line}: {len(cells)} cells under {len(header)} "
                    'columns. Give each a cell, and put text with a separator in quotes: "a, b".',
                )

    def _read_column(self, header: list[str], lines: list[_Line], name: str) -> list[str]:
        """Return the cells of a column.

        Raises:
          ValueError: there is no such column, or more than one.
        """
        count = header.count(name)
        if name == LABELS:
            count += header.count("label")
        if count != 1:
            raise ValueError(
                f"{str(self.path)!r} has {count or 'no'} columns {name!r}: its first line is "
                f"{few(header, repr)}. It names the columns: image, label (or {LABELS}, with "
                f"{BETWEEN!r} between; or a column of 0 and 1 for each class), and perhaps split.",
            )
        index = header.index(name)
        return [cells[index].strip() for _, cells in lines]

    def _read_labels(self, header: list[str], lines: list[_Line]) -> list[tuple[str, ...]]:
        """Return the labels of each line from the column `label` or `labels`.

        Raises:
          ValueError: there is no such column; another separator than the chosen one is likely.
        """
        if LABELS not in header:
            cells = self._read_column(header, lines, "label")
            self._require_single_labels(cells)
            return [(cell,) if cell else () for cell in cells]
        cells = self._read_column(header, lines, LABELS)
        separator = self._choose_separator(cells)
        return [split_labels(cell, separator) for cell in cells]

    def _require_single_labels(self, cells: Sequence[str]) -> None:
        """Raise ValueError for a column `label` with several labels in most cells.

        A separator must not be named either.
        """
        filled = list(filter(None, cells))
        num_joint = sum(BETWEEN in cell for cell in filled)
        if self._separator:
            raise ValueError(
                f"csv:{self.path}{self.suffix}: the column 'label' holds one label an image. "
                f"Name the column {LABELS!r} for several, or remove {self.suffix!r}.",
            )
        if num_joint * 2 > len(filled):
            raise ValueError(
                f"csv:{self.path}: {num_joint:,} of {len(filled):,} cells of the column 'label' "
                f"contain {BETWEEN!r}. Name the column {LABELS!r} for several labels an image, or "
                f"write names without {BETWEEN!r}.",
            )

    def _choose_separator(self, cells: Sequence[str]) -> str:
        """Return the separator of labels in cells: the named one, or "|" if no other is likely.

        Raises:
          ValueError: its name is unknown; the cells are lists in brackets; another separator is
            likely.
        """
        filled = collections.Counter(filter(None, cells))
        self._require_no_brackets(filled)
        if self._separator:
            if self._separator not in LABEL_SEPARATORS:
                raise ValueError(
                    f"csv:{self.path}{self.suffix}: {self._separator!r} is no separator of labels. "
                    f"Name one of {', '.join(LABEL_SEPARATORS)}.",
                )
            return LABEL_SEPARATORS[self._separator]

        name = find_likely_separator(filled)
        if not name:
            return BETWEEN
        separator = LABEL_SEPARATORS[name]
        joint = [cell for cell in filled if separator in cell]
        num_joint = sum(map(filled.__getitem__, joint))
        raise ValueError(
            f"csv:{self.path}: {num_joint:,} of {filled.total():,} cells of the column {LABELS!r} "
            f"contain {separator!r} ({printable(joint[0])!r}), and none {BETWEEN!r}, which separates "
            f"labels. Write csv:{self.path}#{name} to separate them there, or #bar to keep each "
            "cell as one label.",
        )

    def _require_no_brackets(self, filled: collections.Counter[str]) -> None:
        """Raise ValueError if most cells are lists in brackets."""
        in_brackets = 0
        for cell, count in filled.items():
            if cell[0] == "[" and cell[-1] == "]":
                in_brackets += count
        total = filled.total()
        if in_brackets * 2 > total:
            raise ValueError(
                f"csv:{self.path}: {in_brackets:,} of {total:,} cells of the column {LABELS!r} are "
                f"lists in brackets. Write the labels with {BETWEEN!r} between: "
                f"cat{BETWEEN}outdoors.",
            )

    def _has_flags(self, header: list[str], lines: list[_Line]) -> bool:
        """Return True if columns of 0 and 1 stand for classes.

        Raises:
          ValueError: only some of the columns do, two have the same name, or one has none; a
            separator is named.
        """
        flags = list[str]()
        others = list[str]()
        for index, name in _find_class_columns(header).items():
            if _is_flag_column(lines, index):
                flags.append(name)
            else:
                others.append(name)
        if len(flags) < _NUM_FLAG_COLUMNS:
            return False
        if others:
            raise ValueError(
                f"csv:{self.path}: columns of 0 and 1 ({few(flags, repr)}) are classes of a "
                "multi-label table if all columns but image and split are; "
                f"{few(others, repr)} hold other values. Remove them, or write the classes of each "
                f"image into one column {LABELS!r}, with {BETWEEN!r} between.",
            )

        counts = collections.Counter(flags)
        wrong = [name for name, count in counts.items() if count > 1 or not name]
        if wrong:
            raise ValueError(
                f"csv:{self.path}: columns of 0 and 1 are classes, and {few(wrong, repr)} is empty "
                "or the name of several. Give each its name.",
            )
        if self._separator:
            raise ValueError(
                f"csv:{self.path}{self.suffix}: there is no column {LABELS!r} with labels to "
                f"separate, and columns of 0 and 1 need none. Remove {self.suffix!r}.",
            )
        return True

    def _read_flags(self, header: list[str], lines: list[_Line]) -> list[tuple[str, ...]]:
        """Return the names of the columns of classes that hold 1, for each line."""
        columns = _find_class_columns(header)
        return [_read_flagged_labels(cells, columns) for _, cells in lines]

    def _reject(self, wrong: list[Row], words: str, column: str = "image") -> None:
        """Raise ValueError for wrong lines, of which the message shows the first ones."""
        if not wrong:
            return
        lines = []
        for row in wrong[:_SHOWN]:
            cell = printable(getattr(row, column)) or "empty"
            lines.append(f"line {row.line} ({cell})")
        shown = ", ".join(lines)
        if len(wrong) > _SHOWN:
            shown += f" and {len(wrong) - _SHOWN:,} more"
        raise ValueError(f"{str(self.path)!r}: {len(wrong):,} lines {words}: {shown}.")


def _find_incomplete(rows: list[Row], column: str) -> list[Row]:
    """Return the lines whose cell in a column is empty."""
    return [row for row in rows if not getattr(row, column)]


def _build_labels(rows: list[Row], class_names: tuple[str, ...]) -> np.ndarray:
    """Return the number of the class of each row, int32 (N,)."""
    numbers = _number_names(class_names)
    return np.array([numbers[row.labels[0]] for row in rows], np.int32)


def _build_multilabels(rows: list[Row], class_names: tuple[str, ...]) -> np.ndarray:
    """Return 1 for each class of each row, uint8 (N, K)."""
    numbers = _number_names(class_names)
    labels_NK = np.zeros((len(rows), len(class_names)), np.uint8)
    for labels_K, row in zip(labels_NK, rows, strict=True):
        for label in row.labels:
            labels_K[numbers[label]] = 1
    return labels_NK


def _number_names(names: Sequence[str]) -> dict[str, int]:
    return dict(zip(names, range(len(names)), strict=True))


def split_labels(cell: str, separator: str) -> tuple[str, ...]:
    """Return the labels in a cell."""
    parts = map(str.strip, cell.split(separator))
    return tuple(filter(None, parts))


def find_likely_separator(cells: collections.Counter[str]) -> str:
    """Return the name of the separator that cells seem to have instead of "|"; "" without one.

    It is in more than half of the cells, or all labels that it separates are also cells by
    themselves. Many names of classes have a space; it counts only if it separates fewer labels than
    there are different cells.

    Args:
      cells: number of each cell that is not empty.
    """
    if any(BETWEEN in cell for cell in cells):
        return ""
    shares = dict[str, int]()
    for name, separator in LABEL_SEPARATORS.items():
        joint = [cell for cell in cells if len(split_labels(cell, separator)) > 1]
        count = sum(map(cells.__getitem__, joint))
        labels = set[str]()
        for cell in joint:
            labels.update(split_labels(cell, separator))

        if name == "space" and len(labels | (cells.keys() - joint)) >= len(cells):
            continue
        if count * 2 > cells.total() or (joint and labels <= cells.keys()):
            shares[name] = count
    return max(shares, key=shares.__getitem__, default="")


def _find_class_columns(header: Sequence[str]) -> dict[int, str]:
    """Return the names of the columns of classes by their index."""
    columns = {}
    for index, name in enumerate(header):
        if name not in ("image", "split"):
            columns[index] = name
    return columns


def _is_flag_column(lines: list[_Line], index: int) -> bool:
    """Return True if all cells of a column, at least one, are 0 or 1."""
    if not lines:
        return False
    return all(cells[index].strip() in _FLAGS for _, cells in lines)


def _read_flagged_labels(cells: Sequence[str], names: dict[int, str]) -> tuple[str, ...]:
    """Return the names of the columns that hold 1 in the cells of a line."""
    labels = [name for index, name in names.items() if _FLAGS[cells[index].strip()]]
    return tuple(labels)


def _read_cells(path: Path) -> tuple[list[str], list[_Line]]:
    """Return the names of the columns, and the cells of each line that has any, with its number."""
    try:
        content = read_bounded(path, MAX_BYTES)
        file = io.TextIOWrapper(io.BytesIO(content), encoding="utf-8-sig", newline="")
        first = next(read_lines(file, MAX_LINE_LETTERS), "")
        separator = _find_separator(first)
        file.seek(0)
        text = read_lines(file, MAX_LINE_LETTERS)
        reader = csv.reader(text, delimiter=separator, strict=True)
        lines = [(reader.line_num, cells) for cells in reader if any(cells)]
    except (OSError, ValueError, csv.Error) as error:
        raise ValueError(f"{str(path)!r} cannot be read as CSV in UTF-8: {error}.") from error
    if not lines:
        return [], []
    _, header = lines[0]
    return [name.strip() for name in header], lines[1:]


def _find_separator(header: str) -> str:
    """Return the separator of columns in the first line; a comma for a single column."""
    for separator in _SEPARATORS:
        if separator in header:
            return separator
    return ","
