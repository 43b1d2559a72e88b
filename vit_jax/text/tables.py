"""Tables as text: aligned columns, Markdown without markup in names, and CSV without formulas."""

import csv
import io
import re
from collections.abc import Collection, Iterable, Sequence
from itertools import zip_longest
from typing import TextIO

from vit_jax.text.printable import printable


def _escape_markup() -> dict[int, str]:
    """Return a translation of markup to escapes and entities of every dialect of Markdown."""
    escapes = {}
    for sign in r"\`*_{}[]#!":
        escapes[sign] = f"\\{sign}"
    for sign in "<>&|~$:":
        escapes[sign] = f"&#{ord(sign)};"
    return str.maketrans(escapes)


_MARKUP = _escape_markup()

# Spreadsheets take such a cell for a formula (OWASP, "CSV Injection"); full-width signs too. A
# quote before it is guarded as well, so that removing one quote restores every cell.
_FORMULA = re.compile("'*[=+\\-@\t\r\n\uff1d\uff0b\uff0d\uff20]")
_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)(e[+-]?[0-9]+)?", re.IGNORECASE)


def columns(
    rows: Iterable[Sequence[str]],
    signs: str,
    *,
    gap: str = "  ",
    least: Sequence[int] = (),
) -> str:
    """Return rows of cells as lines of aligned columns, control characters escaped.

    Args:
      rows: cells; the last ones of a row may be missing.
      signs: "<" or ">" for each column.
      gap: between columns.
      least: least widths of the first columns.
    """
    lines = [_escape_cells(row) for row in rows]
    widths = _measure_columns(zip_longest(*lines, fillvalue=""))
    for index, width in enumerate(least[: len(widths)]):
        widths[index] = max(widths[index], width)
    texts = [gap.join(_pad_cells(line, signs, widths)).rstrip() for line in lines]
    return "\n".join(texts)


def _escape_cells(row: Sequence[str]) -> list[str]:
    return list(map(printable, row))


def _measure_columns(columns: Iterable[Iterable[str]]) -> list[int]:
    """Return the length of the longest cell of each column."""
    return [max(map(len, column)) for column in columns]


def _pad_cells(cells: Sequence[str], signs: Iterable[str], widths: Iterable[int]) -> list[str]:
    """Return the cells of a row, filled with blanks up to the width of their column."""
    padded = []
    for cell, sign, width in zip(cells, signs, widths, strict=False):
        padded.append(f"{cell:{sign}{width}}")
    return padded


def align_table(
    head: Sequence[str],
    lines: Sequence[Sequence[str]],
    words: Collection[str] = (),
) -> str:
    """Return a Markdown table of cells, which may have markup.

    Columns whose head is among `words` are aligned to the left, the others to the right.
    """
    names = _escape_borders(head)
    rows = [_escape_borders(line) for line in lines]
    widths = _measure_columns(zip(names, *rows, strict=True))
    signs = []
    rules = []
    for name, width in zip(names, widths, strict=True):
        sign = "<" if name in words else ">"
        signs.append(sign)
        rules.append(_draw_rule(sign, width))

    text = ""
    for row in (names, rules, *rows):
        text += f"| {' | '.join(_pad_cells(row, signs, widths))} |\n"
    return text


def _escape_borders(row: Sequence[str]) -> list[str]:
    return [printable(cell).replace("|", r"\|") for cell in row]


def _draw_rule(sign: str, width: int) -> str:
    """Return the cell below the head of a column, which states the alignment."""
    if sign == "<":
        return "-" * width
    return "-" * (width - 1) + ":"


def markdown_text(name: str) -> str:
    """Return a name as one line of Markdown without markup, HTML, links or cell borders."""
    return printable(name).translate(_MARKUP)


def markdown_code(name: str, *, in_table: bool = False) -> str:
    """Return a name as a code span of Markdown.

    In a table its pipes are escaped, which tables alone undo.
    """
    text = printable(name)
    longest_run = max(map(len, re.findall("`+", text)), default=0)
    fence = "`" * (longest_run + 1)
    space = ""
    if not text or text[0] in "` " or text[-1] in "` ":
        space = " "
    if in_table:
        text = text.replace("|", r"\|")
    return f"{fence}{space}{text}{space}{fence}"


def to_csv(rows: Iterable[Sequence[object]]) -> str:
    """Return rows as CSV, with text cells as for `write_csv`."""
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
        writer.writerow(map(_guard_formula, row))
        file.write(line.getvalue().removesuffix("\r\n") + "\n")


def _guard_formula(cell: object) -> object:
    """Return a cell, with a quote in front of a formula."""
    if not isinstance(cell, str) or not _FORMULA.match(cell) or _NUMBER.fullmatch(cell):
        return cell
    return f"'{cell}"
