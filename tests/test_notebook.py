"""The notebooks of docs/examples run from top to bottom, and their stored outputs are those of the code."""

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


def results_of(cells):
    """Run the cells one after the other, as a kernel does; return the text of the result of each, None for imports."""
    names = {"__name__": "__main__"}
    results = []

    for number, cell in enumerate(cells):
        tree = ast.parse("".join(cell["source"]))
        last = tree.body.pop() if number > 0 else None

        assert number == 0 or isinstance(last, ast.Expr), (
            "every cell after the imports shows a result"
        )

        with jax.numpy_dtype_promotion("standard"):  # as for users
            exec(compile(tree, f"cell {number}", "exec"), names)
            value = (
                eval(compile(ast.Expression(last.value), f"cell {number}", "eval"), names)
                if last
                else None
            )

        results.append(pprint.pformat(value, width=100) if last else None)

    return results


def store(path, notebook, results):
    """Write the results into the notebook as the outputs of its cells."""
    cells = (cell for cell in notebook["cells"] if cell["cell_type"] == "code")
    for number, (cell, text) in enumerate(zip(cells, results, strict=True), 1):
        data = {"text/plain": text.splitlines(keepends=True)} if text else {}
        output = {
            "output_type": "execute_result",
            "execution_count": number,
            "metadata": {},
            "data": data,
        }
        cell |= {"execution_count": number, "outputs": [output] if text else []}

    path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")


def without_rounding(text):
    """Floating-point numbers depend on the processor, and so does their padding; shapes, dtypes and names do not."""
    return re.sub(r"\s+", " ", re.sub(r" *\d+\.\d*(e-?\d+)? *", "NUMBER", text))


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_a_notebook_runs_and_has_its_outputs(path, tmp_path, monkeypatch):
    """`UPDATE_GOLDEN=1` stores new outputs.

    Only results are stored: no paths, times or warnings.
    """
    monkeypatch.chdir(tmp_path)
    notebook = json.loads(path.read_text())
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    results = results_of(cells)

    if os.environ.get("UPDATE_GOLDEN") == "1":
        store(path, notebook, results)

    for number, (cell, result) in enumerate(zip(cells, results, strict=True), 1):
        assert cell["execution_count"] == number

        stored = ["".join(output["data"]["text/plain"]) for output in cell["outputs"]]

        assert {output["output_type"] for output in cell["outputs"]} <= {"execute_result"}
        assert [without_rounding(text) for text in stored] == (
            [without_rounding(result)] if result else []
        )
        assert not re.search(r"(^|[\s'\"])(/|~/|[A-Z]:\\)\w", "".join(stored)), (
            "a path of a machine"
        )
