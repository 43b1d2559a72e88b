"""Generated tables of pages are up to date.

`UPDATE_GOLDEN=1 pytest tests/docs/test_tables.py` renews them.
"""

import os
import pathlib
import re

import pytest

from docs import tables
from tests.bench import record as bench_record
from tests.tools.plan import record

ROOT = pathlib.Path(__file__).parents[2]
PLANS = "vit_jax/bench/PLANS.md"  # assembles the recipes of its tables
BENCH = "vit_jax/bench/README.md"
PAGES = tables.PAGES | {PLANS: record.TABLES, BENCH: bench_record.TABLES}
CASES = [pytest.param(page, marks=[pytest.mark.slow] * (page == PLANS)) for page in PAGES]
# The command of a table, its commits, and the dates of its figures
ORIGIN = re.compile(
    r"`python -m tests\.bench\.record [^`]+`: (`[0-9a-f]{7,8}`, )+"
    r"\d{4}-\d\d-\d\d( to \d{4}-\d\d-\d\d)?[,.]"
)


@pytest.mark.parametrize("page", CASES)
def test_generated_blocks(page):
    path = ROOT / page
    renewed = tables.renew(path.read_text(), PAGES[page])
    if os.environ.get("UPDATE_GOLDEN") == "1":
        path.write_text(renewed)

    assert path.read_text().split("\n") == renewed.split("\n"), "run once with UPDATE_GOLDEN=1"


def test_measured_tables_state_command_commit_and_date():
    blocks = {}
    for match in tables.BLOCK.finditer((ROOT / BENCH).read_text()):
        blocks[match[1]] = match[0]

    assert sorted(blocks) == sorted(bench_record.TABLES)
    for name, block in blocks.items():
        *_, last_line = block.splitlines()
        assert ORIGIN.match(last_line), name


@pytest.mark.parametrize("text", ["", "<!-- generated: a -->\n<!-- end of generated -->\n" * 2])
def test_a_page_has_each_block_once(text):
    with pytest.raises(ValueError, match=r"it must have \['a'\], each once"):
        tables.renew(text, {"a": str})
