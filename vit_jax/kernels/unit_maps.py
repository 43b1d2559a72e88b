"""Maps in the kernel for residual units: shifted copies, the 3x3 convolution, kept maps.

Legend: R positions of a map, line after line, L lanes, T rows of the tiles of a 3x3 kernel.
"""

import itertools
from collections.abc import Callable, Sequence
from types import SimpleNamespace

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental.pallas import tpu as pltpu

from vit_jax.kernels.unit_sizes import Ref, UnitSizes, WindowOffset

PLAIN = (((1,), (0,)), ((), ()))  # a @ b
TRANSPOSED = (((0,), (0,)), ((), ()))  # a.T @ b


def multiply_on_chip(
    a: Array,
    b: Array,
    dimensions: tuple = PLAIN,
) -> Array:
    """Return a product in float32."""
    return jax.lax.dot_general(
        a,
        b,
        dimensions,
        preferred_element_type=jnp.float32,
    )


def load_float32(ref: Ref, rows: slice) -> Array:
    """Return rows of a map in float32."""
    x = ref[rows]
    return x.astype(jnp.float32)


def normalise_and_relu(
    x: Array,
    a: Array,
    b: Array,
) -> Array:
    """Return max(a x + b, 0) in float32."""
    x = x.astype(jnp.float32)
    z = a * x + b
    return jnp.maximum(z, 0.0)


# The 3x3 convolution.


def store_shifted(
    ref: Ref,
    plane: int,
    rows: slice,
    x_RL: Array,
    inside: Array,
    offsets: Sequence[WindowOffset],
    unit: UnitSizes,
) -> None:
    """Store rows of a plane once for each column of its offsets, with zeros where a line ends.

    Args:
      ref: (planes, 3, rows with borders, L); the middle index is the column of an offset, plus 1.
      plane: index of the plane.
      rows: rows of the plane, without its border.
      x_RL: values of these rows.
      inside: the two masks of `unit_pallas`, (2, R, L).
      offsets: window offsets; those of other planes are ignored.
      unit: sizes of the unit.
    """
    columns = {offset.column for offset in offsets if offset.plane == plane}
    mask_indices = {-1: 1, 1: 0}
    stored = slice(rows.start + unit.border, rows.stop + unit.border)

    for column in sorted(columns):
        copy_RL = x_RL
        if column != 0:
            mask_RL = inside[mask_indices[column], rows]
            copy_RL = x_RL * mask_RL
        ref[plane, column + 1, stored] = copy_RL


def clear_border(ref: Ref, unit: UnitSizes) -> None:
    """Store zeros above and below a map."""
    planes, columns = ref.shape[:2]
    shape = (planes, columns, unit.border, unit.lanes)
    zeros = jnp.zeros(shape, ref.dtype)

    first_below = unit.border + unit.out_rows
    ref[:, :, : unit.border] = zeros
    ref[:, :, first_below:] = zeros


def load_shifted(
    ref: Ref,
    rows: slice,
    offset: WindowOffset,
    unit: UnitSizes,
) -> Array:
    """Return the values at a window offset from these rows of the output, (R, L)."""
    distance = offset.line * unit.out_width + offset.column
    shift = unit.border + distance
    loaded = slice(rows.start + shift, rows.stop + shift)
    return ref[offset.plane, offset.column + 1, loaded]


def load_tile(
    ref: Ref,
    rows: slice,
    offsets: Sequence[WindowOffset],
    unit: UnitSizes,
) -> Array:
    """Return the channels at one window offset, or at two beside each other, (R, L)."""
    maps = [load_shifted(ref, rows, offset, unit) for offset in offsets]
    if len(maps) == 1:
        return maps[0].astype(unit.dtype)

    left_RL, right_RL = maps
    both_RL = join_halves(left_RL, right_RL, unit)
    return both_RL.astype(unit.dtype)


def convolve_window(
    ref: Ref,
    rows: slice,
    kernel: Array,
    offsets: Sequence[WindowOffset],
    unit: UnitSizes,
) -> Array:
    """Return the sum of the products at these window offsets, (R, L).

    `kernel` has the rows of all offsets, (T, L).
    """
    total_RL = None
    for tile in unit.group_by_tile(offsets):
        start = tile[0].number * unit.inner
        kernel_rows = slice(start, start + unit.lanes)

        x_RL = load_tile(ref, rows, tile, unit)
        product_RL = multiply_on_chip(x_RL, kernel[kernel_rows])
        if total_RL is None:
            total_RL = product_RL
        else:
            total_RL = total_RL + product_RL
    assert total_RL is not None, "a window has at least one offset"
    return total_RL


def join_halves(
    left_RL: Array,
    right_RL: Array,
    unit: UnitSizes,
) -> Array:
    """Return the lower lanes of one map beside the upper lanes of another."""
    lane = jax.lax.broadcasted_iota(jnp.int32, left_RL.shape, 1)
    is_left = lane < unit.inner
    return jnp.where(is_left, left_RL, right_RL)


def join_offsets(offsets_of_planes: Sequence[Sequence[WindowOffset]]) -> list[WindowOffset]:
    """Return the window offsets of all planes."""
    return list(itertools.chain(*offsets_of_planes))


# Maps that the gradient reads.


def keep_inner_maps(refs: SimpleNamespace, unit: UnitSizes) -> None:
    """Store the outputs of two convolutions, beside each other if both fit in one tile."""
    if unit.copies > 1:
        for rows in unit.slices:
            both = join_halves(refs.y1[rows], refs.y2[rows], unit)
            refs.kept[rows] = both.astype(refs.kept.dtype)
        return

    for rows in unit.slices:
        y1 = refs.y1[rows]
        refs.kept1[rows] = y1.astype(refs.kept1.dtype)
    for rows in unit.out_slices:
        y2 = refs.y2[rows]
        refs.kept2[rows] = y2.astype(refs.kept2.dtype)


def load_kept1(
    refs: SimpleNamespace,
    rows: slice,
    unit: UnitSizes,
) -> Array:
    """Return the output of the first convolution, in all lanes."""
    if unit.copies == 1:
        return load_float32(refs.kept1, rows)

    both_RL = load_float32(refs.kept, rows)
    moved_RL = pltpu.roll(both_RL, unit.inner, 1)
    return join_halves(both_RL, moved_RL, unit)


def load_kept2(
    refs: SimpleNamespace,
    rows: slice,
    unit: UnitSizes,
) -> Array:
    """Return the output of the second convolution, in all lanes."""
    if unit.copies == 1:
        return load_float32(refs.kept2, rows)

    both_RL = load_float32(refs.kept, rows)
    moved_RL = pltpu.roll(both_RL, unit.inner, 1)
    return join_halves(moved_RL, both_RL, unit)


# The input of a strided shortcut.


def gather_strided(
    refs: SimpleNamespace,
    read_input: Callable[[slice], Array],
    unit: UnitSizes,
) -> None:
    """Store the values that a strided shortcut reads: even columns of even lines.

    `read_input` returns rows of the complete map.
    """
    for rows in unit.slices:
        x = read_input(rows)
        refs.wide[rows] = x.astype(jnp.float32)
    for piece in unit.find_pieces(plane=0):
        refs.narrow[piece.rows] = refs.wide[piece.in_map]


def read_shortcut_input(
    refs: SimpleNamespace,
    read_input: Callable[[slice], Array],
    rows: slice,
    unit: UnitSizes,
) -> Array:
    """Return these rows of the shortcut's input, (R, I)."""
    if not unit.is_strided:
        return read_input(rows)
    shortcut_input = refs.narrow[rows]
    return shortcut_input.astype(unit.dtype)
