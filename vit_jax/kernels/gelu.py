"""GELU whose gradient is computed from the input alone, for GPUs, and the exact form for TPUs.

JAX keeps the derivative for the backward pass. XLA for GPUs writes and reads it beside the input;
XLA for TPUs computes it again, but keeps a second array of the exact form.

In bfloat16 and float16 JAX rounds after each operation, and its erfc evaluates two functions for
each value: on an H100 arithmetic takes longer than memory. Here the exact value and both
derivatives are computed in float32, with one exponential and one division, and rounded once. The
value with tanh is JAX's: its time is that of memory, and cuBLAS can compute it in the product.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import Array, lax

_SLOPE = 2 * math.sqrt(2 / math.pi)
_CUBIC = 0.044715
_LARGEST_SQUARE = 100.0  # the sigmoid of larger inputs is 0 or 1, and their squares may overflow
_LARGEST_INPUT = 16.0  # the normal distribution has nothing in float32 beyond

# The normal distribution function is P(-a) = t (c0 + c1 t + ...) exp(-a^2 / 2), t = 1 / (1 + s a).
# Least squares on the relative error, reweighted to be even: 5e-6 for a <= 14.
_TAIL_SCALE = 0.305
_TAIL_COEFFICIENTS = (0.1219755, 0.1169973, 0.1392556, -0.0016024, 0.1996187, -0.0762447)
_DENSITY_AT_ZERO = 1 / math.sqrt(2 * math.pi)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def gelu_of_kept_input(x: Array, approximate: bool, is_recomputed: bool = False) -> Array:
    """Return the GELU of `x`, of which the backward pass keeps `x`.

    With `is_recomputed` it computes the GELU again, in the kernel of the gradient.
    """
    if approximate or not _is_half(x):
        return jax.nn.gelu(x, approximate)
    value = _compute_exact_value(x.astype(jnp.float32))
    return value.astype(x.dtype)


def _is_half(x: Array) -> bool:
    """Return whether a number of `x` has 16 bits."""
    return x.dtype.itemsize == 2


def _compute_tanh_derivative(x: Array) -> Array:
    """Return the derivative of x (1 + tanh(u)) / 2, u = sqrt(2 / pi) (x + 0.044715 x^3).

    (1 + tanh(u)) / 2 is the sigmoid of 2u.
    """
    square = jnp.minimum(x * x, _LARGEST_SQUARE)
    sigmoid = lax.logistic(x * (_SLOPE + _SLOPE * _CUBIC * square))
    inner_derivative = _SLOPE + 3 * _SLOPE * _CUBIC * square
    return sigmoid + (sigmoid - sigmoid * sigmoid) * x * inner_derivative


def _compute_exact_value(x: Array) -> Array:
    """Return max(x, 0) - |x| P(-|x|), with the normal distribution function P."""
    magnitude = jnp.minimum(jnp.abs(x), _LARGEST_INPUT)
    ratio, exponential = _compute_tail(magnitude)
    # The product with the exponential comes last: P(-13) is below the numbers of float32
    return jnp.maximum(x, 0) - magnitude * ratio * exponential


def _compute_exact_derivative(x: Array) -> Array:
    """Return P(x) + x p(x), with the normal distribution function P and its density p."""
    magnitude = jnp.minimum(jnp.abs(x), _LARGEST_INPUT)
    ratio, exponential = _compute_tail(magnitude)
    derivative = (ratio - _DENSITY_AT_ZERO * magnitude) * exponential  # at -|x|
    return jnp.where(x < 0, derivative, 1 - derivative)


def _compute_tail(magnitude: Array) -> tuple[Array, Array]:
    """Return P(-magnitude) / exp(-magnitude^2 / 2), and the exponential."""
    t = 1 / (1 + _TAIL_SCALE * magnitude)
    ratio = jnp.zeros_like(t)
    for coefficient in reversed(_TAIL_COEFFICIENTS):
        ratio = (ratio + coefficient) * t
    exponential = jnp.exp(-0.5 * magnitude * magnitude)
    return ratio, exponential


def _save_input(x: Array, approximate: bool, is_recomputed: bool) -> tuple[Array, Array]:
    """Return the GELU of `x`, and `x` for the backward pass."""
    return gelu_of_kept_input(x, approximate, is_recomputed), x


def _differentiate(
    approximate: bool,
    is_recomputed: bool,
    x: Array,
    gradient: Array,
) -> tuple[Array]:
    """Return the gradient of `x`."""
    if not is_recomputed:
        x = lax.optimization_barrier(x)  # or XLA computes values and derivatives at once
    if not _is_half(x):
        _, pull_back = jax.vjp(lambda x: jax.nn.gelu(x, approximate), x)
        (gradient,) = pull_back(gradient)
        return (gradient,)

    wide_x = x.astype(jnp.float32)
    if approximate:
        derivative = _compute_tanh_derivative(wide_x)
    else:
        derivative = _compute_exact_derivative(wide_x)
    product = gradient.astype(jnp.float32) * derivative
    return (product.astype(x.dtype),)


gelu_of_kept_input.defvjp(_save_input, _differentiate)
