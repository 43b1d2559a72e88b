"""Report of a conversion: the use of each array, as a table."""

import collections
import textwrap
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Self

import numpy as np

from vit_jax.text.printable import printable
from vit_jax.text.tables import columns

COPIED = "copied"
"""Status of an array that is used as it is."""
_HEADINGS = ("array", "our parameter", "shape", "dtype", "status")


class ArrayStatus(NamedTuple):
    """The use of one array of a file."""

    name: str  # name in the file
    ours: tuple[str, ...]  # our parameters that it holds, layers taken apart
    shape: tuple[int, ...]
    dtype: str
    status: str  # "copied", "transposed, stacked", "ignored (optimiser state)", ...

    @classmethod
    def describe(cls, name: str, array: np.ndarray, status: str) -> Self:
        """Return the status of one of our parameters that has the same name on both sides."""
        return cls(name, (name,), array.shape, str(array.dtype), status)


class Report(NamedTuple):
    """Arrays that a conversion read and wrote, and its assumptions."""

    source: str  # "PATH (format)", also in the destination
    destination: str
    network: str  # one line about it
    read: Sequence[ArrayStatus]  # the use of every array of the source
    # The use of every array of the destination, and of omitted parameters.
    written: Sequence[ArrayStatus]
    notes: Sequence[str]

    def __repr__(self) -> str:
        """Return the table that a notebook shows: a line for each status."""
        return self.text(is_complete=False)

    def text(self, *, is_complete: bool) -> str:
        """Return the report for a terminal, with a line for each array or for each status.

        Notes come last, where they are seen.
        """
        show = list_arrays if is_complete else count_arrays
        sections = [
            f"Read from {printable(self.source)}:",
            show(self.read),
            f"Written to {printable(self.destination)}:",
            show(self.written),
            printable(self.network),
        ]
        for note in self.notes:
            sections.append(f"- {printable(note)}")
        return "\n".join(sections)


def count_arrays(statuses: Iterable[ArrayStatus]) -> str:
    """Return one line for each status: the number of arrays."""
    counts = collections.Counter(status.status for status in statuses)
    lines = []
    for status, count in counts.most_common():
        lines.append(f"  {count:>5,} arrays {status}")
    return "\n".join(lines)


def list_arrays(statuses: Iterable[ArrayStatus]) -> str:
    """Return one line for each array."""
    rows = [_HEADINGS]
    for name, ours, shape, dtype, status in statuses:
        names = join_names(ours) or "-"
        size = "x".join(map(str, shape)) or "scalar"
        rows.append((name, names, size, dtype, status))
    text = columns(rows, "<<<<<")
    return textwrap.indent(text, "  ")


def join_names(names: Sequence[str]) -> str:
    """Return names that differ in one place as one.

    Examples are `attention/{query,key,value}/kernel` and `blocks/{0..11}/scale`.
    """
    if len(names) < 2:
        return "".join(names)
    parts = [name.split("/") for name in names]
    words = map(_join_words, zip(*parts, strict=True))
    return "/".join(words)


def _join_words(words: Sequence[str]) -> str:
    """Return the word that names have at one place, or all of them in braces."""
    if len(set(words)) == 1:
        return words[0]
    if len(words) < 4:
        return f"{{{','.join(words)}}}"
    return f"{{{words[0]}..{words[-1]}}}"
