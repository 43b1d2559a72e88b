"""The backward program of the kernel for residual units: one image.

`refs` has a reference by name for each array of `unit_pallas`; gradients of parameters begin with
"grad_". y1, y2 and y3 are the outputs of the three convolutions, dy1, dy2 and dy3 their gradients.
A norm is a y + b; with the gradient g of its output, the gradient of y is a g + c y + d.
"""

from collections.abc import Callable
from types import SimpleNamespace

import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl

from vit_jax.kernels.unit_maps import (
    TRANSPOSED,
    clear_border,
    convolve_window,
    gather_strided,
    join_offsets,
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
from vit_jax.kernels.unit_sizes import (
    CENTRE,
    INNER_1,
    INNER_2,
    OUTER,
    SHORTCUT,
    UnitSizes,
)

ReadRows = Callable[[slice], Array]
Factors = tuple[Array, Array, Array]  # a, c and d


def run_backward(refs: SimpleNamespace, unit: UnitSizes) -> None:
    """Compute the gradient of the input of one image, and add to the gradients of parameters."""

    @pl.when(pl.program_id(1) == 0)
    def clear_sums() -> None:
        for name, ref in vars(refs).items():
            if name.startswith("grad_"):
                ref[...] = jnp.zeros(ref.shape, ref.dtype)

    clear_border(refs.z, unit)
    clear_border(refs.dy2, unit)

    if unit.is_preactivated:
        factors = _differentiate_inner(refs, unit, lambda rows: refs.dout[rows])
        _end_preactivated(refs, unit, factors)
    else:
        read_dy3, read_dshortcut = _begin_postactivated(refs, unit)
        factors = _differentiate_inner(refs, unit, read_dy3)
        _end_postactivated(refs, unit, factors, read_dshortcut)


# From the third convolution to the first.


def _differentiate_inner(
    refs: SimpleNamespace,
    unit: UnitSizes,
    read_dy3: ReadRows,
) -> Factors:
    """Go from the gradient of y3 to the factors of dy1; their g is stored in `refs.g`."""
    norm1 = Norm(refs, INNER_1, unit)
    norm2 = Norm(refs, INNER_2, unit)

    sums = _differentiate_third_convolution(refs, unit, norm2, read_dy3)
    _store_second_convolution_input(refs, unit, norm1)
    _store_dy2(refs, unit, norm2, sums)
    _differentiate_second_kernel(refs, unit)
    return _differentiate_second_convolution(refs, unit, norm1)


def _differentiate_third_convolution(
    refs: SimpleNamespace,
    unit: UnitSizes,
    norm2: Norm,
    read_dy3: ReadRows,
) -> Sums:
    """Store the gradient of the second norm's output; return its sums.

    Add to the gradient of the third kernel, (C, E).
    """
    sums = Sums()
    kernel_sums = Sums()
    for rows in unit.out_slices:
        dy3 = read_dy3(rows)
        y2 = load_kept2(refs, rows, unit)

        z2 = norm2.a * y2 + norm2.b
        h2 = jnp.maximum(z2, 0.0)
        h2 = h2.astype(unit.dtype)
        h2 = h2[:, : unit.inner]
        dkernel = multiply_on_chip(h2, dy3, TRANSPOSED)
        kernel_sums.add(dkernel)

        is_positive = z2 > 0
        dh2 = multiply_on_chip(dy3, refs.inward[...])
        g = jnp.where(is_positive, dh2, 0.0)
        refs.g[rows] = g
        sums.add_rows(g, g * y2)

    refs.grad_conv3[...] += kernel_sums.totals[0]
    return sums


def _store_second_convolution_input(
    refs: SimpleNamespace,
    unit: UnitSizes,
    norm1: Norm,
) -> None:
    """Store the shifted copies of max(norm(y1), 0), computed again from y1."""
    if unit.is_strided:
        for rows in unit.slices:
            refs.y1[rows] = load_kept1(refs, rows, unit)

    for piece in unit.pieces:
        if unit.is_strided:
            y1 = refs.y1[piece.in_map]
        else:
            y1 = load_kept1(refs, piece.in_map, unit)
        z = normalise_and_relu(y1, norm1.a, norm1.b)
        store_shifted(
            refs.z,
            piece.plane,
            piece.rows,
            z,
            refs.inside,
            unit.offsets,
            unit,
        )


def _store_dy2(
    refs: SimpleNamespace,
    unit: UnitSizes,
    norm2: Norm,
    sums: Sums,
) -> None:
    """Store shifted copies of the gradient of y2."""
    a, c, d = norm2.differentiate(*sums.totals)
    offsets = join_offsets(unit.turned_offsets)

    for rows in unit.out_slices:
        from_g = a * refs.g[rows]
        from_y = c * load_kept2(refs, rows, unit)
        dy2 = from_g + from_y + d
        store_shifted(
            refs.dy2,
            0,
            rows,
            dy2,
            refs.inside,
            offsets,
            unit,
        )


def _differentiate_second_kernel(refs: SimpleNamespace, unit: UnitSizes) -> None:
    """Add to the gradient of the second kernel, (C, T): one product for each tile."""
    kernel_sums = Sums()
    for rows in unit.out_slices:
        dy2 = load_shifted(refs.dy2, rows, CENTRE, unit)
        dy2 = dy2.astype(unit.dtype)
        dy2 = dy2[:, : unit.inner]

        products = []
        for offsets in unit.group_by_tile(unit.offsets):
            tile = load_tile(refs.z, rows, offsets, unit)
            product = multiply_on_chip(dy2, tile, TRANSPOSED)
            products.append(product)
        kernel_sums.add(*products)

    for index, total in enumerate(kernel_sums.totals):
        start = index * unit.lanes
        columns = slice(start, start + unit.lanes)
        refs.grad_conv2[:, columns] += total


def _differentiate_second_convolution(
    refs: SimpleNamespace,
    unit: UnitSizes,
    norm1: Norm,
) -> Factors:
    """Store the gradient of the first norm's output; return the factors of dy1."""
    if unit.is_strided:
        _join_planes(refs, unit)

    sums = Sums()
    for rows in unit.slices:
        y1 = load_kept1(refs, rows, unit)
        if unit.is_strided:
            dh1 = refs.g[rows]
        else:
            offsets = unit.turned_offsets[0]
            dh1 = convolve_window(refs.dy2, rows, refs.middle, offsets, unit)

        z1 = norm1.a * y1 + norm1.b
        g = jnp.where(z1 > 0, dh1, 0.0)
        refs.g[rows] = g
        sums.add_rows(g, g * y1)
    return norm1.differentiate(*sums.totals)


def _join_planes(refs: SimpleNamespace, unit: UnitSizes) -> None:
    """Store the gradient of the planes of a strided convolution's input in the complete map."""
    for plane, offsets in enumerate(unit.turned_offsets):
        for rows in unit.out_slices:
            refs.plane[rows] = convolve_window(
                refs.dy2,
                rows,
                refs.middle,
                offsets,
                unit,
            )
        for piece in unit.find_pieces(plane):
            refs.g[piece.in_map] = refs.plane[piece.rows]


# The input of a pre-activated unit.


def _end_preactivated(
    refs: SimpleNamespace,
    unit: UnitSizes,
    dy1_factors: Factors,
) -> None:
    """Go through the first convolution, the shortcut, and the norm before both."""
    norm = Norm(refs, OUTER, unit)

    def read_normed(rows: slice) -> Array:
        return normalise_and_relu(refs.x[rows], norm.a, norm.b)

    if unit.is_strided:
        gather_strided(refs, read_normed, unit)
        _differentiate_strided_shortcut(refs, lambda rows: refs.dout[rows], unit)

    sums = _differentiate_preactivated_input(refs, unit, norm, dy1_factors)
    factors = norm.differentiate(*sums.totals)
    _store_preactivated_dx(refs, unit, factors)


def _differentiate_preactivated_input(
    refs: SimpleNamespace,
    unit: UnitSizes,
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
    for rows in unit.slices:
        y1 = load_kept1(refs, rows, unit)
        dy1 = a * refs.g[rows] + c * y1 + d
        dy1 = dy1.astype(unit.dtype)

        x = load_float32(refs.x, rows)
        z = norm.a * x + norm.b
        dh = multiply_on_chip(dy1, refs.outward[...])
        h = jnp.maximum(z, 0.0)
        h = h.astype(unit.dtype)
        inner_dy1 = dy1[:, : unit.inner]
        dkernel = multiply_on_chip(inner_dy1, h, TRANSPOSED)
        kernel_sums.add(dkernel)

        if unit.is_strided:
            dh = dh + refs.wide[rows]
        elif unit.has_shortcut:
            dshortcut = multiply_on_chip(h, refs.dout[rows], TRANSPOSED)
            shortcut_sums.add(dshortcut)
            from_shortcut = multiply_on_chip(refs.dout[rows], refs.shortcut[...])
            dh = dh + from_shortcut

        g = jnp.where(z > 0, dh, 0.0)
        refs.outer_g[rows] = g.astype(unit.dtype)
        sums.add_rows(g, g * x)

    _add_kernel_gradients(refs, kernel_sums, shortcut_sums)
    return sums


def _store_preactivated_dx(
    refs: SimpleNamespace,
    unit: UnitSizes,
    factors: Factors,
) -> None:
    """Store the gradient of the input; without a convolution in the shortcut, dout is added."""
    a, c, d = factors
    for rows in unit.slices:
        from_g = a * load_float32(refs.outer_g, rows)
        from_x = c * load_float32(refs.x, rows)
        dx = from_g + from_x + d
        if not unit.has_shortcut:
            dx = dx + load_float32(refs.dout, rows)
        refs.dx[rows] = dx.astype(refs.dx.dtype)


# The output and the input of a post-activated unit.


def _begin_postactivated(
    refs: SimpleNamespace,
    unit: UnitSizes,
) -> tuple[ReadRows, ReadRows]:
    """Go through the last ReLU and its norms.

    Return functions of rows: the gradients of y3 and of the shortcut's convolution.
    """
    norm2 = Norm(refs, INNER_2, unit)
    norm = Norm(refs, OUTER, unit)
    shortcut_norm = Norm(refs, SHORTCUT, unit) if unit.has_shortcut else None
    if unit.is_strided:
        gather_strided(refs, lambda rows: refs.x[rows], unit)

    sums, shortcut_sums = _differentiate_output(
        refs,
        unit,
        norm2,
        norm,
        shortcut_norm,
    )
    a, c, d = norm.differentiate(*sums.totals)

    def read_dy3(rows: slice) -> Array:
        from_g = a * load_float32(refs.outer_g, rows)
        from_y = c * load_float32(refs.y3, rows)
        dy3 = from_g + from_y + d
        return dy3.astype(unit.dtype)

    if shortcut_norm is None:
        return read_dy3, lambda rows: refs.outer_g[rows]
    shortcut_a, shortcut_c, shortcut_d = shortcut_norm.differentiate(*shortcut_sums.totals)

    def read_dshortcut(rows: slice) -> Array:
        g = load_float32(refs.outer_g, rows)
        y = _convolve_shortcut(refs, rows, unit)
        dshortcut = shortcut_a * g + shortcut_c * y + shortcut_d
        return dshortcut.astype(unit.dtype)

    return read_dy3, read_dshortcut


def _differentiate_output(
    refs: SimpleNamespace,
    unit: UnitSizes,
    norm2: Norm,
    norm: Norm,
    shortcut_norm: Norm | None,
) -> tuple[Sums, Sums]:
    """Store y3 and the gradient of the last ReLU's input.

    Return the sums for the outer norm and for the shortcut's norm.
    """
    sums = Sums()
    shortcut_sums = Sums()
    for rows in unit.out_slices:
        y2 = load_kept2(refs, rows, unit)
        h2 = normalise_and_relu(y2, norm2.a, norm2.b)
        h2 = h2.astype(unit.dtype)
        y3 = multiply_on_chip(h2, refs.outward_again[...])
        refs.y3[rows] = y3.astype(unit.dtype)

        if shortcut_norm is None:
            residual = load_float32(refs.x, rows)
        else:
            y = _convolve_shortcut(refs, rows, unit)
            residual = shortcut_norm.a * y + shortcut_norm.b

        total = residual + norm.a * y3 + norm.b
        is_positive = total > 0
        dout = load_float32(refs.dout, rows)
        g = jnp.where(is_positive, dout, 0.0)
        refs.outer_g[rows] = g.astype(unit.dtype)
        sums.add_rows(g, g * y3)
        if shortcut_norm is not None:
            shortcut_sums.add_rows(g, g * y)
    return sums, shortcut_sums


def _convolve_shortcut(
    refs: SimpleNamespace,
    rows: slice,
    unit: UnitSizes,
) -> Array:
    """Return the output of the shortcut's convolution, in float32 and without its norm."""
    shortcut_input = read_shortcut_input(
        refs,
        lambda rows: refs.x[rows],
        rows,
        unit,
    )
    return multiply_on_chip(shortcut_input, refs.shortcut_again[...])


def _end_postactivated(
    refs: SimpleNamespace,
    unit: UnitSizes,
    dy1_factors: Factors,
    read_dshortcut: ReadRows,
) -> None:
    """Go through the first convolution and the shortcut."""
    if unit.is_strided:
        _differentiate_strided_shortcut(refs, read_dshortcut, unit)

    a, c, d = dy1_factors
    kernel_sums = Sums()
    shortcut_sums = Sums()
    for rows in unit.slices:
        from_g = a * refs.g[rows]
        from_y = c * load_kept1(refs, rows, unit)
        dy1 = from_g + from_y + d
        dy1 = dy1.astype(unit.dtype)
        inner_dy1 = dy1[:, : unit.inner]
        dkernel = multiply_on_chip(inner_dy1, refs.x[rows], TRANSPOSED)
        kernel_sums.add(dkernel)

        if unit.is_strided:
            residual = refs.wide[rows]
        else:
            residual = read_dshortcut(rows)
        if unit.has_shortcut and not unit.is_strided:
            dshortcut = multiply_on_chip(refs.x[rows], residual, TRANSPOSED)
            shortcut_sums.add(dshortcut)
            residual = multiply_on_chip(residual, refs.shortcut[...])

        dx = multiply_on_chip(dy1, refs.outward[...])
        dx = dx + residual.astype(jnp.float32)
        refs.dx[rows] = dx.astype(refs.dx.dtype)

    _add_kernel_gradients(refs, kernel_sums, shortcut_sums)


# Both forms of a unit.


def _add_kernel_gradients(
    refs: SimpleNamespace,
    kernel_sums: Sums,
    shortcut_sums: Sums,
) -> None:
    """Add to the gradient of the first kernel, and to the shortcut's if it was summed."""
    refs.grad_conv1[...] += kernel_sums.totals[0]
    if shortcut_sums.totals:
        refs.grad_shortcut[...] += shortcut_sums.totals[0]


def _differentiate_strided_shortcut(
    refs: SimpleNamespace,
    read_dshortcut: ReadRows,
    unit: UnitSizes,
) -> None:
    """Store the gradient of a strided shortcut's input in the complete map."""
    shortcut_sums = Sums()
    for rows in unit.out_slices:
        dy = read_dshortcut(rows)
        shortcut_input = refs.narrow[rows]
        shortcut_input = shortcut_input.astype(unit.dtype)
        dkernel = multiply_on_chip(shortcut_input, dy, TRANSPOSED)
        shortcut_sums.add(dkernel)
        refs.narrow[rows] = multiply_on_chip(dy, refs.shortcut[...])
    refs.grad_shortcut[...] += shortcut_sums.totals[0]

    for rows in unit.slices:
        num_rows = rows.stop - rows.start
        refs.wide[rows] = jnp.zeros((num_rows, unit.inputs), jnp.float32)
    for piece in unit.find_pieces(plane=0):
        refs.wide[piece.in_map] = refs.narrow[piece.rows]
