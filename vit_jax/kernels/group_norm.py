"""A group norm whose passes over a map are few on CPUs.

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
    mean_B11C = _average_groups(_sum_positions(x_BHWC), x_BHWC)
    mean_B11C = checkpoint_name(mean_B11C, STATISTICS)
    squares_BHWC = jnp.square(x_BHWC - mean_B11C)
    variance_B11C = _average_groups(_sum_positions(squares_BHWC), x_BHWC)
    variance_B11C = checkpoint_name(variance_B11C, STATISTICS)

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
    sum_BC = _sum_positions(dy_BHWC)
    products_BC = _sum_positions(dy_BHWC * (x_BHWC - mean_B11C))

    sums = (mean_B11C, sum_BC, products_BC)
    mean_B11C, sum_BC, products_BC = jax.lax.optimization_barrier(sums)
    products_BC *= inverse_B11C[:, 0, 0]  # with the normed map
    average_B11C = _average_groups(sum_BC * scale_C, x_BHWC)
    average_of_products_B11C = _average_groups(products_BC * scale_C, x_BHWC)

    slope_B11C = average_of_products_B11C * jnp.square(inverse_B11C)
    dx_BHWC = dy_BHWC * (inverse_B11C * scale_C) - (x_BHWC - mean_B11C) * slope_B11C
    dx_BHWC -= average_B11C * inverse_B11C
    return dx_BHWC, products_BC.sum(axis=0), sum_BC.sum(axis=0)


def _sum_positions(x_BHWC: Array) -> Array:
    """Return the sums over the positions of each image, (B, C)."""
    return x_BHWC.sum(axis=(1, 2))


def _average_groups(sums_BC: Array, x_BHWC: Array) -> Array:
    """Return for each channel the mean of its group, (B, 1, 1, C), from sums over positions."""
    batch, height, width, channels = x_BHWC.shape
    group_size = channels // NUM_GROUPS
    means_by_group = sums_BC.reshape(batch, NUM_GROUPS, group_size) / (height * width)
    means_BG = means_by_group.mean(axis=2)
    means_BC = jnp.repeat(means_BG, group_size, axis=1)
    return means_BC[:, None, None]


normalize_on_cpu.defvjp(_normalize_and_save, _differentiate)
