"""Parses optimised HLO text into computations and instructions.

Only what an estimate needs: order, operands, array sizes, called computations, loop lengths, XLA's
own cycle counts.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Container, Iterator, Mapping

import numpy as np

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*)$")
_ARRAY = re.compile(r"\b(pred|bf16|[a-z]\d+)\[([\d,]*)\](?:\{([\d,]*)((?:[:A-Z*][^}]*)?)\})?")
_NAME = re.compile(r"%([\w.\-]+)")
_METADATA = re.compile(
    r"kernel_metadata=\{\n(.*?)\n\}", re.DOTALL
)  # all else of an instruction is on one line
_TILE = re.compile(r"T\(([\d,]+)\)(?:\((\d+),1\))?")
_MESH_GROUPS = re.compile(
    r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))? \{([^}]*)\}"
)
_IOTA_GROUPS = re.compile(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_LISTED_GROUPS = re.compile(r"replica_groups=\{\{([\d,]+)\}")
_PAIRS = re.compile(r"source_target_pairs=\{\{(\d+),(\d+)\}")


@dataclasses.dataclass(frozen=True)
class Array:
    """One array of a shape: dims, bits of a value, layout from minor to major, tile, and whether it is in HBM."""

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
        dims = [self.dims[dim] for dim in reversed(self.minor_to_major)] or list(self.dims)
        for place in range(1, min(len(self.tile), len(dims)) + 1):
            dims[-place] = -(-dims[-place] // self.tile[-place]) * self.tile[-place]
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
        return tuple(_arrays(self.shape))

    @functools.cached_property
    def operands(self) -> tuple[str, ...]:
        return tuple(_NAME.findall(_within_parentheses(self.rest)))

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
        """Name of the library function that a custom call runs; "" of other instructions."""
        return self.find(r'custom_call_target="([^"]*)"') if self.opcode == "custom-call" else ""

    @property
    def kernel(self) -> str:
        """The program of a kernel, as XLA carries it along."""
        return self.find(r'"body":"([^"]*)"')

    @property
    def programs(self) -> int | None:
        """Steps of a kernel's grid, where the kernel states them in its metadata."""
        return int(self.find(r'"programs":"(\d+)"') or 0) or None

    def attribute(self, name: str) -> str:
        """Return the name in an attribute such as "calls", "body" or "channel_id"; "" without it."""
        return self.find(rf"\b{name}=%?([\w.\-]+)")

    def find(self, pattern: str | re.Pattern[str]) -> str:
        """Return the first group of a pattern in the operands and attributes; "" without a match."""
        match = re.search(pattern, self.rest)
        return match[1] if match else ""

    @property
    def called(self) -> tuple[str, ...]:
        """Computations that a call, a fusion or a conditional runs."""
        names = (
            self.attribute(key)
            for key in ("calls", "to_apply", "true_computation", "false_computation")
        )
        branches = self.find(r"branch_computations=\{([^}]*)\}")
        return (*filter(None, names), *_NAME.findall(branches))

    @property
    def source(self) -> str:
        """The operation that it comes from, as jax names it."""
        return self.find(r'op_name="([^"]*)"').replace("\\'", "'")  # as the program escapes it


@dataclasses.dataclass(frozen=True)
class Program:
    """An executable."""

    entry: str
    computations: dict[str, tuple[Instruction, ...]]

    def trip_count(self, loop: Instruction) -> int | None:
        """Iterations of a `while`: XLA's number, or the constant that its counter, from 0, is compared with.

        None if unknown.
        """
        if known := loop.find(r'"known_trip_count":\{"n":"(\d+)"'):
            return int(known)
        condition = self.computations.get(loop.attribute("condition"), ())
        numbers = [
            *filter(None, (c.find(r"^(\d+)\)") for c in condition if c.opcode == "constant"))
        ]
        return int(numbers[0]) if len(numbers) == 1 else None


def parse(text: str) -> Program:
    """Parse the text that `compiled.as_text()` returns."""
    computations: dict[str, tuple[Instruction, ...]] = {}
    entry = ""
    name = ""
    lines = list[Instruction]()
    for line in _METADATA.sub(r"kernel_metadata={\1}", text).splitlines():
        if header := _COMPUTATION.match(line):
            name = header[2]
            lines = []
            entry = name if header[1] else entry
        elif line.startswith("}"):
            computations[name] = tuple(lines)
        elif instruction := _INSTRUCTION.match(line):
            lines.append(Instruction(*instruction.groups()))
    assert entry in computations, "this text holds no HLO program"
    return Program(entry, computations)


def members(collective: Instruction) -> list[int]:
    """The devices, as positions in the mesh, of the first group of a collective.

    Raises:
      ValueError: a form of groups that is not known.
    """
    text = collective.rest
    if match := _MESH_GROUPS.search(text):
        sizes = {key: int(size) for key, size in re.findall(r"'([^']+)'=(\d+)", match[1])}
        places = mesh_members(sizes, re.findall(r"'([^']+)'", match[4]))
        return (
            sorted(_transposed_range(match[2], match[3])[place] for place in places)
            if match[2]
            else places
        )
    if match := _IOTA_GROUPS.search(text):
        return _transposed_range(match[3], match[4])[: int(match[2])]
    if match := _LISTED_GROUPS.search(text) or _PAIRS.search(text):
        return [int(number) for number in ",".join(match.groups()).split(",")]
    raise ValueError(f"The groups of {collective.name} have an unknown form: {text[:300]}")


def mesh_members(sizes: Mapping[str, int], along: Container[str]) -> list[int]:
    """Return the positions in a mesh, with axes of these sizes, of the first group along some of the axes."""
    grid = np.arange(math.prod(sizes.values())).reshape(tuple(sizes.values()))
    group: list[int] = (
        grid[tuple(slice(None) if axis in along else 0 for axis in sizes)].ravel().tolist()
    )
    return group


def _transposed_range(dims_text: str, order_text: str | None) -> list[int]:
    """`range(product of dims)`, shaped to these dims, transposed and flattened."""
    dims = [int(dim) for dim in dims_text.split(",")]
    order = [int(dim) for dim in order_text.split(",")] if order_text else None
    numbers: list[int] = np.arange(math.prod(dims)).reshape(dims).transpose(order).ravel().tolist()
    return numbers


def _within_parentheses(text: str) -> str:
    depth = 1
    for place, letter in enumerate(text):
        depth += {"(": 1, ")": -1}.get(letter, 0)
        if not depth:
            return text[:place]
    return text


def _arrays(shape: str) -> Iterator[Array]:
    for kind, dims_text, order_text, layout in _ARRAY.findall(shape):
        bits = 8 if kind == "pred" else int(kind.lstrip("bfsuc"))
        dims = tuple(int(dim) for dim in dims_text.split(",") if dim)
        order = tuple(int(dim) for dim in order_text.split(",") if dim)
        tile = _TILE.search(layout)
        sides = tuple(int(side) for side in tile[1].split(",")) if tile else ()
        memory = re.search(r"S\((\d+)\)", layout)
        yield Array(dims, bits, order, sides, memory is None)
