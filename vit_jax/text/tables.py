"""Tables as text: aligned columns, Markdown without markup in names, and CSV without formulas."""

import csv
import io
import re
from collections.abc import Collection, Iterable, Sequence
from itertools import zip_longest
from typing import TextIO

from vit_jax.text.printable import printable

# Every dialect of Markdown knows these escapes, and entities.
_ESCAPES = {sign: f"\\{sign}" for sign in r"\`*_{}[]#!"}
_ENTITIES = {sign: f"&#{ord(sign)};" for sign in "<>&|~$:"}
_MARKUP = str.maketrans(_ESCAPES | _ENTITIES)

# Spreadsheets take such a cell for a formula (OWASP, "CSV Injection"); full-width signs too. A
# quote before it is guarded as well, so that removing one quote restores every cell.
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
    lines = [_printable_cells(row) for row in rows]
    widths = [_width_of(column) for column in zip_longest(*lines, fillvalue="")]
    for index, width in enumerate(least[: len(widths)]):
        widths[index] = max(widths[index], width)
    return "\n".join(gap.join(_pad(line, signs, widths)).rstrip() for line in lines)


def _printable_cells(row: Sequence[str]) -> list[str]:
    return list(map(printable, row))


def _width_of(column: Iterable[str]) -> int:
    return max(map(len, column))


def _pad(cells: Sequence[str], signs: Iterable[str], widths: Iterable[int]) -> list[str]:
    """Return the cells of a row, filled with blanks up to the width of their column."""
    columns = zip(cells, signs, widths, strict=False)
    return [f"{cell:{sign}{width}}" for cell, sign, width in columns]


def aligned(
    head: Sequence[str], lines: Sequence[Sequence[str]], words: Collection[str] = ()
) -> str:
    """Return a table of cells, which may have markup; columns whose head is among `words` are aligned to the left."""
    names = _escape_borders(head)
    rows = [_escape_borders(line) for line in lines]
    widths = [_width_of(column) for column in zip(names, *rows, strict=True)]
    signs = ["<" if name in words else ">" for name in names]
    rules = [_draw_rule(sign, width) for sign, width in zip(signs, widths, strict=True)]
    text = ""
    for row in (names, rules, *rows):
        text += f"| {' | '.join(_pad(row, signs, widths))} |\n"
    return text


def _escape_borders(row: Sequence[str]) -> list[str]:
    return [cell.replace("|", r"\|") for cell in map(printable, row)]


def _draw_rule(sign: str, width: int) -> str:
    """Return the cell below the head of a column, which states the alignment."""
    if sign == "<":
        return "-" * width
    return "-" * (width - 1) + ":"


def markdown_text(name: str) -> str:
    """Return a name as one line of Markdown without markup, HTML, links or cell borders."""
    return printable(name).translate(_MARKUP)


def markdown_code(name: str, *, in_table: bool = False) -> str:
    """Return a name as a code span of Markdown; in a table its pipes are escaped, which tables alone undo."""
    text = printable(name)
    longest_run = max(map(len, re.findall("`+", text)), default=0)
    fence = "`" * (longest_run + 1)
    needs_space = not text or text[0] in "` " or text[-1] in "` "
    space = " " if needs_space else ""
    if in_table:
        text = text.replace("|", r"\|")
    return f"{fence}{space}{text}{space}{fence}"


def to_csv(rows: Iterable[Sequence[object]]) -> str:
    """Return rows as CSV; text cells as for `write_csv`."""
    text = io.StringIO(newline="")
    write_csv(text, rows)
    return text.getvalue()


def write_csv(file: TextIO, rows: Iterable[Sequence[object]]) -> None:
    """Write rows as CSV.

    A text cell that a spreadsheet would take for a formula gets a single quote in front.
    """
    line = io.StringIO(newline="")
    # With another end of lines, a carriage return in a cell would get no quotes.
    writer = csv.writer(line, lineterminator="\r\n")
    for row in rows:
        line.seek(0)
        line.truncate()
        writer.writerow(map(_guard, row))
        file.write(line.getvalue().removesuffix("\r\n") + "\n")


def _guard(cell: object) -> object:
    """Return a cell, with a quote in front of a formula."""
    if not isinstance(cell, str) or not _FORMULA.match(cell) or _NUMBER.fullmatch(cell):
        return cell
    return f"'{cell}"
