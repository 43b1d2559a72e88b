"""docs/vtab.md says of every task what the code has."""

import pathlib

import pytest

from vit_jax.data.vtab import TASKS

PAGE = (pathlib.Path(__file__).parents[2] / "docs" / "vtab.md").read_text()


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_the_row_of_a_task(task):
    without = [word for word, is_on in (("mirroring", task.flip), ("crop", task.crop)) if not is_on]
    cells = [
        *(f"`{task.name}`", task.group, f"`{task.dataset}` {task.version.replace(',', ' or ')}", str(task.num_classes)),
        *(f"`{task.val200}`", f"`{task.test}`", f"no {', no '.join(without)}" if without else "–"),
    ]
    assert f"| {' | '.join(cells)} |\n" in PAGE


def test_there_are_no_other_rows():
    rows = [line for line in PAGE.splitlines() if line.startswith("| `") and line.count("|") == 8]
    assert len(rows) == len(TASKS)
