"""The direction of results: stated by an evaluator, configured, or by a built-in metric."""

import dataclasses
import sys
import types

import pytest

from tests.rejections import rejects
from vit_jax.config import EvaluatorConfig, load_recipe
from vit_jax.config.check import validate
from vit_jax.config.directions import find_direction, require_direction

MODULE = "evaluators_of_a_test"


class Stating:
    """States two of its results."""

    directions = {"brier_score": "min", "negative_loss": "max"}  # noqa: RUF012


def silent(split, run):
    """A function that builds an evaluator and states nothing."""


def stating(split, run):
    """A function with the attribute."""


stating.directions = {"regret": "min"}


@pytest.fixture(autouse=True)
def module(monkeypatch):
    """Make the evaluators above a module that recipes can name."""
    made = types.ModuleType(MODULE)
    made.Stating = Stating
    made.silent = silent
    made.stating = stating
    made.wrong = types.SimpleNamespace(directions={"brier_score": "lower"})
    made.wrong_form = types.SimpleNamespace(directions=["brier_score"])
    made.brier = types.SimpleNamespace(direction="min")
    made.skill = types.SimpleNamespace()
    made.upwards = types.SimpleNamespace(direction="up")
    monkeypatch.setitem(sys.modules, MODULE, made)


def make_config(
    evaluator="silent",
    metric="c_brier_score",
    mode="auto",
    **fields,
):
    config = load_recipe("configs/digits.py")
    checkpoint = dataclasses.replace(
        config.checkpoint,
        best_metric=metric,
        best_mode=mode,
        **fields,
    )
    evaluators = {"c": EvaluatorConfig(kind=f"{MODULE}:{evaluator}")}
    evaluation = dataclasses.replace(config.evaluation, evaluators=evaluators)
    return dataclasses.replace(
        config,
        checkpoint=checkpoint,
        evaluation=evaluation,
    )


def make_config_with_metric(metric):
    config = make_config()
    evaluation = dataclasses.replace(config.evaluation, metrics=(f"{MODULE}:{metric}",))
    return dataclasses.replace(config, evaluation=evaluation)


@pytest.mark.parametrize(
    ("evaluator", "metric", "mode", "expected"),
    [
        ("Stating", "c_brier_score", "auto", "min"),
        ("Stating", "c_negative_loss", "auto", "max"),  # although its name ends as a loss
        ("stating", "c_regret", "auto", "min"),
        ("silent", "c_brier_score", "min", "min"),
        ("silent", "c_sure_accuracy", "auto", "max"),
        ("silent", "c_sure_accuracy", "min", "min"),  # its name is no statement
        ("silent", "test_loss", "auto", "min"),
    ],
)
def test_a_run_takes_the_direction(evaluator, metric, mode, expected):
    config = make_config(evaluator, metric, mode)
    validate(config)

    assert require_direction(config, metric).mode == expected


def test_a_metric_states_its_direction():
    config = make_config_with_metric("brier")

    assert find_direction(config, "test_brier").mode == "min"
    assert find_direction(config, "test_other") is None


def test_a_metric_that_states_no_direction():
    config = make_config_with_metric("skill")
    direction = find_direction(config, "test_skill")

    assert (direction and direction.mode) is None
    assert find_direction(config, "test_other") is None


def test_a_direction_of_a_metric_that_is_none():
    with rejects("evaluation.metrics", "'max' or 'min', not 'up'"):
        validate(make_config_with_metric("upwards"))


UNKNOWN = "best_mode='auto'.*higher or lower.*c_brier_score.*max or min.*directions"


def test_other_results_of_the_run_do_not_take_best_mode():
    config = make_config("silent", "c_brier_score", "min")

    assert find_direction(config, "c_regret") is None
    assert find_direction(make_config("Stating", "test_loss"), "c_brier_score").mode == "min"
    assert find_direction(make_config("Stating", "test_loss"), "test_brier_score") is None


@pytest.mark.parametrize(
    ("evaluator", "metric", "mode", "rule"),
    [
        ("silent", "c_brier_score", "auto", UNKNOWN),
        ("Stating", "c_regret", "auto", "best_mode='auto'.*c_regret"),
        ("Stating", "c_brier_score", "max", "best_mode='max'.*no effect.*lower is better"),
        ("Stating", "test_accuracy", "min", "best_mode='min'.*no effect"),
        ("wrong", "test_accuracy", "auto", "evaluators.c.kind=.*'max' or 'min'.*'lower'"),
        ("wrong_form", "c_brier_score", "min", "evaluators.c.kind=.*'max' or 'min'"),
    ],
)
def test_a_run_is_rejected_before_it_starts(evaluator, metric, mode, rule):
    with rejects("config.", rule):
        validate(make_config(evaluator, metric, mode))


def test_a_run_without_best_checkpoints_needs_no_direction():
    config = make_config("silent", keep_best=0)
    validate(config)

    with rejects("best_mode", "c_brier_score"):
        require_direction(config, "c_brier_score")

    with rejects("metric=c_regret", "best_metric=c_regret"):
        require_direction(config, "c_regret")
