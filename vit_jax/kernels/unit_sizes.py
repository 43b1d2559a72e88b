"""Sizes of a residual unit in the kernel for TPUs, and the order of its programs.

A 3x3 convolution sums products at nine window offsets: line and column of an input position, from
the position of the output. On the chip each is a shifted load from the map.

A unit with a stride splits the map between its first two convolutions into four planes: even and
odd lines, even and odd columns. Each window offset is then a shifted load from one plane. The
shortcut reads even columns of even lines. Splitting and joining are loads and stores with a stride
in scratch memory, so the maps of all units have the same order outside.

Legend: R positions of a map, line after line, L lanes, N any number.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from vit_jax.kernels.unit_parameters import Form

LANES = 128
ROWS = 256  # rows of one product; found by compiling
KERNEL_SIZE = 3
NUM_OFFSETS = KERNEL_SIZE**2
_SUBLANES = 8  # rows of a tile in memory
Ref = Any  # an array of Pallas on the chip


class WindowOffset(NamedTuple):
    """An input position of a 3x3 convolution, relative to the position of the output."""

    number: int  # in the kernel, line after line
    plane: int  # plane of the map that is read
    line: int
    column: int


CENTRE = WindowOffset(number=NUM_OFFSETS // 2, plane=0, line=0, column=0)


class NormSlot(NamedTuple):
    """The rows of a norm among the norms of a unit: scale and bias, and mean and 1 / deviation."""

    kind: str  # "outer" or "inner"
    first: int  # row


OUTER = NormSlot("outer", 0)  # the first norm of a pre-activated unit, the last one otherwise
SHORTCUT = NormSlot("outer", 2)
INNER_1 = NormSlot("inner", 0)  # after the first convolution
INNER_2 = NormSlot("inner", 2)  # after the second convolution


class Piece(NamedTuple):
    """Some rows of a plane."""

    plane: int
    in_map: Any  # the rows in the complete map
    rows: slice  # the rows in the plane


class UnitSizes:
    """Sizes of a unit, and the order in which its programs go through the maps."""

    def __init__(
        self,
        rows: int,  # rows of the input
        channels: tuple[int, int, int],  # channels of the input, the inner maps and the output
        dtype: jnp.dtype,
        has_shortcut: bool,
        form: Form,
    ):
        self.rows = rows
        self.dtype = dtype
        self.has_shortcut = has_shortcut
        self.inputs, self.inner, self.outputs = channels
        self.width = form.width
        self.stride = form.stride
        self.epsilon = form.epsilon
        self.is_preactivated = form.is_preactivated
        self.interpret = form.interpret

        self.is_strided = self.stride > 1
        self.num_planes = self.stride**2
        self.out_rows = rows // self.num_planes
        self.out_width = self.width // self.stride
        if self.is_preactivated:
            self.outer = self.inputs
            self.outer_rows = rows
        else:
            self.outer = self.outputs
            self.outer_rows = self.out_rows

        self.lanes = max(self.inner, LANES)
        self.copies = self.lanes // self.inner  # copies of an inner map in its lanes
        self.border = self._count_border_rows()
        self.slices = slice_rows(rows)
        self.out_slices = slice_rows(self.out_rows)

        self.offsets = self._list_offsets(form.first_offset)
        self.turned_offsets = []
        for plane in range(self.num_planes):
            self.turned_offsets.append(self._turn_offsets(plane))
        self.pieces = list(self._make_pieces())

    def _count_border_rows(self) -> int:
        """Return the rows of zeros above and below a map: a line and a position, in full tiles."""
        num_tiles = math.ceil((self.out_width + 1) / _SUBLANES)
        return num_tiles * _SUBLANES

    def _list_offsets(self, first: int) -> list[WindowOffset]:
        """Return all window offsets; `first` is `Form.first_offset`."""
        offsets = []
        for number in range(NUM_OFFSETS):
            kernel_line, kernel_column = divmod(number, KERNEL_SIZE)
            line, plane_line = divmod(first + kernel_line, self.stride)
            column, plane_column = divmod(first + kernel_column, self.stride)
            plane = plane_line * self.stride + plane_column
            offsets.append(WindowOffset(number, plane, line, column))
        return offsets

    def _turn_offsets(self, plane: int) -> list[WindowOffset]:
        """Return the offsets of the turned kernel, from the output's gradient to a plane's."""
        turned = []
        for offset in reversed(self.offsets):
            if offset.plane == plane:
                number = NUM_OFFSETS - 1 - offset.number
                turned.append(WindowOffset(number, 0, -offset.line, -offset.column))
        return turned

    def _make_pieces(self) -> Iterator[Piece]:
        """Yield the pieces of all planes: slices of the map, or half lines with a stride."""
        if not self.is_strided:
            for rows in self.slices:
                yield Piece(plane=0, in_map=rows, rows=rows)
            return

        num_lines = self.rows // self.width
        for line in range(num_lines):
            line_in_plane, plane_line = divmod(line, self.stride)
            start = line_in_plane * self.out_width
            rows = slice(start, start + self.out_width)
            for column in range(self.stride):
                plane = plane_line * self.stride + column
                first = line * self.width + column
                in_map = pl.ds(first, self.out_width, self.stride)
                yield Piece(plane, in_map, rows)

    def find_pieces(self, plane: int) -> list[Piece]:
        """Return the pieces of a plane."""
        return [piece for piece in self.pieces if piece.plane == plane]

    def count_normed_channels(self, slot: NormSlot) -> int:
        """Return the number of channels of the map that a norm is applied to."""
        return self.outer if slot.kind == "outer" else self.inner

    def count_normed_rows(self, slot: NormSlot) -> int:
        """Return the number of rows of the map that a norm is applied to."""
        if slot.kind == "outer":
            return self.outer_rows
        if slot == INNER_1:
            return self.rows
        return self.out_rows

    def group_by_tile(self, offsets: Sequence[WindowOffset]) -> list[Sequence[WindowOffset]]:
        """Return the window offsets whose channels fill one tile beside each other, by tile."""
        tiles = []
        for start in range(0, len(offsets), self.copies):
            end = start + self.copies
            tiles.append(offsets[start:end])
        return tiles


def slice_rows(size: int) -> list[slice]:
    """Return slices of the rows of a map, each for one product."""
    slices = []
    for start in range(0, size, ROWS):
        end = min(start + ROWS, size)
        slices.append(slice(start, end))
    return slices


class ScratchMap:
    """A float32 map in scratch memory, in arrays of 128 lanes for loads with a stride."""

    def __init__(self, tiles: Sequence[Ref]):
        self.tiles = tiles

    @staticmethod
    def describe(rows: int, channels: int) -> list[Any]:
        """Return the arrays that a map needs."""
        num_tiles = channels // LANES
        tile = pltpu.VMEM((rows, LANES), jnp.float32)
        return [tile] * num_tiles

    def __getitem__(self, rows: slice) -> Array:
        """Return rows of all channels, (R, N)."""
        parts = [tile[rows] for tile in self.tiles]
        return jnp.concatenate(parts, 1)

    def __setitem__(
        self,
        rows: slice,
        x_RN: Array,
    ) -> None:
        for index, tile in enumerate(self.tiles):
            start = index * LANES
            tile[rows] = x_RN[:, start : start + LANES]
