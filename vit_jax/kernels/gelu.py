"""GELU whose gradient is computed from the input alone, for GPUs.

JAX keeps the derivative for the backward pass. XLA for GPUs writes and reads it beside the input;
XLA for TPUs computes it again.
"""

import functools

import jax
from jax import Array


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def gelu_of_kept_input(x: Array, approximate: bool) -> Array:
    """Return the GELU of `x`, of which the backward pass keeps `x`."""
    return jax.nn.gelu(x, approximate)


def _save_input(x: Array, approximate: bool) -> tuple[Array, Array]:
    """Return the GELU of `x`, and `x` for the backward pass."""
    return jax.nn.gelu(x, approximate), x


def _differentiate(
    approximate: bool,
    x: Array,
    gradient: Array,
) -> tuple[Array]:
    """Return the gradient of `x`."""
    x = jax.lax.optimization_barrier(x)  # or XLA computes values and derivatives at once
    _, pull_back = jax.vjp(lambda x: jax.nn.gelu(x, approximate), x)
    (gradient,) = pull_back(gradient)
    return (gradient,)


gelu_of_kept_input.defvjp(_save_input, _differentiate)
