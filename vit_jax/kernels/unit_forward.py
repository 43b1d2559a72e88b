"""The forward program of the kernel for residual units: one image.

`refs` has a reference by name for each array of `unit_pallas`; y1, y2 and y3 are the outputs of the
three convolutions. A norm is a x + b.
"""

from collections.abc import Callable
from types import SimpleNamespace

import jax.numpy as jnp
from jax import Array

from vit_jax.kernels.unit_maps import (
    clear_border,
    convolve_window,
    gather_strided,
    keep_inner_maps,
    load_float32,
    multiply_on_chip,
    normalise_and_relu,
    read_shortcut_input,
    store_shifted,
)
from vit_jax.kernels.unit_norms import Sums
from vit_jax.kernels.unit_sizes import INNER_1, INNER_2, OUTER, SHORTCUT, UnitSizes

ReadRows = Callable[[slice], Array]
Affine = tuple[Array, Array]  # a and b of a norm


def run_forward(refs: SimpleNamespace, unit: UnitSizes) -> None:
    """Compute the output of one image, and the maps and statistics that the gradient needs."""
    read_input = _make_read_input(refs, unit)
    norm1 = _run_first_convolution(refs, read_input, unit)
    norm2 = _run_second_convolution(refs, norm1, unit)
    if unit.is_strided:
        gather_strided(refs, read_input, unit)
    keep_inner_maps(refs, unit)
    _run_third_convolution(refs, read_input, norm2, unit)


def _make_read_input(refs: SimpleNamespace, unit: UnitSizes) -> ReadRows:
    """Return a function that reads rows of the input of the first convolution.

    A pre-activated unit norms its map first.
    """
    if not unit.is_preactivated:
        return lambda rows: refs.x[rows]

    sums = Sums()
    for rows in unit.slices:
        x = load_float32(refs.x, rows)
        sums.add_squares(x)
    a, b = sums.normalise(refs, OUTER, unit)

    def read_normed(rows: slice) -> Array:
        normed = normalise_and_relu(refs.x[rows], a, b)
        return normed.astype(unit.dtype)

    return read_normed


def _run_first_convolution(
    refs: SimpleNamespace,
    read_input: ReadRows,
    unit: UnitSizes,
) -> Affine:
    """Store y1; return a and b of its norm."""
    sums = Sums()
    for rows in unit.slices:
        x = read_input(rows)
        y1 = multiply_on_chip(x, refs.inward[...])
        refs.y1[rows] = y1
        sums.add_squares(y1)
    return sums.normalise(refs, INNER_1, unit)


def _run_second_convolution(
    refs: SimpleNamespace,
    norm1: Affine,
    unit: UnitSizes,
) -> Affine:
    """Store y2, by shifted copies of max(norm(y1), 0); return a and b of its norm."""
    clear_border(refs.z, unit)
    for piece in unit.pieces:
        y1 = refs.y1[piece.in_map]
        z = normalise_and_relu(y1, *norm1)
        store_shifted(
            refs.z,
            piece.plane,
            piece.rows,
            z,
            refs.inside,
            unit.offsets,
            unit,
        )

    sums = Sums()
    for rows in unit.out_slices:
        y2 = convolve_window(refs.z, rows, refs.middle, unit.offsets, unit)
        refs.y2[rows] = y2
        sums.add_squares(y2)
    return sums.normalise(refs, INNER_2, unit)


def _run_third_convolution(
    refs: SimpleNamespace,
    read_input: ReadRows,
    norm2: Affine,
    unit: UnitSizes,
) -> None:
    """Add the shortcut: at once in a pre-activated unit, otherwise after the norms of both."""
    sums = Sums()
    shortcut_sums = Sums()
    for rows in unit.out_slices:
        h2 = normalise_and_relu(refs.y2[rows], *norm2)
        h2 = h2.astype(unit.dtype)
        y3 = multiply_on_chip(h2, refs.outward[...])

        if unit.has_shortcut:
            shortcut_input = read_shortcut_input(refs, read_input, rows, unit)
            residual = multiply_on_chip(shortcut_input, refs.shortcut[...])
        else:
            residual = load_float32(refs.x, rows)

        if unit.is_preactivated:
            out = residual + y3
            refs.out[rows] = out.astype(refs.out.dtype)
        else:
            refs.y3[rows] = y3.astype(unit.dtype)
            sums.add_squares(y3)
            shortcut_sums.add_squares(residual)

    if not unit.is_preactivated:
        _end_postactivated(refs, read_input, sums, shortcut_sums, unit)


def _end_postactivated(
    refs: SimpleNamespace,
    read_input: ReadRows,
    sums: Sums,
    shortcut_sums: Sums,
    unit: UnitSizes,
) -> None:
    """Compute max(norm(shortcut) + norm(y3), 0)."""
    a, b = sums.normalise(refs, OUTER, unit)
    if unit.has_shortcut:
        shortcut_a, shortcut_b = shortcut_sums.normalise(refs, SHORTCUT, unit)

    for rows in unit.out_slices:
        residual = read_shortcut_input(refs, read_input, rows, unit)
        if unit.has_shortcut:
            product = multiply_on_chip(residual, refs.shortcut[...])
            residual = shortcut_a * product + shortcut_b
        residual = residual.astype(jnp.float32)

        scaled_y3 = a * load_float32(refs.y3, rows)
        total = residual + scaled_y3 + b
        out = jnp.maximum(total, 0.0)
        refs.out[rows] = out.astype(refs.out.dtype)
