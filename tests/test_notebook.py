"""The notebooks of docs/examples run from top to bottom, and their stored outputs are current."""

import ast
import json
import os
import pprint
import re
from pathlib import Path

import jax
import pytest

NOTEBOOKS = sorted(Path(__file__).parents[1].glob("docs/examples/*.ipynb"))


def test_there_are_notebooks():
    assert [path.name for path in NOTEBOOKS] == ["api.ipynb"]


def run_cells(cells):
    """Run the cells one after the other, as a kernel does.

    Returns the text of the result of each; None for the imports in the first cell.
    """
    names = {"__name__": "__main__"}
    results = []
    for number, cell in enumerate(cells):
        tree = ast.parse("".join(cell["source"]))
        with jax.numpy_dtype_promotion("standard"):  # as for users
            results.append(run_cell(number, tree, names))
    return results


def run_cell(number, tree, names):
    """Run a cell; return the text of its last expression, which every later cell has."""
    if number == 0:
        exec(compile(tree, "cell 0", "exec"), names)
        return None

    last = tree.body.pop()
    assert isinstance(last, ast.Expr), "every cell after the imports shows a result"

    exec(compile(tree, f"cell {number}", "exec"), names)
    value = eval(
        compile(
            ast.Expression(last.value),
            f"cell {number}",
            "eval",
        ),
        names,
    )
    return pprint.pformat(value, width=100)


def list_code_cells(notebook):
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def store_results(path, notebook, results):
    """Write the results into the notebook as the outputs of its cells."""
    for number, (cell, text) in enumerate(zip(list_code_cells(notebook), results, strict=True), 1):
        outputs = []
        if text:
            output = {
                "output_type": "execute_result",
                "execution_count": number,
                "metadata": {},
                "data": {"text/plain": text.splitlines(keepends=True)},
            }
            outputs.append(output)
        cell |= {"execution_count": number, "outputs": outputs}

    path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")


def remove_numbers(text):
    """Replace floating-point numbers and padding, which depend on the processor.

    Shapes, dtypes and names stay.
    """
    text = re.sub(r" *\d+\.\d*(e-?\d+)? *", "NUMBER", text)
    return re.sub(r"\s+", " ", text)


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_a_notebook_runs_and_has_its_outputs(path, tmp_path, monkeypatch):
    """`UPDATE_GOLDEN=1` stores new outputs.

    Only results are stored: no paths of a machine, times or warnings.
    """
    monkeypatch.chdir(tmp_path)
    notebook = json.loads(path.read_text())
    cells = list_code_cells(notebook)

    results = run_cells(cells)
    if os.environ.get("UPDATE_GOLDEN") == "1":
        store_results(path, notebook, results)

    for number, (cell, result) in enumerate(zip(cells, results, strict=True), 1):
        assert cell["execution_count"] == number

        stored = []
        for output in cell["outputs"]:
            assert output["output_type"] == "execute_result"
            stored.append("".join(output["data"]["text/plain"]))
        expected = [remove_numbers(result)] if result else []
        assert [remove_numbers(text) for text in stored] == expected
        assert not re.search(r"(^|[\s'\"])(/|~/|[A-Z]:\\)\w", "".join(stored))
