"""Maps in the kernel for residual units: shifted copies, products of taps, kept maps.

Legend: R positions of a map, line after line, L lanes, T rows of the tiles of a 3x3 kernel.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from vit_jax.kernels.unit_sizes import Sizes, Tap

PLAIN = (((1,), (0,)), ((), ()))  # a @ b
TRANSPOSED = (((0,), (0,)), ((), ()))  # a.T @ b


def multiply_on_chip(a: jax.Array, b: jax.Array, dimensions: tuple = PLAIN) -> jax.Array:
    """Return a product in float32."""
    return jax.lax.dot_general(a, b, dimensions, preferred_element_type=jnp.float32)


def normalise_and_relu(x: Any, a: Any, b: Any) -> Any:
    """Return max(a x + b, 0) in float32."""
    return jnp.maximum(a * x.astype(jnp.float32) + b, 0.0)


# The 3x3 convolution.


def store_shifted(
    ref: Any, plane: int, rows: slice, x_RL: Any, inside: Any, taps: Sequence[Tap], u: Sizes
) -> None:
    """Store rows of a plane once for each column of its taps, with zeros where a line ends."""
    columns = {tap.column for tap in taps if tap.plane == plane}
    inside_rows = {-1: 1, 1: 0}
    stored = slice(rows.start + u.border, rows.stop + u.border)
    for column in sorted(columns):
        copy_RL = x_RL
        if column != 0:
            copy_RL = x_RL * inside[inside_rows[column], rows]
        ref[plane, column + 1, stored] = copy_RL


def clear_border(ref: Any, u: Sizes) -> None:
    """Store zeros above and below a map."""
    zeros = jnp.zeros((*ref.shape[:2], u.border, u.lanes), ref.dtype)
    ref[:, :, : u.border] = zeros
    ref[:, :, u.out_rows + u.border :] = zeros


def load_shifted(ref: Any, rows: slice, tap: Tap, u: Sizes) -> Any:
    """Return the values that a tap reads for these rows of the output."""
    offset = u.border + tap.line * u.out_width + tap.column
    loaded = slice(rows.start + offset, rows.stop + offset)
    return ref[tap.plane, tap.column + 1, loaded]


def load_tile(ref: Any, rows: slice, taps: Sequence[Tap], u: Sizes) -> Any:
    """Return the channels of one tap, or of two beside each other."""
    maps = [load_shifted(ref, rows, tap, u) for tap in taps]
    if len(maps) == 1:
        return maps[0].astype(u.dtype)
    left, right = maps
    return join_halves(left, right, u).astype(u.dtype)


def convolve_taps(ref: Any, rows: slice, kernel: Any, taps: Sequence[Tap], u: Sizes) -> Any:
    """Return the sum of these taps; `kernel` has the rows of all taps, (T, L)."""
    total = None
    for tile in u.tiles(taps):
        start = tile[0].place * u.inner
        x = load_tile(ref, rows, tile, u)
        product = multiply_on_chip(x, kernel[start : start + u.lanes])
        total = product if total is None else total + product
    return total


def join_halves(left_RL: Any, right_RL: Any, u: Sizes) -> Any:
    """Return the lower lanes of one map beside the upper lanes of another."""
    lane = jax.lax.broadcasted_iota(jnp.int32, left_RL.shape, 1)
    return jnp.where(lane < u.inner, left_RL, right_RL)


# Maps that the gradient reads.


def keep_inner_maps(refs: Any, u: Sizes) -> None:
    """Store the outputs of two convolutions, beside each other if both fit in one tile."""
    if u.copies > 1:
        for rows in u.slices:
            both = join_halves(refs.y1[rows], refs.y2[rows], u)
            refs.kept[rows] = both.astype(refs.kept.dtype)
        return
    for rows in u.slices:
        refs.kept1[rows] = refs.y1[rows].astype(refs.kept1.dtype)
    for rows in u.out_slices:
        refs.kept2[rows] = refs.y2[rows].astype(refs.kept2.dtype)


def load_kept1(refs: Any, rows: slice, u: Sizes) -> Any:
    """Return the output of the first convolution, in all lanes."""
    if u.copies == 1:
        return refs.kept1[rows].astype(jnp.float32)
    both = refs.kept[rows].astype(jnp.float32)
    return join_halves(both, pltpu.roll(both, u.inner, 1), u)


def load_kept2(refs: Any, rows: slice, u: Sizes) -> Any:
    """Return the output of the second convolution, in all lanes."""
    if u.copies == 1:
        return refs.kept2[rows].astype(jnp.float32)
    both = refs.kept[rows].astype(jnp.float32)
    return join_halves(pltpu.roll(both, u.inner, 1), both, u)


# The input of a strided shortcut.


def gather_strided(refs: Any, read_input: Callable[[slice], Any], u: Sizes) -> None:
    """Store the values that a strided shortcut reads: even columns of even lines.

    `read_input` returns rows of the complete map.
    """
    for rows in u.slices:
        refs.wide[rows] = read_input(rows).astype(jnp.float32)
    for piece in u.pieces_of(plane=0):
        refs.narrow[piece.rows] = refs.wide[piece.in_map]


def read_shortcut_input(
    refs: Any, read_input: Callable[[slice], Any], rows: slice, u: Sizes
) -> Any:
    """Return these rows of the shortcut's input."""
    if u.is_strided:
        return refs.narrow[rows].astype(u.dtype)
    return read_input(rows)


def join_taps(taps_of_planes: Sequence[Sequence[Tap]]) -> list[Tap]:
    """Return the taps of all planes."""
    return list(itertools.chain(*taps_of_planes))
