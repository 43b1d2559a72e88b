"""Tables in Markdown that are also read as they are."""

from collections.abc import Collection, Sequence


def aligned(head: Sequence[str], lines: Sequence[Sequence[str]], words: Collection[str] = ()) -> str:
    """A table of cells; columns whose head is among `words` are aligned to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(head, *lines, strict=True)]
    signs = ["<" if name in words else ">" for name in head]
    rule = ["-" * width if sign == "<" else f"{'-' * (width - 1)}:" for sign, width in zip(signs, widths, strict=True)]
    rows = [
        " | ".join(f"{cell:{sign}{width}}" for cell, sign, width in zip(line, signs, widths, strict=True))
        for line in (head, rule, *lines)
    ]
    return "".join(f"| {row} |\n" for row in rows)
