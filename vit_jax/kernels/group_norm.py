"""Means of groups of channels, and a group norm whose passes over a map are few on CPUs.

Legend: B batch, H W height and width, C channels.
"""

import functools

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from vit_jax.config.sizes import NUM_GROUPS
from vit_jax.kernels import STATISTICS

Saved = tuple[Array, Array, Array, Array]


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def normalize_on_cpu(
    x_BHWC: Array,
    scale_C: Array,
    bias_C: Array,
    epsilon: float,
) -> Array:
    """Return (x - mean) / sqrt(variance + epsilon) * scale + bias, of float32.

    XLA for CPUs (jaxlib 0.10.2) stores x - mean if a sum and another operation use it. Behind
    barriers each subtracts the mean while it reads x. The gradient needs two sums over maps, and
    a barrier keeps XLA from adding up one of them again for the gradient of the bias.
    """
    y_BHWC, _ = _normalize_and_save(x_BHWC, scale_C, bias_C, epsilon)
    return y_BHWC


def _normalize_and_save(
    x_BHWC: Array,
    scale_C: Array,
    bias_C: Array,
    epsilon: float,
) -> tuple[Array, Saved]:
    """Return the normed map, and the input and statistics for the backward pass."""
    mean_B11C = average_groups(x_BHWC)
    squares_BHWC = jnp.square(x_BHWC - mean_B11C)
    variance_B11C = average_groups(squares_BHWC)

    inverse_B11C = jax.lax.rsqrt(variance_B11C + epsilon)
    offset_B11C, inverse_B11C = jax.lax.optimization_barrier((mean_B11C, inverse_B11C))
    y_BHWC = (x_BHWC - offset_B11C) * (inverse_B11C * scale_C) + bias_C
    return y_BHWC, (x_BHWC, scale_C, mean_B11C, inverse_B11C)


def _differentiate(
    epsilon: float,
    saved: Saved,
    dy_BHWC: Array,
) -> tuple[Array, Array, Array]:
    """Return the gradients of input, scale and bias."""
    x_BHWC, scale_C, *statistics = saved
    mean_B11C, inverse_B11C = jax.lax.optimization_barrier(statistics)
    sum_BC = dy_BHWC.sum(axis=(1, 2))
    products_BHWC = dy_BHWC * (x_BHWC - mean_B11C)
    products_BC = products_BHWC.sum(axis=(1, 2))

    sums = (mean_B11C, sum_BC, products_BC)
    mean_B11C, sum_BC, products_BC = jax.lax.optimization_barrier(sums)
    products_BC *= inverse_B11C[:, 0, 0]  # with the normed map
    num_positions = x_BHWC.shape[1] * x_BHWC.shape[2]
    average_B11C = _average_channels(sum_BC * scale_C / num_positions)
    average_of_products_B11C = _average_channels(products_BC * scale_C / num_positions)

    slope_B11C = average_of_products_B11C * jnp.square(inverse_B11C)
    dx_BHWC = dy_BHWC * (inverse_B11C * scale_C) - (x_BHWC - mean_B11C) * slope_B11C
    dx_BHWC -= average_B11C * inverse_B11C
    return dx_BHWC, products_BC.sum(axis=0), sum_BC.sum(axis=0)


def average_groups(x_BHWC: Array) -> Array:
    """Return for each channel the mean of its group, (B, 1, 1, C)."""
    means_B11C = _average_channels(x_BHWC.mean(axis=(1, 2)))
    return checkpoint_name(means_B11C, STATISTICS)


def _average_channels(value_BC: Array) -> Array:
    """Return for each channel the mean of the values of its group, (B, 1, 1, C)."""
    group_size = value_BC.shape[-1] // NUM_GROUPS
    values_by_group = value_BC.reshape(-1, NUM_GROUPS, group_size)
    means_BG = values_by_group.mean(axis=2)
    means_BC = jnp.repeat(means_BG, group_size, axis=1)
    return means_BC[:, None, None]


normalize_on_cpu.defvjp(_normalize_and_save, _differentiate)
