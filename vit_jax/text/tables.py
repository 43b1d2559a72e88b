"""Tables as text: aligned columns, Markdown without markup in names, and CSV without formulas."""

import csv
import io
import re
from collections.abc import Collection, Iterable, Sequence
from itertools import zip_longest
from typing import TextIO

from vit_jax.text.printable import printable

_ESCAPED, _ENTITIES = (
    r"\`*_{}[]#!",
    "<>&|~$:",
)  # every dialect of Markdown knows these escapes, and entities
_MARKUP = str.maketrans(
    {sign: f"\\{sign}" for sign in _ESCAPED} | {sign: f"&#{ord(sign)};" for sign in _ENTITIES}
)

# Spreadsheets take such a cell for a formula (OWASP, "CSV Injection"); full-width signs too. A quote before it
# is guarded as well, so that removing one quote restores every cell.
_FORMULA = re.compile("'*[=+\\-@\t\r\n\uff1d\uff0b\uff0d\uff20]")
_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)(e[+-]?[0-9]+)?", re.IGNORECASE)


def columns(
    rows: Iterable[Sequence[str]], signs: str, *, gap: str = "  ", least: Sequence[int] = ()
) -> str:
    """Return rows of cells as lines of aligned columns, control characters escaped.

    Args:
      rows: cells; the last ones of a row may be missing.
      signs: "<" or ">" for each column.
      gap: between columns.
      least: least widths of the first columns.
    """
    lines = [[printable(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip_longest(*lines, fillvalue="")]
    widths = [*map(max, widths, least), *widths[len(least) :]]
    return "\n".join(
        gap.join(
            f"{cell:{sign}{width}}" for cell, sign, width in zip(row, signs, widths, strict=False)
        ).rstrip()
        for row in lines
    )


def aligned(
    head: Sequence[str], lines: Sequence[Sequence[str]], words: Collection[str] = ()
) -> str:
    """Return a table of cells, which may have markup; columns whose head is among `words` are aligned to the left."""
    head, *lines = (
        [printable(cell).replace("|", r"\|") for cell in line] for line in (head, *lines)
    )
    widths = [max(map(len, column)) for column in zip(head, *lines, strict=True)]
    signs = ["<" if name in words else ">" for name in head]
    rule = [
        "-" * width if sign == "<" else f"{'-' * (width - 1)}:"
        for sign, width in zip(signs, widths, strict=True)
    ]
    rows = [
        " | ".join(
            f"{cell:{sign}{width}}" for cell, sign, width in zip(line, signs, widths, strict=True)
        )
        for line in (head, rule, *lines)
    ]
    return "".join(f"| {row} |\n" for row in rows)


def markdown_text(name: str) -> str:
    """Return a name as one line of Markdown without markup, HTML, links or cell borders."""
    return printable(name).translate(_MARKUP)


def markdown_code(name: str, *, in_table: bool = False) -> str:
    """Return a name as a code span of Markdown; in a table its pipes are escaped, which tables alone undo."""
    text = printable(name)
    fence = "`" * (1 + max(map(len, re.findall("`+", text)), default=0))
    space = " " if text.startswith(("`", " ")) or text.endswith(("`", " ")) or not text else ""
    if in_table:
        text = text.replace("|", r"\|")
    return f"{fence}{space}{text}{space}{fence}"


def to_csv(rows: Iterable[Sequence[object]]) -> str:
    """Return rows as CSV; text cells as for `write_csv`."""
    text = io.StringIO(newline="")
    write_csv(text, rows)
    return text.getvalue()


def write_csv(file: TextIO, rows: Iterable[Sequence[object]]) -> None:
    """Write rows as CSV. A text cell that a spreadsheet would take for a formula gets a single quote in front."""
    line = io.StringIO(newline="")
    writer = csv.writer(
        line, lineterminator="\r\n"
    )  # or a carriage return in a cell would get no quotes
    for row in rows:
        line.seek(0)
        line.truncate()
        writer.writerow([_guarded(cell) for cell in row])
        file.write(line.getvalue().removesuffix("\r\n") + "\n")


def _guarded(cell: object) -> object:
    is_formula = isinstance(cell, str) and _FORMULA.match(cell) and not _NUMBER.fullmatch(cell)
    return f"'{cell}" if is_formula else cell
