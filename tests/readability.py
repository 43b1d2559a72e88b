"""Measures of how dense code is, as docs/architecture.md limits them."""

import ast
import io
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

WIDEST = 100  # columns, as the formatter
UNCOUNTED = frozenset(
    {
        tokenize.COMMENT,
        tokenize.DEDENT,
        tokenize.ENCODING,
        tokenize.ENDMARKER,
        tokenize.INDENT,
        tokenize.NEWLINE,
        tokenize.NL,
    }
)
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
BRANCHES = (ast.If, ast.For, ast.While, ast.ExceptHandler, ast.IfExp, ast.comprehension, ast.Assert)


class Function(NamedTuple):
    """Length in lines and cyclomatic complexity of a function, those inside of it included."""

    path: Path
    name: str
    num_lines: int
    complexity: int


class Density(NamedTuple):
    """Figures of a set of modules; constructs are counted per thousand lines."""

    tokens_a_line: float
    packed_assignments: float
    conditional_expressions: float
    comprehensions: float
    wide_percent: float


def compute_density(paths: Iterable[Path]) -> Density:
    """Return the figures of all lines of these modules, blank lines and docstrings included."""
    num_lines = 0
    num_wide = 0
    num_tokens = 0
    num_packed = 0
    num_conditional = 0
    num_comprehensions = 0
    for path in paths:
        text = path.read_text()
        lines = text.splitlines()
        num_lines += len(lines)
        num_wide += sum(len(line) > WIDEST for line in lines)
        num_tokens += count_tokens(text)
        for node in ast.walk(ast.parse(text)):
            num_packed += is_packed(node)
            num_conditional += isinstance(node, ast.IfExp)
            num_comprehensions += isinstance(node, COMPREHENSIONS)

    thousands = num_lines / 1000
    return Density(
        num_tokens / num_lines,
        num_packed / thousands,
        num_conditional / thousands,
        num_comprehensions / thousands,
        100 * num_wide / num_lines,
    )


def count_tokens(text: str) -> int:
    """Return the number of tokens that are code; an f-string is one, as in Python 3.11."""
    num_tokens = 0
    depth = 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        kind = tokenize.tok_name[token.type]
        if kind == "FSTRING_START":
            depth += 1
        elif kind == "FSTRING_END":
            depth -= 1
        if depth == 0 and token.type not in UNCOUNTED:
            num_tokens += 1
    return num_tokens


def is_packed(node: ast.AST) -> bool:
    """Return True for `a, b = x, y`."""
    if not isinstance(node, ast.Assign):
        return False
    return isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple)


def iterate_functions(paths: Iterable[Path]) -> Iterator[Function]:
    """Yield all functions and methods of modules."""
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                assert node.end_lineno is not None
                num_lines = node.end_lineno - node.lineno + 1
                yield Function(
                    path,
                    node.name,
                    num_lines,
                    compute_complexity(node),
                )


def compute_complexity(function: ast.AST) -> int:
    """Return McCabe's number: one, and one more for each branch and each further condition."""
    complexity = 1
    for node in ast.walk(function):
        if isinstance(node, (*BRANCHES, ast.match_case)):
            complexity += 1
        elif isinstance(node, ast.BoolOp):
            complexity += len(node.values) - 1
    return complexity
