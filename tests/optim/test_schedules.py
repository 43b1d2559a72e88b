"""The learning rate at the steps where it is known, for every decay, traced and not."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose

from vit_jax.config.lengths import ScheduleSteps
from vit_jax.config.schema import Duration, ScheduleConfig
from vit_jax.optim.schedules import build_schedule

WARMUP = 100
TOTAL = 1100
TIMESCALE = 400
BASE = 8e-4
LENGTHS = ScheduleSteps(
    warmup=WARMUP,
    total=TOTAL,
    timescale=TIMESCALE,
    cooldown=400,
)


def config(decay, **changes):
    given = ScheduleConfig(
        learning_rate=BASE,
        warmup=Duration("unused"),
        decay="constant",
    )
    return dataclasses.replace(given, decay=decay, **changes)


def compute_rates(decay, *steps, lengths=LENGTHS, **changes):
    schedule = build_schedule(config(decay, **changes), lengths)
    return [float(schedule(step)) for step in steps]


@pytest.mark.parametrize(
    "decay",
    ["linear", "cosine", "rsqrt", "constant", "staircase", "wsd"],
)
def test_a_linear_warm_up_from_zero_to_the_base_and_no_rise_after_it(decay):
    schedule = build_schedule(config(decay), LENGTHS)
    warming_up = BASE * np.arange(WARMUP + 1) / WARMUP

    steps = jnp.arange(TOTAL + 10)
    compute_traced = jax.jit(jax.vmap(schedule))
    traced = np.asarray(compute_traced(steps))
    not_traced = schedule(345)

    assert traced.dtype == jnp.float32
    assert_allclose(traced[: WARMUP + 1], warming_up, rtol=1e-6)
    assert (np.diff(traced[WARMUP:]) <= 0).all()
    assert not_traced.shape == ()
    expected = pytest.approx(float(traced[345]), rel=1e-5)
    assert float(not_traced) == expected


@pytest.mark.parametrize(
    "decay",
    ["linear", "cosine", "rsqrt", "constant", "staircase", "wsd"],
)
def test_a_schedule_without_warm_up_begins_at_the_base(decay):
    lengths = dataclasses.replace(LENGTHS, warmup=0)

    rates = compute_rates(decay, 0, lengths=lengths)

    assert rates == pytest.approx([BASE], rel=1e-6)


@pytest.mark.parametrize(
    ("decay", "end", "step", "expected"),
    [
        ("linear", 1e-5, 600, (BASE + 1e-5) / 2),
        # (1 + cos 45 degrees) / 2.
        ("cosine", 0.0, 350, BASE * 0.85355339),
        ("cosine", 1e-5, 600, (BASE + 1e-5) / 2),
        ("rsqrt", 0.0, WARMUP + 3 * TIMESCALE, BASE / 2),
        ("constant", 0.0, 777, BASE),
        ("wsd", 1e-5, TOTAL - 400, BASE),
        # A quarter of the cooldown, whose root is a half.
        ("wsd", 0.0, TOTAL - 300, BASE / 2),
    ],
)
def test_decay_on_its_way(decay, end, step, expected):
    rates = compute_rates(decay, step, end_learning_rate=end)

    assert rates == pytest.approx([expected], rel=1e-5)


@pytest.mark.parametrize("decay", ["linear", "cosine", "wsd"])
@pytest.mark.parametrize(
    ("end", "step"),
    [
        (0.0, TOTAL),
        (1e-5, TOTAL),
        (1e-5, TOTAL + 9),
    ],
)
def test_decay_ends_at_the_end_learning_rate(decay, end, step):
    rates = compute_rates(decay, step, end_learning_rate=end)

    assert rates == pytest.approx([end], rel=1e-5)


def test_a_linear_cooldown():
    expected = 1e-5 + 0.75 * (BASE - 1e-5)

    rates = compute_rates(
        "wsd",
        TOTAL - 300,
        cooldown_form="linear",
        end_learning_rate=1e-5,
    )

    assert rates == pytest.approx([expected], rel=1e-6)


def test_runs_of_all_lengths_share_the_stable_part():
    shorter = dataclasses.replace(LENGTHS, total=800, cooldown=100)
    steps = range(0, 701, 7)

    rates = compute_rates("wsd", *steps)
    shorter_rates = compute_rates("wsd", *steps, lengths=shorter)

    assert shorter_rates == rates


def test_staircase_of_bit_hyperrule():
    """The released fractions for datasets of medium size."""
    lengths = ScheduleSteps(
        warmup=500,
        total=10_000,
        timescale=1,
        cooldown=0,
    )
    schedule = build_schedule(
        config("staircase", drop_at_fraction=(0.3, 0.6, 0.9)),
        lengths,
    )
    falling = [BASE, BASE / 10, BASE / 100, BASE / 1000]
    expected = np.repeat(falling, [2500, 3000, 3000, 1000])

    steps = jnp.arange(500, 10_000)
    compute_each = jax.vmap(jax.jit(schedule))
    rates = np.asarray(compute_each(steps))

    assert_allclose(rates, expected, rtol=1e-6)


def test_drops_between_steps():
    """The rate drops at steps 3.5 and 5.6."""
    lengths = ScheduleSteps(
        warmup=0,
        total=7,
        timescale=1,
        cooldown=0,
    )
    expected = [BASE] * 4 + [BASE / 10] * 2 + [BASE / 100]

    rates = compute_rates(
        "staircase",
        *range(7),
        lengths=lengths,
        drop_at_fraction=(0.5, 0.8),
    )

    assert rates == pytest.approx(expected, rel=1e-6)


def test_long_runs_keep_their_resolution():
    """14 epochs of JFT at batch 4096 are one million steps, of which each still lowers the rate."""
    lengths = ScheduleSteps(
        warmup=10_000,
        total=1_035_645,
        timescale=1,
        cooldown=0,
    )

    rates = compute_rates("linear", 1_000_000, 1_000_001, 1_035_644, lengths=lengths)

    assert rates[0] > rates[1]
    # The remaining fraction is 1 - progress, with progress near 1.
    assert rates[2] == pytest.approx(BASE / 1_025_645, rel=0.07)


def rsqrt_of_mine(learning_rate, warmup_steps, total_steps):
    def schedule(step):
        fraction = jnp.float32(warmup_steps) / (jnp.float32(step) + total_steps)
        return learning_rate * jnp.minimum(1.0, fraction)

    return schedule


def no_scalar(learning_rate, warmup_steps, total_steps):
    return lambda step: jnp.full(2, learning_rate)


def test_a_reference_gives_the_complete_schedule():
    schedule = build_schedule(config(f"{__name__}:rsqrt_of_mine"), LENGTHS)
    expected = BASE * WARMUP / (10 + TOTAL)

    rate = jax.jit(schedule)(jnp.int32(10))

    assert rate.dtype == jnp.float32
    assert float(rate) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "optax:cosine_decay_schedule",
            "cannot be called with learning_rate, warmup_steps and total_steps: .*arg",
        ),
        (f"{__name__}:no_scalar", r"gives .*\(2,\).* for a step; a learning rate is a scalar"),
        ("optax:no_such", "optax has no 'no_such'"),
    ],
)
def test_references_that_give_no_schedule_are_rejected(name, message):
    with pytest.raises(ValueError, match=rf"config.schedule.decay='{name}'.*{message}"):
        build_schedule(config(name), LENGTHS)
