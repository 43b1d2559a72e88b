"""Directions of metrics and their form as text."""

import pytest

from vit_jax.config.evaluators import best_mode, metric_text


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("test_accuracy", "max"),
        ("few_5shot_accuracy", "max"),
        ("v2_f1_macro", "max"),
        ("loss", "min"),
        ("mine_loss", "min"),
        ("mine_calibration_error", "min"),
        ("mine_floss", "min"),
        ("mine_f2", "max"),
    ],
)
def test_direction_by_the_end_of_a_name(name, mode):
    assert best_mode(name) == mode


def test_direction_of_unknown_names_can_be_configured():
    assert best_mode("mine_ece", "min") == "min"


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("test_accuracy", 0.25, "25.00%"),
        ("f1_macro", 1.0, "100.00%"),
        ("images", 1250.0, "1,250"),
        ("loss", 0.7, "0.7000"),
        ("top1_accuracy", "25 % of 4", "25 % of 4"),
    ],
)
def test_metrics_as_text(name, value, text):
    assert metric_text(name, value) == text
