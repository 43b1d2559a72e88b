"""Durations: text with a unit in, steps out."""

import pytest

from vit_jax.config.durations import Clock, parse

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


@pytest.mark.parametrize(
    "text",
    ["", "90", "epochs", "90epochs", "90 days", "-1 steps", "nan steps", "inf epochs", "9 0 steps", "1,5 epochs"],
)
def test_not_a_duration(text):
    with pytest.raises(ValueError, match=r"is not a duration: write a number and a unit, for example '500 steps'"):
        parse(text)


def test_a_fraction_is_at_most_the_run():
    with pytest.raises(ValueError, match=r"'1\.5 fraction' is not a duration: a fraction of the run lies between"):
        parse("1.5 fraction")


def test_a_run_is_no_fraction_of_itself():
    with pytest.raises(ValueError, match="cannot be a fraction of itself"):
        Clock(global_batch=32, num_examples=1000).to_steps("0.5 fraction")
