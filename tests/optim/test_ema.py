"""The Polyak average against explicit weighted sums in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from vit_jax import pytree
from vit_jax.optim import ema


def history(num_steps):
    """Parameters before the first step and after each: (num_steps + 1, 3)."""
    return np.random.default_rng(0).normal(loc=2.0, size=(num_steps + 1, 3)).astype(np.float32)


def average_of(parameters, **settings):
    """Our average after the last step, its steps traced."""

    def step(average, index_and_parameters):
        index, now = index_and_parameters
        return ema.update(average, now, index, **settings), None

    steps = jnp.arange(1, len(parameters))
    return np.asarray(
        jax.lax.scan(step, ema.init(jnp.asarray(parameters[0])), (steps, parameters[1:]))[0]
    )


@pytest.mark.parametrize(
    ("num_steps", "start_step", "factor"),
    [
        (1, 0, 0.9),
        (1, 1, 0.9),
        (2, 1, 0.9),
        (6, 6, 0.9),
        (8, 0, 0.9),
        (8, 7, 0.9),
        (40, 7, 0.9),
        (5000, 0, 0.9999),
    ],
)
def test_against_a_float64_loop(num_steps, start_step, factor):
    """Corrected: a weighted mean of what came after the start.

    Otherwise: begun at the parameters of the start.
    """
    parameters = history(num_steps)
    seen = parameters[start_step + 1 :].astype(np.float64)
    weights = factor ** np.arange(len(seen))[::-1]
    corrected = weights @ seen / weights.sum() if len(seen) else parameters[-1]
    uncorrected = parameters[start_step].astype(np.float64)

    for now in seen:
        uncorrected = factor * uncorrected + (1 - factor) * now

    for bias_correction, expected in ((True, corrected), (False, uncorrected)):
        ours = average_of(
            parameters,
            factor=factor,
            start_step=start_step,
            bias_correction=bias_correction,
        )

        np.testing.assert_allclose(ours, expected, rtol=1e-5 if num_steps < 100 else 2e-5)


@pytest.mark.parametrize("warmup", ["ratio", "power"])
def test_warm_up_against_a_float64_loop(warmup):
    """The weights of tf.train.ExponentialMovingAverage, and of timm's ModelEmaV3, for the n-th update from 0 on."""
    parameters = history(60)
    factor = 0.9
    start = 7
    expected = parameters[start].astype(np.float64)

    for n, now in enumerate(parameters[start + 1 :]):
        weight = (1 + n) / (10 + n) if warmup == "ratio" else 1 - (1 + n / 1.0) ** -(2 / 3)
        expected = min(factor, weight) * expected + (1 - min(factor, weight)) * now

    ours = average_of(
        parameters,
        factor=factor,
        start_step=start,
        bias_correction=False,
        warmup=warmup,
    )

    np.testing.assert_allclose(ours, expected, rtol=1e-5)
    assert min(factor, weight) > 0.85  # the warm-up has nearly ended


@pytest.mark.parametrize("bias_correction", [True, False])
def test_constant_parameters_are_their_own_average(bias_correction):
    parameters = np.full((3001, 3), [0.1, -3.0, 1e-8], np.float32)
    ours = average_of(parameters, factor=0.9999, start_step=5, bias_correction=bias_correction)
    np.testing.assert_array_equal(ours, parameters[0])


def test_the_average_of_a_module_is_one_of_float32_with_buffers_of_its_own():
    network = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    settings = {"factor": 0.9, "start_step": 0, "bias_correction": True}
    average = ema.init(network)
    half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), network)
    updated = jax.jit(ema.update, static_argnames=tuple(settings))(
        average,
        half,
        jnp.int32(1),
        **settings,
    )

    assert isinstance(updated, nnx.Linear)
    assert {str(leaf.dtype) for leaf in pytree.named_leaves(updated).values()} == {"float32"}
    assert (
        average.kernel[...].unsafe_buffer_pointer() != network.kernel[...].unsafe_buffer_pointer()
    )
