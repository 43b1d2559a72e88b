"""Maxima of windows of 3x3, two apart, and a form whose gradient is fast on CPUs.

Legend: B batch, H W height and width of the input, h w of the output, C channels.
"""

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from vit_jax.kernels.convolution import runs_by_image

Border = tuple[tuple[int, int], ...]  # positions before and after the lines and the columns
_WINDOW = (3, 3)
_STRIDES = (2, 2)


def max_pool(x_BHWC: Array, padding: str | Border) -> Array:
    """Return (B, h, w, C); positions of the padding are never the maximum."""
    return nnx.max_pool(x_BHWC, window_shape=_WINDOW, strides=_STRIDES, padding=padding)


def max_pool_on_cpu(x_BHWC: Array, padding: str | Border) -> Array:
    """Return the result of `max_pool`.

    XLA for CPUs (jaxlib 0.10.2) computes the gradient that JAX derives value by value. Here the
    forward pass keeps the offset of each maximum in its window, in a byte, and a position gets the
    gradients of the windows whose maximum it is.
    """
    size = x_BHWC.shape[1:3]
    if isinstance(padding, str):
        padding = tuple(jax.lax.padtype_to_pads(size, _WINDOW, _STRIDES, padding))
    return _max_pool(x_BHWC, padding, size)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _max_pool(x_BHWC: Array, padding: Border, size: tuple[int, int]) -> Array:
    """Return the result of `max_pool` for maps of this size."""
    return max_pool(x_BHWC, padding)


def _max_pool_and_save(
    x_BHWC: Array,
    padding: Border,
    size: tuple[int, int],
) -> tuple[Array, Array]:
    """Return the maxima, and the offset of each in its window.

    Of equal values the first is the maximum, as in the gradient that JAX derives.
    """
    batch, _, _, channels = x_BHWC.shape
    (lines_before, lines_after), (columns_before, columns_after) = padding
    border_of_lines = (lines_before, lines_after, 0)
    border_of_columns = (columns_before, columns_after, 0)
    borders = ((0, 0, 0), border_of_lines, border_of_columns, (0, 0, 0))
    lowest = jnp.array(-jnp.inf, x_BHWC.dtype)
    padded_BHWC = jax.lax.pad(x_BHWC, lowest, borders)

    _, padded_height, padded_width, _ = padded_BHWC.shape
    last_line = padded_height - 3
    last_column = padded_width - 3

    def read(line: int, column: int) -> Array:
        start = (0, line, column, 0)
        end = (batch, last_line + line + 1, last_column + column + 1, channels)
        return jax.lax.slice(padded_BHWC, start, end, (1, 2, 2, 1))

    maximum_BhwC = read(0, 0)
    offset_BhwC = jnp.zeros(maximum_BhwC.shape, jnp.int8)
    for offset in range(1, 9):
        line, column = divmod(offset, 3)
        value_BhwC = read(line, column)
        is_larger = value_BhwC > maximum_BhwC
        offset_BhwC = jnp.where(is_larger, jnp.int8(offset), offset_BhwC)
        maximum_BhwC = jnp.maximum(maximum_BhwC, value_BhwC)  # not a number stays
    return maximum_BhwC, offset_BhwC


def _differentiate(
    padding: Border,
    size: tuple[int, int],
    offset_BhwC: Array,
    dy_BhwC: Array,
) -> tuple[Array]:
    """Return the gradient of the input.

    A loop over large images makes XLA store offsets and gradients of maxima. Otherwise XLA computes
    both again for every window that contains a position.
    """

    def differentiate_image(image: tuple[Array, Array]) -> Array:
        offset_hwC, dy_hwC = image
        dx_1HWC = _differentiate_images(padding, size, offset_hwC[None], dy_hwC[None])
        return dx_1HWC[0]

    if not runs_by_image(dy_BhwC):
        return (_differentiate_images(padding, size, offset_BhwC, dy_BhwC),)
    return (jax.lax.map(differentiate_image, (offset_BhwC, dy_BhwC)),)


def _differentiate_images(
    padding: Border,
    size: tuple[int, int],
    offset_BhwC: Array,
    dy_BhwC: Array,
) -> Array:
    """Return the gradient of the input, from those of its even and odd lines and columns."""
    height, width = size
    (lines_before, _), (columns_before, _) = padding

    lines = []
    for line in range(2):
        columns = []
        for column in range(2):
            first = (line + lines_before, column + columns_before)
            part = _differentiate_positions(offset_BhwC, dy_BhwC, first, size)
            columns.append(part)
        lines.append(jnp.stack(columns, axis=3))
    parts = jnp.stack(lines, axis=2)

    batch, half_height, _, half_width, _, channels = parts.shape
    dx_BHWC = parts.reshape(batch, 2 * half_height, 2 * half_width, channels)
    return dx_BHWC[:, :height, :width]


def _differentiate_positions(
    offset_BhwC: Array,
    dy_BhwC: Array,
    first: tuple[int, int],
    size: tuple[int, int],
) -> Array:
    """Return the gradient of positions two apart.

    Args:
      offset_BhwC: offset of each maximum in its window.
      dy_BhwC: gradient of each maximum.
      first: line and column of the first position, in the padded input.
      size: height and width of the input.
    """
    height, width = size
    _, num_lines, num_columns, _ = dy_BhwC.shape
    zero = jnp.zeros((), dy_BhwC.dtype)

    terms = []
    for line, window_line in _list_windows(first[0]):
        for column, window_column in _list_windows(first[1]):
            is_maximum = offset_BhwC == 3 * line + column
            gradient = jnp.where(is_maximum, dy_BhwC, zero)
            border_of_lines = _find_border(window_line, num_lines, height)
            border_of_columns = _find_border(window_column, num_columns, width)
            borders = ((0, 0, 0), border_of_lines, border_of_columns, (0, 0, 0))
            terms.append(jax.lax.pad(gradient, zero, borders))
    return functools.reduce(jnp.add, terms)


def _list_windows(position: int) -> list[tuple[int, int]]:
    """Return each window that contains a position: its offset in the window, and the window.

    An odd position is the second of one window; an even one is the first of a window and the third
    of the one before.
    """
    window, parity = divmod(position, 2)
    if parity == 1:
        return [(1, window)]
    return [(0, window), (2, window - 1)]


def _find_border(first_window: int, num_windows: int, size: int) -> tuple[int, int, int]:
    """Return the padding, negative to cut, after which windows begin at one and fill half a size."""
    num_positions = (size + 1) // 2
    return (-first_window, first_window + num_positions - num_windows, 0)


_max_pool.defvjp(_max_pool_and_save, _differentiate)
