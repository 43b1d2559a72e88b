"""The backward program of the kernel for residual units: one image.

`refs` has a reference by name for each array of `unit_pallas`; gradients of parameters begin with
"of_". y1, y2 and y3 are the outputs of the three convolutions, dy1, dy2 and dy3 their gradients. A
norm is a y + b; with the gradient g of its output, the gradient of y is a g + c y + d.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl

from vit_jax.kernels.unit_maps import (
    TRANSPOSED,
    clear_border,
    convolve_taps,
    gather_strided,
    join_taps,
    load_float32,
    load_kept1,
    load_kept2,
    load_shifted,
    load_tile,
    multiply_on_chip,
    normalise_and_relu,
    read_shortcut_input,
    store_shifted,
)
from vit_jax.kernels.unit_norms import Norm, Sums
from vit_jax.kernels.unit_sizes import CENTRE, INNER_1, INNER_2, OUTER, SHORTCUT, Sizes

ReadRows = Callable[[slice], Any]
Factors = tuple[Any, Any, Any]  # a, c and d


def run_backward(refs: Any, u: Sizes) -> None:
    """Compute the gradient of the input of one image, and add to the gradients of parameters."""

    @pl.when(pl.program_id(1) == 0)
    def clear_sums() -> None:
        for name, ref in vars(refs).items():
            if name.startswith("of_"):
                ref[...] = jnp.zeros(ref.shape, ref.dtype)

    clear_border(refs.z, u)
    clear_border(refs.dy2, u)

    if u.is_preactivated:
        factors = _differentiate_inner(refs, u, lambda rows: refs.dout[rows])
        _end_preactivated(refs, u, factors)
    else:
        read_dy3, read_dshortcut = _begin_postactivated(refs, u)
        factors = _differentiate_inner(refs, u, read_dy3)
        _end_postactivated(refs, u, factors, read_dshortcut)


# From the third convolution to the first.


def _differentiate_inner(refs: Any, u: Sizes, read_dy3: ReadRows) -> Factors:
    """Go from the gradient of y3 to the factors of dy1; their g is stored in `refs.g`."""
    norm1 = Norm(refs, INNER_1, u)
    norm2 = Norm(refs, INNER_2, u)

    sums = _differentiate_third_convolution(refs, u, norm2, read_dy3)
    _store_second_convolution_input(refs, u, norm1)
    _store_dy2(refs, u, norm2, sums)
    _differentiate_second_kernel(refs, u)
    return _differentiate_second_convolution(refs, u, norm1)


def _differentiate_third_convolution(
    refs: Any,
    u: Sizes,
    norm2: Norm,
    read_dy3: ReadRows,
) -> Sums:
    """Store the gradient of the second norm's output; return its sums.

    Add to the gradient of the third kernel, (C, E).
    """
    sums = Sums()
    kernel_sums = Sums()
    for rows in u.out_slices:
        dy3 = read_dy3(rows)
        y2 = load_kept2(refs, rows, u)

        z2 = norm2.a * y2 + norm2.b
        h2 = jnp.maximum(z2, 0.0)
        h2 = h2.astype(u.dtype)
        dkernel = multiply_on_chip(h2[:, : u.inner], dy3, TRANSPOSED)
        kernel_sums.add(dkernel)

        is_positive = z2 > 0
        dh2 = multiply_on_chip(dy3, refs.inward[...])
        g = jnp.where(is_positive, dh2, 0.0)
        refs.g[rows] = g
        sums.add_rows(g, g * y2)

    refs.of_conv3[...] += kernel_sums.totals[0]
    return sums


def _store_second_convolution_input(refs: Any, u: Sizes, norm1: Norm) -> None:
    """Store the shifted copies of max(norm(y1), 0), computed again from y1."""
    if u.is_strided:
        for rows in u.slices:
            refs.y1[rows] = load_kept1(refs, rows, u)

    for piece in u.pieces:
        if u.is_strided:
            y1 = refs.y1[piece.in_map]
        else:
            y1 = load_kept1(refs, piece.in_map, u)
        z = normalise_and_relu(y1, norm1.a, norm1.b)
        store_shifted(refs.z, piece.plane, piece.rows, z, refs.inside, u.taps, u)


def _store_dy2(refs: Any, u: Sizes, norm2: Norm, sums: Sums) -> None:
    """Store shifted copies of the gradient of y2."""
    a, c, d = norm2.differentiate(*sums.totals)
    taps = join_taps(u.turned_taps)

    for rows in u.out_slices:
        from_g = a * refs.g[rows]
        from_y = c * load_kept2(refs, rows, u)
        dy2 = from_g + from_y + d
        store_shifted(refs.dy2, 0, rows, dy2, refs.inside, taps, u)


def _differentiate_second_kernel(refs: Any, u: Sizes) -> None:
    """Add to the gradient of the second kernel, (C, T): one product for each tile of taps."""
    kernel_sums = Sums()
    for rows in u.out_slices:
        dy2 = load_shifted(refs.dy2, rows, CENTRE, u)
        dy2 = dy2.astype(u.dtype)
        dy2 = dy2[:, : u.inner]

        products = []
        for taps in u.tiles(u.taps):
            tile = load_tile(refs.z, rows, taps, u)
            product = multiply_on_chip(dy2, tile, TRANSPOSED)
            products.append(product)
        kernel_sums.add(*products)

    for index, total in enumerate(kernel_sums.totals):
        start = index * u.lanes
        columns = slice(start, start + u.lanes)
        refs.of_conv2[:, columns] += total


def _differentiate_second_convolution(refs: Any, u: Sizes, norm1: Norm) -> Factors:
    """Store the gradient of the first norm's output; return the factors of dy1."""
    if u.is_strided:
        _join_planes(refs, u)

    sums = Sums()
    for rows in u.slices:
        y1 = load_kept1(refs, rows, u)
        if u.is_strided:
            dh1 = refs.g[rows]
        else:
            dh1 = convolve_taps(refs.dy2, rows, refs.middle, u.turned_taps[0], u)

        z1 = norm1.a * y1 + norm1.b
        g = jnp.where(z1 > 0, dh1, 0.0)
        refs.g[rows] = g
        sums.add_rows(g, g * y1)
    return norm1.differentiate(*sums.totals)


def _join_planes(refs: Any, u: Sizes) -> None:
    """Store the gradient of the planes of a strided convolution's input in the complete map."""
    for plane, taps in enumerate(u.turned_taps):
        for rows in u.out_slices:
            refs.plane[rows] = convolve_taps(refs.dy2, rows, refs.middle, taps, u)
        for piece in u.pieces_of(plane):
            refs.g[piece.in_map] = refs.plane[piece.rows]


# The input of a pre-activated unit.


def _end_preactivated(refs: Any, u: Sizes, dy1_factors: Factors) -> None:
    """Go through the first convolution, the shortcut, and the norm before both."""
    norm = Norm(refs, OUTER, u)

    def read_normed(rows: slice) -> Any:
        return normalise_and_relu(refs.x[rows], norm.a, norm.b)

    if u.is_strided:
        gather_strided(refs, read_normed, u)
        _differentiate_strided_shortcut(refs, lambda rows: refs.dout[rows], u)

    sums = _differentiate_preactivated_input(refs, u, norm, dy1_factors)
    factors = norm.differentiate(*sums.totals)
    _store_preactivated_dx(refs, u, factors)


def _differentiate_preactivated_input(
    refs: Any,
    u: Sizes,
    norm: Norm,
    dy1_factors: Factors,
) -> Sums:
    """Store the gradient of the outer norm's output; return its sums.

    Add to the gradients of the first kernel, (C, I), and of the shortcut, (I, E).
    """
    a, c, d = dy1_factors
    sums = Sums()
    kernel_sums = Sums()
    shortcut_sums = Sums()
    for rows in u.slices:
        y1 = load_kept1(refs, rows, u)
        dy1 = a * refs.g[rows] + c * y1 + d
        dy1 = dy1.astype(u.dtype)

        x = load_float32(refs.x, rows)
        z = norm.a * x + norm.b
        dh = multiply_on_chip(dy1, refs.outward[...])
        h = jnp.maximum(z, 0.0)
        h = h.astype(u.dtype)
        dkernel = multiply_on_chip(dy1[:, : u.inner], h, TRANSPOSED)
        kernel_sums.add(dkernel)

        if u.is_strided:
            dh = dh + refs.wide[rows]
        elif u.has_shortcut:
            dshortcut = multiply_on_chip(h, refs.dout[rows], TRANSPOSED)
            shortcut_sums.add(dshortcut)
            dh = dh + multiply_on_chip(refs.dout[rows], refs.shortcut[...])

        g = jnp.where(z > 0, dh, 0.0)
        refs.outer_g[rows] = g.astype(u.dtype)
        sums.add_rows(g, g * x)

    _add_kernel_gradients(refs, kernel_sums, shortcut_sums)
    return sums


def _store_preactivated_dx(refs: Any, u: Sizes, factors: Factors) -> None:
    """Store the gradient of the input; without a convolution in the shortcut, dout is added."""
    a, c, d = factors
    for rows in u.slices:
        from_g = a * load_float32(refs.outer_g, rows)
        from_x = c * load_float32(refs.x, rows)
        dx = from_g + from_x + d
        if not u.has_shortcut:
            dx = dx + load_float32(refs.dout, rows)
        refs.dx[rows] = dx.astype(refs.dx.dtype)


# The output and the input of a post-activated unit.


def _begin_postactivated(refs: Any, u: Sizes) -> tuple[ReadRows, ReadRows]:
    """Go through the last ReLU and its norms.

    Return functions of rows: the gradients of y3 and of the shortcut's convolution.
    """
    norm2 = Norm(refs, INNER_2, u)
    norm = Norm(refs, OUTER, u)
    shortcut_norm = Norm(refs, SHORTCUT, u) if u.has_shortcut else None
    if u.is_strided:
        gather_strided(refs, lambda rows: refs.x[rows], u)

    sums, shortcut_sums = _differentiate_output(refs, u, norm2, norm, shortcut_norm)
    a, c, d = norm.differentiate(*sums.totals)

    def read_dy3(rows: slice) -> Any:
        from_g = a * load_float32(refs.outer_g, rows)
        from_y = c * load_float32(refs.y3, rows)
        dy3 = from_g + from_y + d
        return dy3.astype(u.dtype)

    if shortcut_norm is None:
        return read_dy3, lambda rows: refs.outer_g[rows]
    shortcut_a, shortcut_c, shortcut_d = shortcut_norm.differentiate(*shortcut_sums.totals)

    def read_dshortcut(rows: slice) -> Any:
        g = load_float32(refs.outer_g, rows)
        y = _convolve_shortcut(refs, rows, u)
        dshortcut = shortcut_a * g + shortcut_c * y + shortcut_d
        return dshortcut.astype(u.dtype)

    return read_dy3, read_dshortcut


def _differentiate_output(
    refs: Any,
    u: Sizes,
    norm2: Norm,
    norm: Norm,
    shortcut_norm: Norm | None,
) -> tuple[Sums, Sums]:
    """Store y3 and the gradient of the last ReLU's input.

    Return the sums for the outer norm and for the shortcut's norm.
    """
    sums = Sums()
    shortcut_sums = Sums()
    for rows in u.out_slices:
        y2 = load_kept2(refs, rows, u)
        h2 = normalise_and_relu(y2, norm2.a, norm2.b)
        h2 = h2.astype(u.dtype)
        y3 = multiply_on_chip(h2, refs.outward_again[...])
        refs.y3[rows] = y3.astype(u.dtype)

        if shortcut_norm is None:
            residual = load_float32(refs.x, rows)
        else:
            y = _convolve_shortcut(refs, rows, u)
            residual = shortcut_norm.a * y + shortcut_norm.b

        total = residual + norm.a * y3 + norm.b
        is_positive = total > 0
        g = jnp.where(is_positive, load_float32(refs.dout, rows), 0.0)
        refs.outer_g[rows] = g.astype(u.dtype)
        sums.add_rows(g, g * y3)
        if shortcut_norm is not None:
            shortcut_sums.add_rows(g, g * y)
    return sums, shortcut_sums


def _convolve_shortcut(refs: Any, rows: slice, u: Sizes) -> Any:
    """Return the output of the shortcut's convolution, in float32 and without its norm."""
    shortcut_input = read_shortcut_input(refs, lambda rows: refs.x[rows], rows, u)
    return multiply_on_chip(shortcut_input, refs.shortcut_again[...])


def _end_postactivated(
    refs: Any,
    u: Sizes,
    dy1_factors: Factors,
    read_dshortcut: ReadRows,
) -> None:
    """Go through the first convolution and the shortcut."""
    if u.is_strided:
        _differentiate_strided_shortcut(refs, read_dshortcut, u)

    a, c, d = dy1_factors
    kernel_sums = Sums()
    shortcut_sums = Sums()
    for rows in u.slices:
        from_g = a * refs.g[rows]
        from_y = c * load_kept1(refs, rows, u)
        dy1 = from_g + from_y + d
        dy1 = dy1.astype(u.dtype)
        dkernel = multiply_on_chip(dy1[:, : u.inner], refs.x[rows], TRANSPOSED)
        kernel_sums.add(dkernel)

        if u.is_strided:
            residual = refs.wide[rows]
        else:
            residual = read_dshortcut(rows)
        if u.has_shortcut and not u.is_strided:
            dshortcut = multiply_on_chip(refs.x[rows], residual, TRANSPOSED)
            shortcut_sums.add(dshortcut)
            residual = multiply_on_chip(residual, refs.shortcut[...])

        dx = multiply_on_chip(dy1, refs.outward[...])
        dx = dx + residual.astype(jnp.float32)
        refs.dx[rows] = dx.astype(refs.dx.dtype)

    _add_kernel_gradients(refs, kernel_sums, shortcut_sums)


# Both forms of a unit.


def _add_kernel_gradients(refs: Any, kernel_sums: Sums, shortcut_sums: Sums) -> None:
    """Add to the gradient of the first kernel, and to the shortcut's if it was summed."""
    refs.of_conv1[...] += kernel_sums.totals[0]
    if shortcut_sums.totals:
        refs.of_shortcut[...] += shortcut_sums.totals[0]


def _differentiate_strided_shortcut(refs: Any, read_dshortcut: ReadRows, u: Sizes) -> None:
    """Store the gradient of a strided shortcut's input in the complete map."""
    shortcut_sums = Sums()
    for rows in u.out_slices:
        dy = read_dshortcut(rows)
        shortcut_input = refs.narrow[rows]
        shortcut_input = shortcut_input.astype(u.dtype)
        dkernel = multiply_on_chip(shortcut_input, dy, TRANSPOSED)
        shortcut_sums.add(dkernel)
        refs.narrow[rows] = multiply_on_chip(dy, refs.shortcut[...])
    refs.of_shortcut[...] += shortcut_sums.totals[0]

    for rows in u.slices:
        num_rows = rows.stop - rows.start
        refs.wide[rows] = jnp.zeros((num_rows, u.inputs), jnp.float32)
    for piece in u.pieces_of(plane=0):
        refs.wide[piece.in_map] = refs.narrow[piece.rows]
