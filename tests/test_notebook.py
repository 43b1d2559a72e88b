"""The notebooks of docs/examples run from top to bottom, and are kept without outputs."""

import ast
import json
from pathlib import Path

import jax
import pytest

NOTEBOOKS = sorted(Path(__file__).parents[1].glob("docs/examples/*.ipynb"))


def test_there_are_notebooks():
    assert [path.name for path in NOTEBOOKS] == ["api.ipynb"]


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_a_notebook_runs(path, tmp_path, monkeypatch):
    """Its cells are plain Python: they run here as they would in a kernel, one after the other."""
    monkeypatch.chdir(tmp_path)
    cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    assert not any(cell["outputs"] or cell["execution_count"] for cell in cells), "clear the outputs before you commit"
    names = {"__name__": "__main__"}
    for number, cell in enumerate(cells):
        tree = ast.parse("".join(cell["source"]))
        if number > 0:
            assert isinstance(tree.body[-1], ast.Expr), "every cell after the imports shows a result"
        with jax.numpy_dtype_promotion("standard"):  # as for users
            exec(compile(tree, f"cell {number}", "exec"), names)
