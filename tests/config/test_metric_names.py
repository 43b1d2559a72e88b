"""Metrics by the end of the name of a result, and their form as text."""

import pytest

from vit_jax.config.metric_names import find_metric, format_metric


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("test_accuracy", "max"),
        ("few_5shot_accuracy", "max"),
        ("v2_f1_macro", "max"),
        ("loss", "min"),
        ("mine_loss", "min"),
        ("mine_calibration_error", "min"),
        ("mine_absolute_error", "min"),
        ("parameters", "min"),
    ],
)
def test_direction_by_the_end_of_a_name(name, mode):
    assert find_metric(name).mode == mode


@pytest.mark.parametrize("name", ["mine_floss", "mine_f2", "mine_ece", "brier_score"])
def test_other_names_have_no_direction(name):
    assert find_metric(name) is None


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("test_accuracy", 0.25, "25.00%"),
        ("f1_macro", 1.0, "100.00%"),
        ("images", 1250.0, "1,250"),
        ("loss", 0.7, "0.7000"),
        ("accuracy", "25 % of 4", "25 % of 4"),
    ],
)
def test_metrics_as_text(name, value, text):
    assert format_metric(name, value) == text
