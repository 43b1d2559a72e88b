"""Programs of the kernels in `unit_pallas.py`: one image forward and backward.

A unit with a stride splits the map between its first two convolutions into four planes: even and odd lines, even and
odd columns. A tap of its 3x3 convolution is then a shifted load from one plane, as it is from the complete map without
a stride. Its shortcut reads even columns of even lines. Splitting and joining are loads and stores with a stride in
scratch memory, so the maps of all units have the same order outside.

Legend: R positions of a map, line after line, L lanes, T rows of the tiles of a 3x3 kernel, N any number.
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from vit_jax.config.sizes import NUM_GROUPS

LANES = 128
ROWS = 256  # of one product; found by compiling
NUM_TAPS = 9
_NN = (((1,), (0,)), ((), ()))  # a @ b
_TN = (((0,), (0,)), ((), ()))  # a.T @ b


class Form(NamedTuple):
    """Everything but arrays that fixes a unit."""

    width: int  # columns of the input
    stride: int  # of the 3x3 convolution and the shortcut
    first_tap: (
        int  # line and column of the first tap, from the position that the output has in the input
    )
    epsilon: float  # of the group norms
    is_preactivated: bool
    interpret: bool  # run on any device, slowly, as the kernel would on a TPU


class Tap(NamedTuple):
    """A tap of the 3x3 convolution."""

    place: int  # in the kernel
    plane: int  # of the map it reads
    line: int  # of the read position, from the output's
    column: int


_CENTRE = Tap(NUM_TAPS // 2, 0, 0, 0)


class Sizes:
    """Sizes of a unit, and the order in which its programs go through the maps."""

    def __init__(
        self,
        rows: int,  # of the input
        channels: tuple[int, int, int],  # of the input, the inner maps and the output
        dtype: Any,
        has_shortcut: bool,
        form: Form,
    ):
        self.rows = rows
        self.dtype = dtype
        self.has_shortcut = has_shortcut
        self.inputs, self.inner, self.outputs = inputs, inner, outputs = channels
        self.width, self.stride, first_tap, self.epsilon, self.is_preactivated, self.interpret = (
            form
        )
        self.is_strided = self.stride > 1
        self.num_planes = self.stride**2
        self.out_rows = rows // self.num_planes
        self.out_width = self.width // self.stride
        self.outer, self.outer_rows = (
            (inputs, rows) if self.is_preactivated else (outputs, self.out_rows)
        )
        self.inner_rows = {0: rows, 2: self.out_rows}  # by the first row of a norm's parameters
        self.lanes = max(inner, LANES)
        self.copies = self.lanes // inner  # of an inner map in its lanes; also the taps in one tile
        self.border = math.ceil((self.out_width + 1) / 8) * 8  # rows around a map that is shifted
        self.slices, self.out_slices = (
            [slice(start, min(start + ROWS, size)) for start in range(0, size, ROWS)]
            for size in (rows, self.out_rows)
        )
        self.taps = [self._tap(place, first_tap) for place in range(NUM_TAPS)]
        self.turned_taps = [  # of the turned kernel, from the output's gradient to that of each plane
            [
                Tap(NUM_TAPS - 1 - t.place, 0, -t.line, -t.column)
                for t in reversed(self.taps)
                if t.plane == plane
            ]
            for plane in range(self.num_planes)
        ]
        self.pieces = list(self._pieces())

    def _tap(self, place: int, first: int) -> Tap:
        (line, line_plane), (column, column_plane) = (
            divmod(first + step, self.stride) for step in divmod(place, math.isqrt(NUM_TAPS))
        )
        return Tap(place, line_plane * self.stride + column_plane, line, column)

    def _pieces(self) -> Iterator[tuple[int, Any, slice]]:
        """Yield a plane, some of its rows in the complete map, and the same rows in the plane."""
        if not self.is_strided:
            yield from ((0, rows, rows) for rows in self.slices)
            return
        for line, column in itertools.product(range(self.rows // self.width), range(self.stride)):
            line_in_plane, plane_line = divmod(line, self.stride)
            in_map = pl.ds(line * self.width + column, self.out_width, self.stride)
            in_plane = slice(line_in_plane * self.out_width, (line_in_plane + 1) * self.out_width)
            yield plane_line * self.stride + column, in_map, in_plane

    def group_means(self, sums_1L: Any, place: str, first: int) -> Any:
        """Return the mean of each channel's group, from sums over rows; other arguments as for `_Norm`."""
        channels, rows = (
            (self.outer, self.outer_rows)
            if place == "outer"
            else (self.inner, self.inner_rows[first])
        )
        return _group_means(sums_1L, channels, rows)

    def tiles(self, taps: Sequence[Tap]) -> list[Sequence[Tap]]:
        """Return the taps that lie beside each other in one tile, for each tile."""
        return [taps[start : start + self.copies] for start in range(0, len(taps), self.copies)]


class ScratchMap:
    """A float32 map in scratch memory, in arrays of 128 lanes, since loads with a stride have no more."""

    def __init__(self, tiles: Sequence[Any]):
        self.tiles = tiles

    @staticmethod
    def shapes(rows: int, channels: int) -> list[Any]:
        """Return the arrays that a map needs."""
        return [pltpu.VMEM((rows, LANES), jnp.float32)] * (channels // LANES)

    def __getitem__(self, rows: Any) -> Any:
        return jnp.concatenate([tile[rows] for tile in self.tiles], 1)

    def __setitem__(self, rows: Any, x_RN: Any) -> None:
        for place, tile in enumerate(self.tiles):
            tile[rows] = x_RN[:, place * LANES : (place + 1) * LANES]


def forward(refs: Any, u: Sizes) -> None:
    """Compute the output of one image, and what the gradient needs."""
    if u.is_preactivated:
        sums = _Sums()
        for rows in u.slices:
            sums.add_squares(refs.x[rows].astype(jnp.float32))
        a1, b1 = sums.normalize(refs, "outer", 0, u)

    def enter(rows: slice) -> Any:
        return _relu(refs.x[rows], a1, b1).astype(u.dtype) if u.is_preactivated else refs.x[rows]

    sums = _Sums()
    for rows in u.slices:
        refs.y1[rows] = y1 = _dot(enter(rows), refs.inward[...])
        sums.add_squares(y1)
    a2, b2 = sums.normalize(refs, "inner", 0, u)
    _clear_border(refs.z, u)
    for plane, in_map, rows in u.pieces:
        _store_shifted(refs.z, plane, rows, _relu(refs.y1[in_map], a2, b2), refs.inside, u.taps, u)
    sums = _Sums()
    for rows in u.out_slices:
        refs.y2[rows] = y2 = _convolve(refs.z, rows, refs.middle, u.taps, u)
        sums.add_squares(y2)
    a3, b3 = sums.normalize(refs, "inner", 2, u)
    if u.is_strided:
        _gather(refs, enter, u)
    _keep(refs, u)
    sums = _Sums()
    of_shortcut = _Sums()
    for rows in u.out_slices:
        y2 = refs.y2[rows]
        y3 = _dot(_relu(y2, a3, b3).astype(u.dtype), refs.outward[...])
        if u.has_shortcut:
            residual = _dot(_entered(refs, enter, rows, u), refs.shortcut[...])
        else:
            residual = refs.x[rows].astype(jnp.float32)
        if u.is_preactivated:
            refs.out[rows] = (residual + y3).astype(refs.out.dtype)
        else:
            refs.y3[rows] = y3.astype(u.dtype)
            sums.add_squares(y3)
            of_shortcut.add_squares(residual)
    if u.is_preactivated:
        return
    a, b = sums.normalize(refs, "outer", 0, u)
    if u.has_shortcut:
        shortcut_a, shortcut_b = of_shortcut.normalize(refs, "outer", 2, u)
    for rows in u.out_slices:
        residual = _entered(refs, enter, rows, u)
        if u.has_shortcut:
            residual = shortcut_a * _dot(residual, refs.shortcut[...]) + shortcut_b
        out = jnp.maximum(
            residual.astype(jnp.float32) + a * refs.y3[rows].astype(jnp.float32) + b, 0.0
        )
        refs.out[rows] = out.astype(refs.out.dtype)


def backward(refs: Any, u: Sizes) -> None:
    """Go backwards: g is the gradient of a norm's output, dy that of its input y, which is a g + c y + d."""

    @pl.when(pl.program_id(1) == 0)
    def _() -> None:
        for name, ref in vars(refs).items():
            if name.startswith("of_"):
                ref[...] = jnp.zeros(ref.shape, ref.dtype)

    _clear_border(refs.z, u)
    _clear_border(refs.dy2, u)
    if u.is_preactivated:
        _end_preactivated(refs, u, *_backward_inner(refs, u, lambda rows: refs.dout[rows]))
    else:
        of_conv3, of_shortcut = _begin_postactivated(refs, u)
        _end_postactivated(refs, u, *_backward_inner(refs, u, of_conv3), of_shortcut)


def _backward_inner(refs: Any, u: Sizes, dy3_of: Callable[[slice], Any]) -> tuple[Any, Any, Any]:
    """Go from the gradient of the third convolution, of which `dy3_of` gives rows, to a, c and d of the first."""
    norm2 = _Norm(refs, "inner", 0, u)
    norm3 = _Norm(refs, "inner", 2, u)
    sums = _Sums()
    of_conv3 = _Sums()
    for rows in u.out_slices:
        dy3 = dy3_of(rows)
        y2 = _kept2(refs, rows, u)
        z3 = norm3.a * y2 + norm3.b
        of_conv3.add(_dot(jnp.maximum(z3, 0.0).astype(u.dtype)[:, : u.inner], dy3, _TN))
        refs.g[rows] = g = jnp.where(z3 > 0, _dot(dy3, refs.inward[...]), 0.0)
        sums.add_rows(g, g * y2)
    refs.of_conv3[...] += of_conv3.of[0]
    if u.is_strided:
        for rows in u.slices:
            refs.y1[rows] = _kept1(refs, rows, u)
    for plane, in_map, rows in u.pieces:
        y1 = refs.y1[in_map] if u.is_strided else _kept1(refs, in_map, u)
        _store_shifted(refs.z, plane, rows, _relu(y1, norm2.a, norm2.b), refs.inside, u.taps, u)
    a, c, d = norm3.differentiate(*sums.of)
    for rows in u.out_slices:
        dy2 = a * refs.g[rows] + c * _kept2(refs, rows, u) + d
        _store_shifted(refs.dy2, 0, rows, dy2, refs.inside, itertools.chain(*u.turned_taps), u)
    of_conv2 = _Sums()
    for rows in u.out_slices:
        dy2 = _shifted(refs.dy2, rows, _CENTRE, u).astype(u.dtype)[:, : u.inner]
        of_conv2.add(*(_dot(dy2, _tile(refs.z, rows, taps, u), _TN) for taps in u.tiles(u.taps)))
    for place, sum_ in enumerate(of_conv2.of):
        refs.of_conv2[:, place * u.lanes : (place + 1) * u.lanes] += sum_
    for plane, taps in enumerate(u.turned_taps if u.is_strided else ()):
        for rows in u.out_slices:
            refs.plane[rows] = _convolve(refs.dy2, rows, refs.middle, taps, u)
        for _, in_map, rows in (piece for piece in u.pieces if piece[0] == plane):
            refs.g[in_map] = refs.plane[rows]
    sums = _Sums()
    for rows in u.slices:
        y1 = _kept1(refs, rows, u)
        g = (
            refs.g[rows]
            if u.is_strided
            else _convolve(refs.dy2, rows, refs.middle, u.turned_taps[0], u)
        )
        refs.g[rows] = g = jnp.where(norm2.a * y1 + norm2.b > 0, g, 0.0)
        sums.add_rows(g, g * y1)
    return norm2.differentiate(*sums.of)


def _end_preactivated(refs: Any, u: Sizes, a: Any, c: Any, d: Any) -> None:
    norm1 = _Norm(refs, "outer", 0, u)
    if u.is_strided:
        _gather(refs, lambda rows: _relu(refs.x[rows], norm1.a, norm1.b), u)
        _scatter(refs, lambda rows: refs.dout[rows], u)
    sums = _Sums()
    of_conv1 = _Sums()
    of_shortcut = _Sums()
    for rows in u.slices:
        y1 = _kept1(refs, rows, u)
        dy1 = (a * refs.g[rows] + c * y1 + d).astype(u.dtype)
        x = refs.x[rows].astype(jnp.float32)
        z1 = norm1.a * x + norm1.b
        g = _dot(dy1, refs.outward[...])
        h1 = jnp.maximum(z1, 0.0).astype(u.dtype)
        of_conv1.add(_dot(dy1[:, : u.inner], h1, _TN))
        if u.is_strided:
            g = g + refs.wide[rows]
        elif u.has_shortcut:
            of_shortcut.add(_dot(h1, refs.dout[rows], _TN))
            g = g + _dot(refs.dout[rows], refs.shortcut[...])
        g = jnp.where(z1 > 0, g, 0.0)
        refs.outer_g[rows] = g.astype(u.dtype)
        sums.add_rows(g, g * x)
    refs.of_conv1[...] += of_conv1.of[0]
    if of_shortcut.of:
        refs.of_shortcut[...] += of_shortcut.of[0]
    a, c, d = norm1.differentiate(*sums.of)
    for rows in u.slices:
        dx = a * refs.outer_g[rows].astype(jnp.float32) + c * refs.x[rows].astype(jnp.float32) + d
        dx = dx if u.has_shortcut else dx + refs.dout[rows].astype(jnp.float32)
        refs.dx[rows] = dx.astype(refs.dx.dtype)


def _begin_postactivated(
    refs: Any, u: Sizes
) -> tuple[Callable[[slice], Any], Callable[[slice], Any]]:
    """Go through the last ReLU; return functions of rows: the gradients of the last convolution and the shortcut."""
    norm2 = _Norm(refs, "inner", 2, u)
    norm3 = _Norm(refs, "outer", 0, u)
    shortcut_norm = _Norm(refs, "outer", 2, u) if u.has_shortcut else None
    if u.is_strided:
        _gather(refs, lambda rows: refs.x[rows], u)

    def shortcut_conv(rows: slice) -> Any:
        return _dot(_entered(refs, lambda rows: refs.x[rows], rows, u), refs.shortcut_again[...])

    sums = _Sums()
    of_shortcut = _Sums()
    for rows in u.out_slices:
        y3 = _dot(
            _relu(_kept2(refs, rows, u), norm2.a, norm2.b).astype(u.dtype), refs.outward_again[...]
        )
        refs.y3[rows] = y3.astype(u.dtype)
        if shortcut_norm:
            y = shortcut_conv(rows)
            z = shortcut_norm.a * y + shortcut_norm.b
        else:
            y = z = refs.x[rows].astype(jnp.float32)
        g = jnp.where(z + norm3.a * y3 + norm3.b > 0, refs.dout[rows].astype(jnp.float32), 0.0)
        refs.outer_g[rows] = g.astype(u.dtype)
        sums.add_rows(g, g * y3)
        if shortcut_norm:
            of_shortcut.add_rows(g, g * y)
    a, c, d = norm3.differentiate(*sums.of)

    def of_conv3(rows: slice) -> Any:
        return (
            a * refs.outer_g[rows].astype(jnp.float32) + c * refs.y3[rows].astype(jnp.float32) + d
        ).astype(u.dtype)

    if not shortcut_norm:
        return of_conv3, lambda rows: refs.outer_g[rows]
    shortcut_a, shortcut_c, shortcut_d = shortcut_norm.differentiate(*of_shortcut.of)

    def of_shortcut_conv(rows: slice) -> Any:
        g = refs.outer_g[rows].astype(jnp.float32)
        y = shortcut_conv(rows)
        return (shortcut_a * g + shortcut_c * y + shortcut_d).astype(u.dtype)

    return of_conv3, of_shortcut_conv


def _end_postactivated(
    refs: Any, u: Sizes, a: Any, c: Any, d: Any, shortcut_of: Callable[[slice], Any]
) -> None:
    if u.is_strided:
        _scatter(refs, shortcut_of, u)
    of_conv1 = _Sums()
    of_shortcut = _Sums()
    for rows in u.slices:
        dy1 = (a * refs.g[rows] + c * _kept1(refs, rows, u) + d).astype(u.dtype)
        of_conv1.add(_dot(dy1[:, : u.inner], refs.x[rows], _TN))
        residual = refs.wide[rows] if u.is_strided else shortcut_of(rows)
        if u.has_shortcut and not u.is_strided:
            of_shortcut.add(_dot(refs.x[rows], residual, _TN))
            residual = _dot(residual, refs.shortcut[...])
        dx = _dot(dy1, refs.outward[...]) + residual.astype(jnp.float32)
        refs.dx[rows] = dx.astype(refs.dx.dtype)
    refs.of_conv1[...] += of_conv1.of[0]
    if of_shortcut.of:
        refs.of_shortcut[...] += of_shortcut.of[0]


def _gather(refs: Any, enter: Callable[[slice], Any], u: Sizes) -> None:
    """Store where a strided shortcut reads: even columns of even lines. `enter` returns rows of the complete map."""
    for rows in u.slices:
        refs.wide[rows] = enter(rows).astype(jnp.float32)
    for plane, in_map, rows in u.pieces:
        if plane == 0:
            refs.narrow[rows] = refs.wide[in_map]


def _scatter(refs: Any, shortcut_of: Callable[[slice], Any], u: Sizes) -> None:
    """Go backwards through a strided shortcut: from rows of its gradient to that of its input, in the complete map."""
    of_shortcut = _Sums()
    for rows in u.out_slices:
        dy = shortcut_of(rows)
        of_shortcut.add(_dot(refs.narrow[rows].astype(u.dtype), dy, _TN))
        refs.narrow[rows] = _dot(dy, refs.shortcut[...])
    refs.of_shortcut[...] += of_shortcut.of[0]
    for rows in u.slices:
        refs.wide[rows] = jnp.zeros((rows.stop - rows.start, u.inputs), jnp.float32)
    for plane, in_map, rows in u.pieces:
        if plane == 0:
            refs.wide[in_map] = refs.narrow[rows]


def _entered(refs: Any, enter: Callable[[slice], Any], rows: slice, u: Sizes) -> Any:
    """Return these rows of the shortcut's input."""
    return refs.narrow[rows].astype(u.dtype) if u.is_strided else enter(rows)


class _Norm:
    """A group norm a x + b, whose a and b depend on x."""

    def __init__(self, refs: Any, place: str, first: int, u: Sizes):
        """`place` is "outer" or "inner", `first` the row of its scale and its mean."""
        statistics = getattr(refs, f"{place}_statistics")
        affine = getattr(refs, f"{place}_norms")
        self.mean, self.inverse = (statistics[row : row + 1] for row in (first, first + 1))
        self.scale, bias = (affine[row : row + 1] for row in (first, first + 1))
        self.a = self.inverse * self.scale
        self.b = bias - self.mean * self.a
        self.gradient = getattr(refs, f"of_{place}_norms")
        self.place = place
        self.first = first
        self.unit = u

    def differentiate(self, g: Any, gx: Any) -> tuple[Any, Any, Any]:
        """Add to the gradients of scale and bias; return a, c and d of the input's gradient a g + c x + d.

        Arguments are the sums of g and g x over positions.
        """
        of_scale = self.inverse * (gx - self.mean * g)
        for row, sum_ in enumerate((of_scale, g), self.first):
            self.gradient[row : row + 1] += sum_
        mean_g, mean_gx = (
            self.unit.group_means(self.scale * x, self.place, self.first) for x in (g, of_scale)
        )
        c = -jnp.square(self.inverse) * mean_gx
        return self.a, c, -self.inverse * mean_g - self.mean * c


class _Sums:
    """Sums over slices of rows."""

    def __init__(self) -> None:
        self.of: tuple[Any, ...] = ()

    def add(self, *values: Any) -> None:
        self.of = tuple(a + b for a, b in zip(self.of, values, strict=True)) if self.of else values

    def add_rows(self, *maps: Any) -> None:
        self.add(*(x.sum(0, keepdims=True) for x in maps))

    def add_squares(self, x: Any) -> None:
        self.add_rows(x, x * x)

    def normalize(self, refs: Any, place: str, first: int, u: Sizes) -> tuple[Any, Any]:
        """Store mean and 1 / standard deviation of what `add_squares` got; return a and b of the norm a x + b."""
        statistics = getattr(refs, f"{place}_statistics")
        affine = getattr(refs, f"{place}_norms")
        mean, square = (u.group_means(x, place, first) for x in self.of)
        inverse = jax.lax.rsqrt(jnp.maximum(square - mean * mean, 0.0) + u.epsilon)
        statistics[first : first + 1] = mean
        statistics[first + 1 : first + 2] = inverse
        a = inverse * affine[first : first + 1]
        return a, affine[first + 1 : first + 2] - mean * a


def _group_means(sums_1L: Any, channels: int, rows: int) -> Any:
    """Return the mean of each channel's group, from sums over rows."""
    size = channels // NUM_GROUPS
    lanes = sums_1L.shape[1]
    if lanes < LANES:  # a rotation needs complete tiles
        return _group_means(jnp.concatenate([sums_1L] * (LANES // lanes), 1), channels, rows)[
            :, :lanes
        ]
    lane = jax.lax.broadcasted_iota(jnp.int32, sums_1L.shape, 1)
    for step in (2**power for power in range(size.bit_length() - 1)):
        below, above = (pltpu.roll(sums_1L, shift, 1) for shift in (step, lanes - step))
        sums_1L += jnp.where(lane & step != 0, below, above)
    return sums_1L / (size * rows)


def _store_shifted(
    ref: Any, plane: int, rows: slice, x_RL: Any, inside: Any, taps: Iterable[Tap], u: Sizes
) -> None:
    """Store rows of a plane once for each column of its taps, with zeros where a line ends."""
    for column in sorted({tap.column for tap in taps if tap.plane == plane}):
        edge = {-1: 1, 1: 0}.get(column)
        copy_RL = x_RL if edge is None else x_RL * inside[edge, rows]
        ref[plane, column + 1, rows.start + u.border : rows.stop + u.border] = copy_RL


def _clear_border(ref: Any, u: Sizes) -> None:
    zeros = jnp.zeros((*ref.shape[:2], u.border, u.lanes), ref.dtype)
    ref[:, :, : u.border] = zeros
    ref[:, :, u.out_rows + u.border :] = zeros


def _shifted(ref: Any, rows: slice, tap: Tap, u: Sizes) -> Any:
    offset = u.border + tap.line * u.out_width + tap.column
    return ref[tap.plane, tap.column + 1, rows.start + offset : rows.stop + offset]


def _tile(ref: Any, rows: slice, taps: Sequence[Tap], u: Sizes) -> Any:
    """Return the channels of as many taps as fit beside each other."""
    maps = [_shifted(ref, rows, tap, u) for tap in taps]
    return (maps[0] if len(maps) == 1 else _halves(maps[0], maps[1], u)).astype(u.dtype)


def _convolve(ref: Any, rows: slice, kernel: Any, taps: Sequence[Tap], u: Sizes) -> Any:
    """Return the sum of these taps; `kernel` has the rows of all taps, (T, L)."""
    starts = ((tile, tile[0].place * u.inner) for tile in u.tiles(taps))
    products = (
        _dot(_tile(ref, rows, tile, u), kernel[start : start + u.lanes]) for tile, start in starts
    )
    return functools.reduce(jnp.add, products)


def _keep(refs: Any, u: Sizes) -> None:
    """Store what the first two convolutions returned: beside each other where both fit in one tile."""
    if u.copies > 1:
        for rows in u.slices:
            refs.kept[rows] = _halves(refs.y1[rows], refs.y2[rows], u).astype(refs.kept.dtype)
        return
    for rows in u.slices:
        refs.kept1[rows] = refs.y1[rows].astype(refs.kept1.dtype)
    for rows in u.out_slices:
        refs.kept2[rows] = refs.y2[rows].astype(refs.kept2.dtype)


def _kept1(refs: Any, rows: slice, u: Sizes) -> Any:
    """Return what the first convolution returned, in all lanes."""
    if u.copies == 1:
        return refs.kept1[rows].astype(jnp.float32)
    both = refs.kept[rows].astype(jnp.float32)
    return _halves(both, pltpu.roll(both, u.inner, 1), u)


def _kept2(refs: Any, rows: slice, u: Sizes) -> Any:
    if u.copies == 1:
        return refs.kept2[rows].astype(jnp.float32)
    both = refs.kept[rows].astype(jnp.float32)
    return _halves(pltpu.roll(both, u.inner, 1), both, u)


def _halves(left_RL: Any, right_RL: Any, u: Sizes) -> Any:
    lane = jax.lax.broadcasted_iota(jnp.int32, left_RL.shape, 1)
    return jnp.where(lane < u.inner, left_RL, right_RL)


def _relu(x: Any, a: Any, b: Any) -> Any:
    return jnp.maximum(a * x.astype(jnp.float32) + b, 0.0)


def _dot(a: jax.Array, b: jax.Array, dims: tuple = _NN) -> jax.Array:
    return jax.lax.dot_general(a, b, dims, preferred_element_type=jnp.float32)
