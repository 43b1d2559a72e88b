"""Durations: text with a unit in, steps out."""

import pytest

from tests.rejections import rejects
from vit_jax.config.durations import Clock

CLOCK = Clock(global_batch=32, num_examples=1000, total_steps=200)


@pytest.mark.parametrize(
    ("text", "steps"),
    [
        ("1 step", 1),
        ("10_000 steps", 10_000),
        ("1e3 steps", 1000),
        ("  7   steps ", 7),
        ("90 epochs", 2812),  # 90 * 1000 / 32 = 2812.5, to even
        ("1 epoch", 31),  # 31.25
        ("1e6 examples", 31_250),
        ("1 example", 1),  # a length above zero is never no step
        ("0.1 fraction", 20),
        ("0.001 fraction", 1),
        ("0 steps", 0),
        ("0 fraction", 0),
    ],
)
def test_steps(text, steps):
    assert CLOCK.to_steps(text) == steps


FORMS = ["", "90", "epochs", "90epochs", "90 days", "-1 steps", "nan steps", "inf epochs", "9 0 steps", "1,5 epochs"]


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        *((text, "a number and a unit.*'500 steps'") for text in FORMS),
        ("1.5 fraction", "between 0 and 1"),
        ("0.5 fraction", "fraction of itself"),  # of the run, which has no length yet
    ],
)
def test_not_a_duration(text, rule):
    with rejects(f"'{text}'", rule):
        Clock(global_batch=32, num_examples=1000).to_steps(text)
