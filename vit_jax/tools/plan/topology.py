"""Machines by name: "v5e:16x16", "2*v5p:8x8x8" (two slices), "h100:8", "4*h100:8" (four nodes of eight GPUs).

TPUs also by Google Cloud's type: "v5litepod-256", "2*v5p-1024".

Their devices in name only, and how fast these communicate. Neither the machine nor a compiler for
it is needed.
"""

import dataclasses
import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from vit_jax.sharding.chips import Chip, find_chip
from vit_jax.sharding.fabrics import FABRICS, Fabric, Group, collective_seconds, find_fabric
from vit_jax.text.nearest import did_you_mean

_FORM = re.compile(r"(?:(\d+)\*)?([a-z][a-z0-9-]*):(\d+(?:x\d+)*)")
_SHAPES = {  # by the number of axes
    2: ((1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16)),
    3: ((1, 1, 1), (2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4)),
}
_CUBES = (
    (4, 4, 4),
    (4, 4, 8),
    (4, 8, 8),
    (8, 8, 8),
    (8, 8, 16),
    (8, 16, 16),
    (16, 16, 16),
)  # of Google Cloud's types
_CUBE = 4  # larger slices with three axes are made of cubes of this side
_HOST = (2, 2, 1)  # chips of one host along each axis

CollectiveSeconds = Callable[
    [str, int, tuple[int, ...]], float
]  # (operation, bytes, positions in the mesh)


@dataclasses.dataclass(frozen=True)
class StandIn:
    """A device in name only: enough to lay out a mesh, not to compile for it.

    Fields as jax names them.
    """

    id: int
    platform: str
    device_kind: str
    coords: tuple[int, int, int]
    process_index: int
    slice_index: int
    core_on_chip: int = 0
    client: None = None


@dataclasses.dataclass(frozen=True)
class Topology:
    """A machine."""

    name: str  # as the user wrote it
    fabric: Fabric
    shape: tuple[int, ...]  # chips along each axis of a slice, or (GPUs of a node,)
    num_slices: int  # slices, or nodes

    @property
    def is_tpu(self) -> bool:
        return self.fabric.num_axes > 0

    @property
    def chips_per_slice(self) -> int:
        return math.prod(self.shape)

    @property
    def num_chips(self) -> int:
        return self.chips_per_slice * self.num_slices

    @property
    def chip(self) -> Chip:
        chip = find_chip(self.fabric.device_kind)
        assert chip is not None, self.fabric.device_kind
        return chip

    @property
    def is_ring(self) -> tuple[bool, ...]:
        """True for each axis whose ends are joined. With three axes either all are or none."""
        every = self.fabric.wraps_at
        if not self.is_tpu:
            return (False,)
        closes = tuple(length % every == 0 for length in self.shape)
        return closes if self.fabric.num_axes == 2 else (all(closes),) * 3

    @property
    def num_hosts(self) -> int:
        return len({device.process_index for device in self.stand_ins()})

    def stand_ins(self) -> list[StandIn]:
        """Devices in name only, in the order in which jax lists the real ones."""
        platform = "tpu" if self.is_tpu else "gpu"
        kind = self.fabric.device_kind
        places = list(
            _places((*self.shape, 1, 1)[:3], _HOST if self.is_tpu else (self.chips_per_slice, 1, 1))
        )
        hosts_per_slice = places[-1][1] + 1
        return [
            StandIn(
                i * self.chips_per_slice + index,
                platform,
                kind,
                coords,
                i * hosts_per_slice + host,
                slice_index=i,
            )
            for i in range(self.num_slices)
            for index, (coords, host) in enumerate(places)
        ]


def _places(
    shape: tuple[int, ...], host: tuple[int, int, int]
) -> Iterator[tuple[tuple[int, int, int], int]]:
    """Coordinates of every chip and the number of its host, host after host."""
    sides = [min(side, length) for side, length in zip(host, shape, strict=True)]
    hosts = itertools.product(
        *(range(0, n, side) for n, side in zip(reversed(shape), reversed(sides), strict=True))
    )
    for number, (z0, y0, x0) in enumerate(hosts):
        for z, y, x in itertools.product(*(range(side) for side in reversed(sides))):
            yield (x0 + x, y0 + y, z0 + z), number


def parse_topology(name: str, *, num_slices: int | None = None) -> Topology:
    """Parse "[SLICES*]KIND:SHAPE", for GPUs "[NODES*]KIND:GPUS", or "[SLICES*]TYPE" with a type of Google Cloud.

    `num_slices` may state the number of slices instead.

    Raises:
      ValueError: there is no such machine.
    """
    match = _FORM.fullmatch(_without_type(name))
    if not match:
        forms = "KIND:SHAPE (v5e:16x16, v5p:8x8x8, h100:8), SLICES*KIND:SHAPE (2*v5e:16x16) or a type of Google Cloud"
        raise ValueError(f"--topology={name} is not a machine: must be {forms} (v5litepod-256).")
    before, kind, shape_text = match.groups()
    fabric = find_fabric(kind)
    if fabric is None:
        kinds = [fabric.kind for fabric in FABRICS]
        hint = did_you_mean(kind, kinds, "{}")
        raise ValueError(
            f"--topology={name}: there is no kind {kind!r}.{hint} Kinds: {', '.join(kinds)}."
        )
    if before is not None and num_slices is not None:
        raise ValueError(
            f"--topology={name} and --slices={num_slices} both say how many slices there are: give one."
        )
    count = int(before) if before is not None else 1 if num_slices is None else num_slices
    shape = tuple(int(length) for length in shape_text.split("x"))
    _check(name, fabric, shape, count)
    return Topology(name if num_slices is None else f"{num_slices}*{name}", fabric, shape, count)


def _without_type(name: str) -> str:
    """Replace a type of Google Cloud by its shape; it counts chips (v5e, v6e), or cores (two a chip of v4 and v5p)."""
    match = re.fullmatch(r"((?:\d+\*)?)(v5litepod|v6e|v4|v5p)-(\d+)", name)
    if match is None:
        return name
    slices, kind, number = match.groups()
    kind, axes, cores = {"v5litepod": ("v5e", 2, 1), "v6e": ("v6e", 2, 1)}.get(kind, (kind, 3, 2))
    shapes = [*_SHAPES[axes], *(_CUBES if axes == 3 else ())]
    shape = next((shape for shape in shapes if math.prod(shape) * cores == int(number)), None)
    return name if shape is None else f"{slices}{kind}:{'x'.join(map(str, shape))}"


def _check(name: str, fabric: Fabric, shape: tuple[int, ...], num_slices: int) -> None:
    kind = fabric.kind
    most = fabric.largest_slice
    problem = ""
    if num_slices < 1:
        problem = f"{num_slices} slices: must be 1 or more"
    elif not fabric.num_axes:
        if len(shape) != 1 or not 1 <= shape[0] <= most:
            problem = f"must be {kind}:N with 1 to {most} GPUs of a node, or 2*{kind}:{most} for two nodes"
    elif shape not in _SHAPES[fabric.num_axes]:
        is_sorted = shape == tuple(sorted(shape)) and math.prod(shape) <= most
        is_made_of_cubes = (
            len(shape) == 3 and is_sorted and all(n and n % _CUBE == 0 for n in shape)
        )
        if fabric.num_axes != 3 or not is_made_of_cubes:
            allowed = ", ".join("x".join(map(str, shape)) for shape in _SHAPES[fabric.num_axes])
            cubes = (
                f", or AxBxC with A <= B <= C, each a multiple of {_CUBE}, of at most {most} chips"
            )
            problem = (
                f"a slice of {kind} must be one of {allowed}{cubes if fabric.num_axes == 3 else ''}"
            )
    if problem:
        raise ValueError(f"--topology={name}: {problem}.")


def make_collective_seconds(devices: Iterable[Any], topology: Topology) -> CollectiveSeconds:
    """Return a function for the time of collectives between devices in the order of the mesh."""
    devices = list(devices)

    def seconds(operation: str, num_bytes: int, positions: tuple[int, ...]) -> float:
        group = group_of([devices[position] for position in positions], topology)
        return collective_seconds(operation, num_bytes, group, topology.fabric)

    return seconds


def group_of(members: Sequence[Any], topology: Topology) -> Group:
    """The group that these devices form on the topology's fabric."""
    slices: dict[int, list[Any]] = {}
    for member in members:
        # GPUs to compile for name their node as the process only.
        name = "slice_index" if topology.is_tpu else "process_index"
        index = getattr(member, name, None) if topology.num_slices > 1 else None
        slices.setdefault(index or 0, []).append(member)
    inside = next(iter(slices.values()))
    if not topology.is_tpu:
        return Group(num_switched=len(inside), num_slices=len(slices))
    axes = [
        sorted({member.coords[axis] for member in inside}) for axis in range(len(topology.shape))
    ]
    if math.prod(map(len, axes)) != len(
        inside
    ):  # not a box: count it as a line through all of them
        return Group((len(inside),), (False,), num_slices=len(slices))
    lengths = []
    rings = []
    stride = 1
    for places, length, closes in zip(axes, topology.shape, topology.is_ring, strict=True):
        if len(places) > 1:
            step = places[1] - places[0]
            lengths.append(len(places))
            rings.append(closes and len(places) * step == length)
            stride = max(stride, step)
    return Group(tuple(lengths), tuple(rings), stride, num_slices=len(slices))
