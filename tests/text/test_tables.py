"""CSV that spreadsheets do not execute."""

import csv
import io
import re
from pathlib import Path

import pytest

from tests.columns import list_column
from vit_jax.text.tables import columns, to_csv

ROOT = Path(__file__).parents[2]


FORMULAS = [
    "=1+2",
    "+1+2",
    "-1+2",
    "@SUM(A1)",
    "\t=1",
    "\r=1",
    "\n=1",
    "-dash.png",
    "\uff1d1",
    "'=1",
    "''@a",
]
OTHERS = [
    "",
    "a=1",
    "a-b",
    "'tis",
    "-1.5",
    "+1",
    "-1e-05",
    "-.5",
    "0.750000",
    "ant, red",
    "a\nb",
    "a\rb",
    'a"b',
]


@pytest.mark.parametrize("cell", FORMULAS)
def test_text_that_is_a_formula_gets_one_quote_and_is_restored_without_it(cell):
    ((found, other),) = read_csv(to_csv([[cell, "x"]]))

    assert found == f"'{cell}"
    assert other == "x"
    assert re.sub("^'(?='*[=+\\-@\t\r\n\uff1d])", "", found) == cell


@pytest.mark.parametrize("cell", OTHERS)
def test_other_text_and_numbers_stay(cell):
    (row,) = read_csv(to_csv([[cell, -1.5, -2]]))

    assert row == [cell, "-1.5", "-2"]


def read_csv(text):
    """Return the rows of a file as Python's library reads them."""
    file = io.StringIO(text, newline="")
    return list(csv.reader(file))


def test_there_is_one_writer_of_csv():
    files = (
        path
        for path in (ROOT / "vit_jax").rglob("*.py")
        if re.search(r"csv\.(Dict)?[wW]riter", path.read_text())
    )

    assert list_column(files, "name") == ["tables.py"]


def test_columns_align_cells_of_rows_that_may_end_early():
    rows = [("data", "accuracy", " seeds"), ("digits\n", "9.5%", " 1 2"), ("average", "10%")]
    lines = columns(rows, "<><", gap=" ", least=(9,)).splitlines()

    expected_lines = ["data      accuracy  seeds", r"digits\n      9.5%  1 2", "average        10%"]
    assert lines == expected_lines
