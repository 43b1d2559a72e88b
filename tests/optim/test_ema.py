"""The Polyak average against explicit weighted sums in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from numpy.testing import assert_allclose, assert_array_equal

from vit_jax.optim import ema


def sample_history(num_steps):
    """Return parameters before the first step and after each: (num_steps + 1, 3)."""
    rng = np.random.default_rng(0)
    sample = rng.normal(loc=2.0, size=(num_steps + 1, 3))
    return np.float32(sample)


def compute_average(parameters, **settings):
    """Return the average after the last step, its steps traced."""

    def step(average, index_and_parameters):
        index, now = index_and_parameters
        return ema.update(average, now, index, **settings), None

    first = ema.init(jnp.asarray(parameters[0]))
    steps = jnp.arange(1, len(parameters))
    average, _ = jax.lax.scan(step, first, (steps, parameters[1:]))
    return np.asarray(average)


def average_by_loop(first, seen, weights):
    """Return an average in float64 that begins at `first`, with the weight of the past at each step."""
    average = first.astype(np.float64)
    for now, weight in zip(seen, weights, strict=True):
        average = weight * average + (1 - weight) * now
    return average


LENGTHS = [
    (1, 0, 0.9),
    (1, 1, 0.9),
    (2, 1, 0.9),
    (6, 6, 0.9),
    (8, 0, 0.9),
    (8, 7, 0.9),
    (40, 7, 0.9),
    (5000, 0, 0.9999),
]


def find_tolerance(num_steps):
    return 1e-5 if num_steps < 100 else 2e-5


@pytest.mark.parametrize(("num_steps", "start_step", "factor"), LENGTHS)
def test_a_corrected_average_is_a_weighted_mean_since_the_start(
    num_steps,
    start_step,
    factor,
):
    parameters = sample_history(num_steps)
    seen = parameters[start_step + 1 :].astype(np.float64)
    expected = parameters[-1]
    if len(seen):
        weights = factor ** np.arange(len(seen))[::-1]
        expected = weights @ seen / weights.sum()

    average = compute_average(
        parameters,
        factor=factor,
        start_step=start_step,
        bias_correction=True,
    )

    assert_allclose(average, expected, rtol=find_tolerance(num_steps))


@pytest.mark.parametrize(("num_steps", "start_step", "factor"), LENGTHS)
def test_an_uncorrected_average_begins_at_the_parameters_of_the_start(
    num_steps,
    start_step,
    factor,
):
    parameters = sample_history(num_steps)
    seen = parameters[start_step + 1 :].astype(np.float64)
    expected = average_by_loop(
        parameters[start_step],
        seen,
        [factor] * len(seen),
    )

    average = compute_average(
        parameters,
        factor=factor,
        start_step=start_step,
        bias_correction=False,
    )

    assert_allclose(average, expected, rtol=find_tolerance(num_steps))


def compute_warmup_weight(warmup, n):
    """Return the weight of tf.train.ExponentialMovingAverage or of timm's ModelEmaV3."""
    if warmup == "ratio":
        return (1 + n) / (10 + n)
    return 1 - (1 + n / 1.0) ** -(2 / 3)


@pytest.mark.parametrize("warmup", ["ratio", "power"])
def test_warm_up_against_a_float64_loop(warmup):
    """Updates are counted from 0 on."""
    parameters = sample_history(60)
    factor = 0.9
    start = 7
    seen = parameters[start + 1 :]
    weights = []
    for n in range(len(seen)):
        weight = compute_warmup_weight(warmup, n)
        weights.append(min(factor, weight))
    expected = average_by_loop(parameters[start], seen, weights)

    average = compute_average(
        parameters,
        factor=factor,
        start_step=start,
        bias_correction=False,
        warmup=warmup,
    )

    assert weights[-1] > 0.85, "the warm-up has nearly ended"
    assert_allclose(average, expected, rtol=1e-5)


@pytest.mark.parametrize("bias_correction", [True, False])
def test_constant_parameters_are_their_own_average(bias_correction):
    constants = np.array([0.1, -3.0, 1e-8], np.float32)
    parameters = np.tile(constants, (3001, 1))

    average = compute_average(
        parameters,
        factor=0.9999,
        start_step=5,
        bias_correction=bias_correction,
    )

    assert_array_equal(average, parameters[0])


def test_the_average_of_a_module_is_one_of_float32_that_shares_no_buffer():
    network = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    half = jax.tree.map(
        lambda leaf: leaf.astype(jnp.bfloat16),
        network,
    )
    settings = {
        "factor": 0.9,
        "start_step": 0,
        "bias_correction": True,
    }
    update = jax.jit(ema.update, static_argnames=tuple(settings))

    average = ema.init(network)
    updated = update(average, half, jnp.int32(1), **settings)
    leaves = jax.tree.leaves(updated)
    dtypes = {str(leaf.dtype) for leaf in leaves}
    buffer = average.kernel[...].unsafe_buffer_pointer()

    assert isinstance(updated, nnx.Linear)
    assert dtypes == {"float32"}
    assert buffer != network.kernel[...].unsafe_buffer_pointer()
