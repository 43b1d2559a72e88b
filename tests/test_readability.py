"""The density of code stays below the limits of docs/architecture.md."""

import pytest

from tests.readability import (
    Density,
    compute_density,
    iterate_functions,
)
from tests.tiny import ROOT

LIMITS = Density(
    tokens_a_line=5.5,
    packed_assignments=2,
    conditional_expressions=10,
    comprehensions=15,
    wide_percent=2,
)
MOST_LINES = 60
MOST_COMPLEX = 15
DENSE = """
def find(a, b):
    x, y = a, b
    return [x if x else f"{y + 1}" for x in a if x]
"""
BRANCHING = """
def choose(a):
    if a and a > 1:
        return 1
    for b in a:
        assert b
    return 2
"""


@pytest.mark.parametrize("folder", ["vit_jax", "tests"])
def test_density_is_below_the_limits(folder):
    density = compute_density((ROOT / folder).rglob("*.py"))

    for name, limit in LIMITS._asdict().items():
        assert getattr(density, name) <= limit, (name, density)


@pytest.mark.parametrize("folder", ["vit_jax", "configs", "launch", "tests"])
def test_functions_are_short_and_simple(folder):
    too_long = []
    too_complex = []
    for function in iterate_functions((ROOT / folder).rglob("*.py")):
        if function.num_lines > MOST_LINES:
            too_long.append(function)
        if function.complexity > MOST_COMPLEX:
            too_complex.append(function)

    assert too_long == []
    assert too_complex == []


def test_density_counts_each_construct(tmp_path):
    path = tmp_path / "dense.py"
    path.write_text(DENSE)

    density = compute_density([path])

    assert density.packed_assignments == 250  # one in four lines
    assert density.conditional_expressions == 250
    assert density.comprehensions == 250
    assert density.tokens_a_line == pytest.approx(29 / 4)


def test_complexity_counts_branches_and_conditions(tmp_path):
    path = tmp_path / "branching.py"
    path.write_text(BRANCHING)

    (function,) = iterate_functions([path])

    assert function.num_lines == 6
    assert function.complexity == 5  # if, and, for, assert
