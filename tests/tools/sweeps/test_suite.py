"""Suites: VTAB's, with the paper's figures, one's own, and how tasks are named."""

import numpy as np
import pytest

from tests.columns import list_column
from tests.rejections import rejects
from vit_jax.data.kinds.vtab_tasks import TASKS
from vit_jax.tools.sweeps.suite import PUBLISHED, VTAB, load_suite, select_tasks

ALL_TASKS_MEANS = (77.63, 76.29, 72.71)  # of Table 2, which the paper prints with two digits


def list_names(tasks):
    return list_column(tasks, "name")


def test_the_papers_figures_give_the_papers_means():
    assert list_names(VTAB) == list_names(TASKS)

    means = np.mean(list_column(VTAB, "published"), axis=0)
    assert len(PUBLISHED) == len(means) == 3
    assert np.round(means, 2).tolist() == list(ALL_TASKS_MEANS)


@pytest.mark.parametrize(
    ("words", "number"),
    [
        ("all", 19),
        ("natural", 7),
        ("svhn,structured,pets", 10),
    ],
)
def test_groups_and_all(words, number):
    assert len(select_tasks(VTAB, words)) == number


def test_names_in_the_order_of_the_suite():
    tasks = select_tasks(VTAB, "svhn,caltech101,dmlab,svhn")
    structured = select_tasks(load_suite(None), "structured")

    assert list_names(tasks) == ["caltech101", "svhn", "dmlab"]
    assert list_names(structured)[0] == "clevr_count"


@pytest.mark.parametrize(
    ("words", "rule"),
    [
        ("pet", "pet: .*did you mean.*'pets'"),
        ("svhn,specialised", "specialised: .*did you mean 'specialized'"),
        ("xyz", "xyz: .*all, natural, specialized, structured, caltech101, "),
        ("pets,", ": must be one of all, "),
    ],
)
def test_unknown_names(words, rule):
    with rejects("--tasks=", rule):
        select_tasks(VTAB, words)


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("missing", "has no 'missing'"),
        ("NOT_A_SUITE", "vit_jax.tools.sweeps.suite.Task"),
        ("TWICE", "'dull'.*two"),
    ],
)
def test_invalid_suites(name, rule):
    with rejects("--suite=", rule):
        load_suite(f"tests.tools.sweeps.small_suite:{name}")
