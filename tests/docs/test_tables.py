"""Generated tables of pages are up to date.

`UPDATE_GOLDEN=1 pytest tests/docs/test_tables.py` renews them.
"""

import os
import pathlib

import pytest

from docs import tables
from tests.tools.plan import record

ROOT = pathlib.Path(__file__).parents[2]
RECORDED = {"vit_jax/bench/PLANS.md": record.TABLES}  # assembles the recipes of the table
PAGES = tables.PAGES | RECORDED


CASES = [pytest.param(page, marks=[pytest.mark.slow] * (page in RECORDED)) for page in PAGES]


@pytest.mark.parametrize("page", CASES)
def test_generated_blocks(page):
    path = ROOT / page
    renewed = tables.renew(path.read_text(), PAGES[page])
    if os.environ.get("UPDATE_GOLDEN") == "1":
        path.write_text(renewed)

    assert path.read_text().split("\n") == renewed.split("\n"), "run once with UPDATE_GOLDEN=1"


@pytest.mark.parametrize("text", ["", "<!-- generated: a -->\n<!-- end of generated -->\n" * 2])
def test_a_page_has_each_block_once(text):
    with pytest.raises(ValueError, match=r"it must have \['a'\], each once"):
        tables.renew(text, {"a": str})
