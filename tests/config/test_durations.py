"""Durations: text with a unit in, steps out."""

import pytest

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
    ("text", "message"),
    [
        *((text, "is not a duration: write a number and a unit, for example '500 steps'") for text in FORMS),
        ("1.5 fraction", "is not a duration: a fraction of the run lies between"),
        ("0.5 fraction", "the length of the run cannot be a fraction of itself"),  # which has no length yet
    ],
)
def test_not_a_duration(text, message):
    with pytest.raises(ValueError, match=f"'{text}'.*{message}"):
        Clock(global_batch=32, num_examples=1000).to_steps(text)
