"""The convolution of images, and a form whose gradients XLA for CPUs computes fast.

Legend: B batch, H W height and width, I O channels of a kernel's input and output, N = H W I values
of a window, P positions of an output.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from vit_jax.kernels.devices import count_devices
from vit_jax.kernels.products import MANY_POSITIONS, multiply_on_cpu

Border = tuple[tuple[int, int], ...]  # zeros before and after the lines and the columns
_ORDERS = ("NHWC", "HWIO", "NHWC")
_FEW_CHANNELS = 16


def convolve(
    x_BHWI: Array,
    kernel_HWIO: Array,
    stride: int,
    padding: str | Sequence[tuple[int, int]],
    **dilation: Any,
) -> Array:
    """Return (B, H / stride, W / stride, O), rounded up if the padding is SAME."""
    strides = (stride, stride)
    return jax.lax.conv_general_dilated(
        x_BHWI,
        kernel_HWIO,
        strides,
        padding,
        dimension_numbers=_ORDERS,
        **dilation,
    )


def convolve_on_cpu(
    x_BHWI: Array,
    kernel_HWIO: Array,
    stride: int,
    padding: str | Border,
) -> Array:
    """Return the result of `convolve`, up to rounding.

    XLA for CPUs (jaxlib 0.10.2) has fast code for convolutions of (B, H, W, I) with (H, W, I, O)
    alone. The gradients that JAX derives have other orders of dimensions; outside of loops XLA
    transposes them first, but inside they run forty times as long. And the kernel's gradient of a
    1x1 convolution is five times as fast as a matrix product.
    """
    size = kernel_HWIO.shape[:2]
    if size == (1, 1):
        read_BHWI = x_BHWI[:, ::stride, ::stride]
        return multiply_on_cpu(read_BHWI, kernel_HWIO[0, 0])

    if isinstance(padding, str):
        map_size = x_BHWI.shape[1:3]
        strides = (stride, stride)
        padding = tuple(jax.lax.padtype_to_pads(map_size, size, strides, padding))
    return _convolve(x_BHWI, kernel_HWIO, stride, padding)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _convolve(
    x_BHWI: Array,
    kernel_HWIO: Array,
    stride: int,
    padding: Border,
) -> Array:
    """Return the result of `convolve`."""
    return convolve(x_BHWI, kernel_HWIO, stride, padding)


def _convolve_and_save(
    x_BHWI: Array,
    kernel_HWIO: Array,
    stride: int,
    padding: Border,
) -> tuple[Array, tuple[Array, Array]]:
    """Return the result of `convolve`, and its operands for the backward pass."""
    y_BHWO = convolve(x_BHWI, kernel_HWIO, stride, padding)
    return y_BHWO, (x_BHWI, kernel_HWIO)


def _differentiate(
    stride: int,
    padding: Border,
    saved: tuple[Array, Array],
    dy_BHWO: Array,
) -> tuple[Array, Array]:
    """Return the gradients of input and kernel, by convolutions with the same orders or products."""
    x_BHWI, kernel_HWIO = saved
    border_of_dy = []
    border_of_x = []
    for axis, (before, _) in enumerate(padding):
        x_size = x_BHWI.shape[1 + axis]
        y_size = dy_BHWO.shape[1 + axis]
        kernel_size = kernel_HWIO.shape[axis]
        dilated_size = (y_size - 1) * stride + 1  # size of dy with zeros between its values

        before_dy = kernel_size - 1 - before
        after_dy = x_size - dilated_size + before
        border_of_dy.append((before_dy, after_dy))

        after_x = dilated_size - 1 + kernel_size - x_size - before
        border_of_x.append((before, after_x))

    flipped_HWIO = jnp.flip(kernel_HWIO, (0, 1))
    flipped_HWOI = flipped_HWIO.swapaxes(2, 3)
    dilation = (stride, stride)
    dx_BHWI = convolve(dy_BHWO, flipped_HWOI, 1, border_of_dy, lhs_dilation=dilation)

    if not runs_by_image(dy_BHWO):
        x_IHWB = x_BHWI.transpose(3, 1, 2, 0)
        dy_HWBO = dy_BHWO.transpose(1, 2, 0, 3)
        dkernel_IHWO = convolve(x_IHWB, dy_HWBO, 1, border_of_x, rhs_dilation=dilation)
        return dx_BHWI, dkernel_IHWO.transpose(1, 2, 0, 3)

    x_BIHW = x_BHWI.transpose(0, 3, 1, 2)
    height, width, inputs, outputs = kernel_HWIO.shape
    if inputs < _FEW_CHANNELS:
        padded_BIHW = jnp.pad(x_BIHW, ((0, 0), (0, 0), *padding))
        dkernel_NO = _add_products(padded_BIHW, dy_BHWO, (height, width), stride)
        return dx_BHWI, dkernel_NO.reshape(kernel_HWIO.shape)

    zeros_IHWO = jnp.zeros((inputs, height, width, outputs), kernel_HWIO.dtype)
    operands = (x_BIHW[..., None], dy_BHWO[:, :, :, None])
    dkernel_IHWO = _add_convolutions(zeros_IHWO, operands, border_of_x, dilation)
    return dx_BHWI, dkernel_IHWO.transpose(1, 2, 0, 3)


def runs_by_image(y_BHWC: Array) -> bool:
    """Return whether a backward pass runs image by image, from the shape of the forward output.

    XLA reads all positions of all images for every few values of a kernel's gradient. Those of one
    image stay in the cache of a core. A loop over images that are shared out to devices would copy
    them to all.
    """
    _, height, width, _ = y_BHWC.shape
    has_many_positions = height * width >= MANY_POSITIONS
    return has_many_positions and count_devices() == 1


def _add_convolutions(
    zeros_IHWO: Array,
    operands: tuple[Array, Array],
    border_of_x: list[tuple[int, int]],
    dilation: tuple[int, int],
) -> Array:
    """Return the sum of the gradients (I, H, W, O) of the kernel that the images have.

    Args:
      zeros_IHWO: a gradient of zeros.
      operands: input (B, I, H, W, 1) and gradient of the output (B, H, W, 1, O).
      border_of_x: zeros around the input.
      dilation: stride of the forward pass.
    """

    def add_image(sum_IHWO: Array, image: tuple[Array, Array]) -> tuple[Array, None]:
        dkernel_IHWO = convolve(*image, 1, border_of_x, rhs_dilation=dilation)
        return sum_IHWO + dkernel_IHWO, None

    dkernel_IHWO, _ = jax.lax.scan(add_image, zeros_IHWO, operands)
    return dkernel_IHWO


def _add_products(
    padded_BIHW: Array,
    dy_BHWO: Array,
    window: tuple[int, int],
    stride: int,
) -> Array:
    """Return the sum of the gradients (N, O) of the kernel that the images have, by products.

    This takes a third of the time if the input has few channels. The loop also makes XLA store the
    output's gradient. Otherwise XLA computes elementwise operations that lead to it again while it
    changes the order of dimensions.
    """
    batch, *output_size, outputs = dy_BHWO.shape
    dy_BPO = dy_BHWO.reshape(batch, -1, outputs)

    def add_image(sum_NO: Array, image: tuple[Array, Array]) -> tuple[Array, None]:
        x_IHW, dy_PO = image
        patches_NP = _cut_patches(x_IHW, window, output_size, stride)
        return sum_NO + patches_NP @ dy_PO, None

    num_values = math.prod(window) * padded_BIHW.shape[1]
    zeros_NO = jnp.zeros((num_values, outputs), dy_BHWO.dtype)
    dkernel_NO, _ = jax.lax.scan(add_image, zeros_NO, (padded_BIHW, dy_BPO))
    return dkernel_NO


def _cut_patches(
    x_IHW: Array,
    window: Sequence[int],
    output_size: Sequence[int],
    stride: int,
) -> Array:
    """Return the values of the window at every position, (N, P), from a padded input."""
    height, width = output_size
    last_line = (height - 1) * stride
    last_column = (width - 1) * stride

    values_IP = []
    for line in range(window[0]):
        lines = slice(line, line + last_line + 1, stride)
        for column in range(window[1]):
            columns = slice(column, column + last_column + 1, stride)
            value_IHW = x_IHW[:, lines, columns]
            values_IP.append(value_IHW.reshape(-1, height * width))
    return jnp.concatenate(values_IP)


_convolve.defvjp(_convolve_and_save, _differentiate)
