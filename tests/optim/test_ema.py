"""The Polyak average against explicit weighted sums in float64."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from vit_jax import pytree
from vit_jax.optim import ema

SETTINGS: dict[str, Any] = {"factor": 0.9, "start_step": 0, "bias_correction": True}


def history(num_steps: int) -> np.ndarray:
    """Parameters before the first step and after each: (num_steps + 1, 3)."""
    return np.random.default_rng(0).normal(loc=2.0, size=(num_steps + 1, 3)).astype(np.float32)


def average_of(parameters: np.ndarray, **settings: Any) -> np.ndarray:
    """Our average after the last step, its steps traced."""

    def step(average: jax.Array, index_and_parameters: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        index, now = index_and_parameters
        return ema.update(average, now, index, **settings), None

    steps = jnp.arange(1, len(parameters))
    return np.asarray(jax.lax.scan(step, ema.init(jnp.asarray(parameters[0])), (steps, parameters[1:]))[0])


@pytest.mark.parametrize(("num_steps", "start_step"), [(1, 0), (1, 1), (2, 1), (8, 0), (8, 7), (40, 7)])
def test_against_a_float64_loop(num_steps: int, start_step: int) -> None:
    """Corrected: a weighted mean of what came after the start. Otherwise: begun at the parameters of the start."""
    parameters = history(num_steps)
    seen = parameters[start_step + 1 :].astype(np.float64)
    weights = 0.9 ** np.arange(len(seen))[::-1]
    corrected = weights @ seen / weights.sum() if len(seen) else parameters[-1]
    uncorrected = parameters[min(start_step, num_steps)].astype(np.float64)
    for now in seen:
        uncorrected = 0.9 * uncorrected + 0.1 * now
    for bias_correction, expected in ((True, corrected), (False, uncorrected)):
        ours = average_of(parameters, factor=0.9, start_step=start_step, bias_correction=bias_correction)
        np.testing.assert_allclose(ours, expected, rtol=1e-5)


@pytest.mark.parametrize("bias_correction", [True, False])
def test_thousands_of_steps_at_the_papers_factor(bias_correction: bool) -> None:
    parameters = history(5000)
    expected, weight = (np.zeros(3), 0.0) if bias_correction else (parameters[0].astype(np.float64), 1.0)
    for now in parameters[1:]:
        expected, weight = 0.9999 * expected + 0.0001 * now, 0.9999 * weight + 0.0001
    ours = average_of(parameters, factor=0.9999, start_step=0, bias_correction=bias_correction)
    np.testing.assert_allclose(ours, expected / weight, rtol=2e-5)


@pytest.mark.parametrize("bias_correction", [True, False])
def test_constant_parameters_are_their_own_average(bias_correction: bool) -> None:
    parameters = np.full((3001, 3), [0.1, -3.0, 1e-8], np.float32)
    ours = average_of(parameters, factor=0.9999, start_step=5, bias_correction=bias_correction)
    np.testing.assert_array_equal(ours, parameters[0])


def test_before_and_at_the_start_the_average_is_the_parameters() -> None:
    parameters = history(6)
    for num_steps in range(7):
        ours = average_of(parameters[: num_steps + 1], factor=0.9, start_step=6, bias_correction=False)
        np.testing.assert_array_equal(ours, parameters[num_steps])


def test_a_modules_average_is_a_float32_module_with_buffers_of_its_own() -> None:
    network = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    average = ema.init(network)
    updated = jax.jit(ema.update, static_argnames=tuple(SETTINGS))(average, network, jnp.int32(1), **SETTINGS)
    assert isinstance(updated, nnx.Linear)
    assert pytree.named_leaves(updated).keys() == pytree.named_leaves(network).keys()
    assert average.kernel[...].unsafe_buffer_pointer() != network.kernel[...].unsafe_buffer_pointer()


def test_low_precision_parameters_are_averaged_in_float32() -> None:
    parameters = {"kernel": jnp.ones(2, jnp.bfloat16)}
    average = ema.update(ema.init(parameters), parameters, 3, **SETTINGS)
    assert average["kernel"].dtype == jnp.float32
