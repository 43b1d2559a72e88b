"""The convolution of images, and the same in the forms that XLA for CPUs is fast in.

Legend: B batch, H W height and width, I O channels of a kernel's input and output.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from vit_jax.kernels.products import multiply

Padding = str | tuple[tuple[int, int], ...]
"""SAME, or the rows before and after the map, and the columns."""


def convolve(
    x_BHWI: jax.Array,
    kernel_HWIO: jax.Array,
    stride: int,
    padding: Padding | Sequence[tuple[int, int]],
    **dilation: Any,
) -> jax.Array:
    """Return (B, H / stride, W / stride, O), rounded up if the padding is SAME."""
    numbers = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(
        x_BHWI, kernel_HWIO, (stride, stride), padding, dimension_numbers=numbers, **dilation
    )


def convolve_on_cpu(
    x_BHWI: jax.Array, kernel_HWIO: jax.Array, stride: int, padding: Padding
) -> jax.Array:
    """Return the result of `convolve`, up to rounding.

    XLA for CPUs (jaxlib 0.10.2) has fast code for convolutions of (B, H, W, I) with (H, W, I, O) alone. The gradients
    that JAX derives have other orders of dimensions; outside of loops XLA transposes them first, but inside they run
    forty times as long. And the kernel's gradient of a 1x1 convolution is five times as fast as a matrix product.
    """
    size = kernel_HWIO.shape[:2]
    if size == (1, 1):
        return multiply(x_BHWI[:, ::stride, ::stride], kernel_HWIO[0, 0])
    if isinstance(padding, str):
        padding = tuple(jax.lax.padtype_to_pads(x_BHWI.shape[1:3], size, (stride, stride), padding))
    return _convolve(x_BHWI, kernel_HWIO, stride, padding)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _convolve(
    x_BHWI: jax.Array, kernel_HWIO: jax.Array, stride: int, padding: Padding
) -> jax.Array:
    return convolve(x_BHWI, kernel_HWIO, stride, padding)


def _forward(
    x_BHWI: jax.Array, kernel_HWIO: jax.Array, stride: int, padding: Padding
) -> tuple[jax.Array, Any]:
    return convolve(x_BHWI, kernel_HWIO, stride, padding), (x_BHWI, kernel_HWIO)


def _backward(
    stride: int, padding: tuple[tuple[int, int], ...], inputs: Any, y_BHWO: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Gradients of the input and of the kernel, from that of the output: convolutions in the same order too."""
    x_BHWI, kernel_HWIO = inputs
    sizes = zip(x_BHWI.shape[1:3], kernel_HWIO.shape[:2], y_BHWO.shape[1:3], padding, strict=True)
    around_y = []
    around_x = []
    for x_size, kernel_size, y_size, (before, _) in sizes:
        reach = (y_size - 1) * stride + 1  # from the first to the last place of the kernel
        around_y.append((kernel_size - 1 - before, x_size - reach + before))
        around_x.append((before, reach - 1 + kernel_size - x_size - before))
    flipped_HWOI = jnp.flip(kernel_HWIO, (0, 1)).swapaxes(2, 3)
    dx_BHWI = convolve(y_BHWO, flipped_HWOI, 1, around_y, lhs_dilation=(stride, stride))
    x_IHWB = x_BHWI.transpose(3, 1, 2, 0)
    y_HWBO = y_BHWO.transpose(1, 2, 0, 3)
    dkernel_IHWO = convolve(x_IHWB, y_HWBO, 1, around_x, rhs_dilation=(stride, stride))
    return dx_BHWI, dkernel_IHWO.transpose(1, 2, 0, 3)


_convolve.defvjp(_forward, _backward)
