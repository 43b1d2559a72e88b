"""Tables of images ("csv:FILE"): a line for each image, with its file, its label or labels, and perhaps its split.

Labels of a multi-label image stand in one cell, not in columns of 0 and 1: lines stay readable with a thousand classes.
"""

import collections
import csv
import functools
import io
import os
from pathlib import Path
from typing import NamedTuple

import numpy as np

from vit_jax.data.listing import FileSource, Listing, known_splits
from vit_jax.data.records import few
from vit_jax.files import printable, read_bounded, read_lines

_SEPARATORS = ",\t;"  # the first that the header has: of CSV, of TSV, and of CSV where a comma is in numbers
MAX_BYTES = 2**30  # ten million lines of a hundred bytes
MAX_LINE_LETTERS = 2**20
_SHOWN = 3  # lines that a message names
LABELS = "labels"  # the column of any number of them, with BETWEEN them
BETWEEN = "|"  # which no spreadsheet takes for a separator, and which is rare in names


class Row(NamedTuple):
    """One line of a table, the path of the image normalised."""

    line: int
    image: str
    labels: tuple[str, ...]
    split: str


class _Content(NamedTuple):
    rows: list[Row]
    is_multilabel: bool


class Table(Listing):
    """A CSV file with a header: columns `image` and `label`, and perhaps `split`; others are ignored.

    The column `labels` in place of `label` makes it multi-label: an image has any number of them, also none. Paths are
    relative to the folder of the file, or absolute, and may lead anywhere.
    """

    kind, unsplit = "csv", "which has no column 'split'"

    def exists(self) -> bool:
        return self.path.is_file()

    def require(self) -> None:
        if self.path.exists() and not self.exists():
            raise ValueError(f"csv:{self.path}: must be a regular file. Write its lines to a file first.")
        if not self.exists():
            raise ValueError(f"There is no {str(self.path)!r}; give csv:FILE with columns image, label, perhaps split.")

    def splits(self, *names: str) -> list[str]:
        return sorted({row.split for row in self._table.rows if row.split})

    def require_splits(self, *names: str) -> None:
        known = known_splits(names)
        wrong = [row for row in self._table.rows if row.split not in known]
        self._reject(wrong, f"of no known split ({', '.join(sorted(known))})", "split")

    def classes(self, split: str | None) -> list[str]:
        return sorted({label for row in self._of(split) for label in row.labels})

    def read(self, split: str | None, class_names: tuple[str, ...]) -> FileSource:
        """Return the images in the order of the lines.

        Raises:
          ValueError: files that do not exist.
        """
        rows, root = self._of(split), self.path.absolute().parent
        self._reject([row for row in rows if not os.path.exists(root / row.image)], "name files that do not exist")
        numbers = {name: number for number, name in enumerate(class_names)}
        if self._table.is_multilabel:
            labels = np.zeros((len(rows), len(class_names)), np.uint8)
            for row_K, row in zip(labels, rows, strict=True):
                row_K[[numbers[label] for label in row.labels]] = 1
        else:
            labels = np.array([numbers[row.labels[0]] for row in rows], np.int32)
        return FileSource([row.image for row in rows], class_names, labels, root=str(root))

    def _of(self, split: str | None) -> list[Row]:
        return [row for row in self._table.rows if split in (None, row.split)]

    @functools.cached_property
    def _table(self) -> "_Content":
        """The content of the file.

        Raises:
          ValueError: the file cannot be read, lacks a column or has one twice; cells are missing, empty or too many;
            an image is listed twice.
        """
        header, lines = _read(self.path)
        is_multilabel, has_split = LABELS in header, "split" in header
        columns = ("image", LABELS if is_multilabel else "label", *["split"] * has_split)
        for name in columns:
            count = header.count(name) + (header.count("label") if name == LABELS else 0)
            if count != 1:
                raise ValueError(
                    f"{str(self.path)!r} has {count or 'no'} columns {name!r}: its first line is {few(header, repr)}. "
                    f"It names the columns: image, label (or {LABELS}, with {BETWEEN!r} between), and perhaps split."
                )
        places, rows = [header.index(name) for name in columns], []
        for line, cells in lines:
            if len(cells) != len(header):
                raise ValueError(
                    f"{str(self.path)!r}, line {line}: {len(cells)} cells under {len(header)} columns. Give each a "
                    'cell, and put text with a separator in quotes: "a, b".'
                )
            image, label, *split = (cells[place].strip() for place in places)
            labels = [one.strip() for one in label.split(BETWEEN)] if is_multilabel else [label]
            rows.append(Row(line, image and os.path.normpath(image), tuple(filter(None, labels)), "".join(split)))
        self._reject([row for row in rows if not row.image], "have no image")
        self._reject([row for row in rows if not row.labels and not is_multilabel], "have no label")
        self._reject([row for row in rows if not row.split and has_split], "have no split, and others have one")
        files = [os.path.normpath(self.path.absolute().parent / row.image) for row in rows]
        times = collections.Counter(files)
        repeated = [row for row, file in zip(rows, files, strict=True) if times[file] > 1]
        self._reject(repeated, "name an image that another line names too")
        return _Content(rows, is_multilabel)

    def _reject(self, wrong: list[Row], words: str, column: str = "image") -> None:
        if wrong:
            cells = [(row.line, printable(getattr(row, column)) or "empty") for row in wrong[:_SHOWN]]
            shown = ", ".join(f"line {line} ({cell})" for line, cell in cells)
            more = f" and {len(wrong) - _SHOWN:,} more" if len(wrong) > _SHOWN else ""
            raise ValueError(f"{str(self.path)!r}: {len(wrong):,} lines {words}: {shown}{more}.")


def _read(path: Path) -> tuple[list[str], list[tuple[int, list[str]]]]:
    """Return the names of the columns, and the cells of each line that has any, with its number."""
    try:
        content = read_bounded(path, MAX_BYTES)
        file = io.TextIOWrapper(io.BytesIO(content), encoding="utf-8-sig", newline="")
        first = next(read_lines(file, MAX_LINE_LETTERS), "")
        separator = next((one for one in _SEPARATORS if one in first), ",")
        file.seek(0)
        reader = csv.reader(read_lines(file, MAX_LINE_LETTERS), delimiter=separator, strict=True)
        lines = [(reader.line_num, cells) for cells in reader if any(cells)]
    except (OSError, ValueError, csv.Error) as error:
        raise ValueError(f"{str(path)!r} cannot be read as CSV in UTF-8: {error}.") from error
    return [name.strip() for name in lines[0][1]] if lines else [], lines[1:]
