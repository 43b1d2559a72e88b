"""Parse optimised HLO text into computations and instructions.

An estimate needs order, operands, array sizes, called computations, loop lengths, and XLA's cycle
counts.
"""

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Container, Mapping

import numpy as np

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*)$")
_ARRAY = re.compile(r"\b(pred|bf16|[a-z]\d+)\[([\d,]*)\](?:\{([\d,]*)((?:[:A-Z*][^}]*)?)\})?")
_NAME = re.compile(r"%([\w.\-]+)")
# The only part of an instruction that spans lines
_METADATA = re.compile(r"kernel_metadata=\{\n(.*?)\n\}", re.DOTALL)
_TILE = re.compile(r"T\(([\d,]+)\)(?:\((\d+),1\))?")
_MESH_GROUPS = re.compile(
    r"replica_groups=mesh\[([^\]]*)\]"
    r"(?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))? \{([^}]*)\}"
)
_IOTA_GROUPS = re.compile(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_LISTED_GROUPS = re.compile(r"replica_groups=\{\{([\d,]+)\}")
_PAIRS = re.compile(r"source_target_pairs=\{\{(\d+),(\d+)\}")


@dataclasses.dataclass(frozen=True)
class Array:
    """One array of a shape.

    Attributes:
      dims: lengths of the axes.
      bits: bits of a value.
      minor_to_major: axes in the order of the layout.
      tile: sides of a tile of the memory; () without tiles.
      is_in_hbm: False for other memories.
    """

    dims: tuple[int, ...]
    bits: int
    minor_to_major: tuple[int, ...]
    tile: tuple[int, ...]
    is_in_hbm: bool

    @property
    def num_bytes(self) -> int:
        """Bytes without padding."""
        return math.prod(self.dims) * self.bits // 8

    @property
    def padded_bytes(self) -> int:
        """Bytes in memory, where the minor dims are padded to complete tiles."""
        dims = list(self.dims)
        if self.minor_to_major:
            dims = [self.dims[dim] for dim in reversed(self.minor_to_major)]
        num_tiled = min(len(self.tile), len(dims))
        for axis in range(-num_tiled, 0):
            num_tiles = math.ceil(dims[axis] / self.tile[axis])
            dims[axis] = num_tiles * self.tile[axis]
        return math.prod(dims) * self.bits // 8


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a computation."""

    name: str
    shape: str
    opcode: str
    rest: str  # operands and attributes

    @functools.cached_property
    def arrays(self) -> tuple[Array, ...]:
        return tuple(map(_parse_array, _ARRAY.findall(self.shape)))

    @functools.cached_property
    def operands(self) -> tuple[str, ...]:
        return tuple(_NAME.findall(_read_parentheses(self.rest)))

    @property
    def cycles(self) -> int:
        """XLA's estimate for one execution; 0 where it gives none."""
        return int(self.find(r'"estimated_cycles":"(\d+)"') or 0)

    @property
    def is_kernel(self) -> bool:
        """True for a Pallas kernel, whose cycles XLA does not count."""
        return self.opcode == "custom-call" and 'custom_call_target="tpu_custom_call"' in self.rest

    @property
    def target(self) -> str:
        """Name of the library function that a custom call runs; "" for other instructions."""
        if self.opcode != "custom-call":
            return ""
        return self.find(r'custom_call_target="([^"]*)"')

    @property
    def kernel(self) -> str:
        """The program of a kernel, as XLA carries it along."""
        return self.find(r'"body":"([^"]*)"')

    @property
    def programs(self) -> int | None:
        """Steps of a kernel's grid, where the kernel states them in its metadata."""
        return int(self.find(r'"programs":"(\d+)"') or 0) or None

    def attribute(self, name: str) -> str:
        """Return the name in an attribute: "calls", "body" or "channel_id"; "" without it."""
        return self.find(rf"\b{name}=%?([\w.\-]+)")

    def find(self, pattern: str | re.Pattern[str]) -> str:
        """Return the first group of a pattern in operands and attributes; "" without a match."""
        match = re.search(pattern, self.rest)
        if match is None:
            return ""
        return match[1]

    @property
    def called(self) -> tuple[str, ...]:
        """Computations that a call, a fusion or a conditional runs."""
        called = []
        for attribute in ("calls", "to_apply", "true_computation", "false_computation"):
            name = self.attribute(attribute)
            if name:
                called.append(name)
        branches = self.find(r"branch_computations=\{([^}]*)\}")
        called += _NAME.findall(branches)
        return tuple(called)

    @property
    def source(self) -> str:
        """The operation that it comes from, by its name in jax."""
        return self.find(r'op_name="([^"]*)"').replace("\\'", "'")  # the text escapes quotes


@dataclasses.dataclass(frozen=True)
class Program:
    """An executable."""

    entry: str
    computations: dict[str, tuple[Instruction, ...]]

    def count_trips(self, loop: Instruction) -> int | None:
        """Return the iterations of a `while`.

        XLA states them, or its counter, from 0, is compared with a constant.
        None: the number is unknown.
        """
        known = loop.find(r'"known_trip_count":\{"n":"(\d+)"')
        if known:
            return int(known)

        numbers = []
        for instruction in self.computations.get(loop.attribute("condition"), ()):
            if instruction.opcode != "constant":
                continue
            number = _read_number(instruction)
            if number is not None:
                numbers.append(number)
        if len(numbers) != 1:
            return None
        return numbers[0]

    def list_instructions(self) -> list[Instruction]:
        """Return the instructions of all computations."""
        return list(itertools.chain.from_iterable(self.computations.values()))


def _read_number(constant: Instruction) -> int | None:
    """Return the whole number of a constant; None for other constants."""
    digits = constant.find(r"^(\d+)\)")
    if not digits:
        return None
    return int(digits)


def parse(text: str) -> Program:
    """Parse the text that `compiled.as_text()` returns."""
    computations: dict[str, tuple[Instruction, ...]] = {}
    entry = ""
    name = ""
    instructions: list[Instruction] = []
    for line in _METADATA.sub(r"kernel_metadata={\1}", text).splitlines():
        if header := _COMPUTATION.match(line):
            is_entry, name = header.groups()
            instructions = []
            if is_entry:
                entry = name
        elif line.startswith("}"):
            computations[name] = tuple(instructions)
        elif instruction := _INSTRUCTION.match(line):
            instructions.append(Instruction(*instruction.groups()))
    assert entry in computations, "this text holds no HLO program"
    return Program(entry, computations)


def list_members(collective: Instruction) -> list[int]:
    """Return the devices, as positions in the mesh, of the first group of a collective.

    Raises:
      ValueError: a form of groups that is not known.
    """
    text = collective.rest
    if match := _MESH_GROUPS.search(text):
        return _list_transposed_members(*match.groups())
    if match := _IOTA_GROUPS.search(text):
        _, group_size, dims_text, order_text = match.groups()
        return _transpose_range(dims_text, order_text)[: int(group_size)]
    if match := _LISTED_GROUPS.search(text):
        return _parse_numbers(match[1])
    if match := _PAIRS.search(text):
        return [int(match[1]), int(match[2])]
    raise ValueError(f"The groups of {collective.name} have an unknown form: {text[:300]}")


def _list_transposed_members(
    axes_text: str,
    dims_text: str | None,
    order_text: str | None,
    along_text: str,
) -> list[int]:
    """Return the devices of the first group along axes of a mesh, which may be transposed."""
    sizes = {}
    for axis, size in re.findall(r"'([^']+)'=(\d+)", axes_text):
        sizes[axis] = int(size)
    along = re.findall(r"'([^']+)'", along_text)
    positions = list_mesh_members(sizes, along)
    if dims_text is None:
        return positions
    devices = _transpose_range(dims_text, order_text)
    return sorted(devices[position] for position in positions)


def list_mesh_members(sizes: Mapping[str, int], along: Container[str]) -> list[int]:
    """Return the positions in a mesh of the first group along some of its axes.

    Args:
      sizes: lengths of the axes of the mesh.
      along: axes of the group.
    """
    shape = tuple(sizes.values())
    grid = np.arange(math.prod(shape)).reshape(shape)
    index: list[int | slice] = [0] * len(shape)
    for position, axis in enumerate(sizes):
        if axis in along:
            index[position] = slice(None)
    group: list[int] = grid[tuple(index)].ravel().tolist()
    return group


def _transpose_range(dims_text: str, order_text: str | None) -> list[int]:
    """Return `range(product of dims)`, shaped to these dims, transposed and flattened."""
    dims = _parse_numbers(dims_text)
    grid = np.arange(math.prod(dims)).reshape(dims)
    if order_text is None:
        transposed = grid.transpose()
    else:
        transposed = grid.transpose(_parse_numbers(order_text))
    numbers: list[int] = transposed.ravel().tolist()
    return numbers


def _parse_numbers(text: str) -> list[int]:
    """Return the numbers of "1,2,3"; none of ""."""
    return [int(number) for number in text.split(",") if number]


def _read_parentheses(text: str) -> str:
    """Return the text up to the parenthesis that closes one before the text."""
    depth = 1
    for position, letter in enumerate(text):
        if letter == "(":
            depth += 1
        elif letter == ")":
            depth -= 1
        if depth == 0:
            return text[:position]
    return text


def _parse_array(groups: tuple[str, str, str, str]) -> Array:
    """Return an array from the groups of `_ARRAY`."""
    kind, dims_text, order_text, layout = groups
    bits = 8
    if kind != "pred":
        bits = int(kind.lstrip("bfsuc"))
    sides: list[int] = []
    tile = _TILE.search(layout)
    if tile is not None:
        sides = _parse_numbers(tile[1])
    is_in_other_memory = re.search(r"S\(\d+\)", layout) is not None
    return Array(
        dims=tuple(_parse_numbers(dims_text)),
        bits=bits,
        minor_to_major=tuple(_parse_numbers(order_text)),
        tile=tuple(sides),
        is_in_hbm=not is_in_other_memory,
    )
