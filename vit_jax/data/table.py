"""Tables of images ("csv:FILE"): a line for each image, with its file and its label, and optionally its split."""

import collections
import csv
import functools
import os
from pathlib import Path
from typing import NamedTuple

import numpy as np

from vit_jax.data.listing import SPLIT_NAMES, FileSource, Listing, part_of_split
from vit_jax.data.records import few
from vit_jax.files import printable

_SEPARATORS = ",\t;"  # the first that the header has: of CSV, of TSV, and of CSV where a comma is in numbers
_SHOWN = 3  # lines that a message names


class Row(NamedTuple):
    """One line of a table: the image's path, normalised, and the text of the other cells."""

    line: int
    image: str
    label: str
    split: str


class Table(Listing):
    """A CSV file with a header: columns `image` and `label`, and `split` where splits are given; others are ignored.

    Paths are relative to the folder of the file, or absolute, and may lead anywhere.
    """

    unsplit = "which has no column 'split'"
    needed = "labels of at least two classes in its column 'label'"
    to_unite = "Write one of them in all lines"
    to_train = "add them, or leave the lines out"

    def __init__(self, path: Path) -> None:
        self.path = path

    def exists(self) -> bool:
        return self.path.is_file()

    def require(self) -> None:
        if not self.exists():
            raise ValueError(
                f"There is no file {str(self.path)!r}; give csv:FILE with the columns image, label and perhaps split."
            )

    def splits(self, *names: str) -> list[str]:
        return sorted({row.split for row in self._rows if row.split})

    def require_splits(self, *names: str) -> None:
        known = {*SPLIT_NAMES, *(part_of_split(name)[0] for name in names)}
        self._refuse([row for row in self._rows if row.split not in known], "of no known split", "split")

    def advise_without(self, split: str) -> str:
        return "Remove the column 'split'"

    def classes(self, split: str | None) -> list[str]:
        return sorted({row.label for row in self._of(split)})

    def read(self, split: str | None, class_names: tuple[str, ...]) -> FileSource:
        """The images in the order of the lines.

        Raises:
          ValueError: files that do not exist.
        """
        rows, root = self._of(split), self.path.absolute().parent
        self._refuse([row for row in rows if not os.path.exists(root / row.image)], "name files that do not exist")
        numbers = {name: number for number, name in enumerate(class_names)}
        labels = np.array([numbers[row.label] for row in rows], np.int32)
        return FileSource([row.image for row in rows], class_names, labels, root=str(root))

    def place(self, split: str | None) -> str:
        return repr(str(self.path)) + (f", split {split!r}," if split else "")

    def _of(self, split: str | None) -> list[Row]:
        return [row for row in self._rows if split in (None, row.split)]

    @functools.cached_property
    def _rows(self) -> list[Row]:
        """All lines.

        Raises:
          ValueError: the file cannot be read, lacks a column or has one twice; cells are missing, empty or too many;
            an image is listed twice.
        """
        header, lines = _read(self.path)
        for name, fewest in (("image", 1), ("label", 1), ("split", 0)):
            if not fewest <= (found := header.count(name)) <= 1:
                raise ValueError(
                    f"{str(self.path)!r} has {found or 'no'} columns {name!r}: its first line is {few(header, repr)}. "
                    "It names the columns: image, label and perhaps split."
                )
        places = [header.index(name) if name in header else None for name in Row._fields[1:]]
        rows = []
        for line, cells in lines:
            if len(cells) != len(header):
                raise ValueError(
                    f"{str(self.path)!r}, line {line}: {len(cells)} cells under {len(header)} columns. Give each a "
                    'cell, and put text with a separator in quotes: "a, b".'
                )
            image, label, split = ("" if place is None else cells[place].strip() for place in places)
            rows.append(Row(line, image and os.path.normpath(image), label, split))
        self._refuse([row for row in rows if not row.image], "have no image")
        self._refuse([row for row in rows if not row.label], "have no label")
        if "split" in header:
            self._refuse([row for row in rows if not row.split], "have no split, and others have one")
        times = collections.Counter(row.image for row in rows)
        self._refuse([row for row in rows if times[row.image] > 1], "name an image that another line names too")
        return rows

    def _refuse(self, wrong: list[Row], words: str, column: str = "image") -> None:
        if wrong:
            cells = [(row.line, printable(getattr(row, column)) or "empty") for row in wrong[:_SHOWN]]
            shown = ", ".join(f"line {line} ({cell})" for line, cell in cells)
            more = f" and {len(wrong) - _SHOWN:,} more" if len(wrong) > _SHOWN else ""
            raise ValueError(f"{str(self.path)!r}: {len(wrong):,} lines {words}: {shown}{more}.")


def _read(path: Path) -> tuple[list[str], list[tuple[int, list[str]]]]:
    """The names of the columns, and the cells of each line that has any, with its number."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            first = file.readline()
            separator = next((one for one in _SEPARATORS if one in first), ",")
            file.seek(0)
            reader = csv.reader(file, delimiter=separator, strict=True)
            lines = [(reader.line_num, cells) for cells in reader if any(cells)]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{str(path)!r} cannot be read as CSV in UTF-8: {error}.") from error
    return [name.strip() for name in lines[0][1]] if lines else [], lines[1:]
