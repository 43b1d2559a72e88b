"""Machines by name.

"v5e:16x16", "2*v5p:8x8x8" (two slices), "h100:8", "4*h100:8" (four nodes of eight GPUs).

Other names of the same machines: Google Cloud's types "v5litepod-256" and "2*v5p-1024", "v5e-256",
"8xH100", and a GPU by its product's name, "A100-SXM4-80GB".

A topology lists stand-ins for its devices, and the time of collectives between them. Neither the
machine nor a compiler for it is needed.
"""

import dataclasses
import itertools
import math
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from vit_jax.sharding.chips import GIB, Chip, find_chip
from vit_jax.sharding.fabrics import FABRICS, Fabric, Group, collective_seconds, find_fabric
from vit_jax.text.nearest import closest, did_you_mean

_FORM = re.compile(r"(?:(\d+)\*)?([a-z][a-z0-9-]*):(\d+(?:x\d+)*)")
_FORMS_TEXT = (
    "KIND:SHAPE (v5e:16x16, v5p:8x8x8, h100:8), SLICES*KIND:SHAPE (2*v5e:16x16), "
    "a type of Google Cloud (v5litepod-256) or NxGPU (8xH100)"
)
_NUM_SUGGESTIONS = 3
_SHAPES = {  # by the number of axes
    2: ((1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16)),
    3: ((1, 1, 1), (2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4)),
}
_CUBES = (  # shapes of Google Cloud's types
    (4, 4, 4),
    (4, 4, 8),
    (4, 8, 8),
    (8, 8, 8),
    (8, 8, 16),
    (8, 16, 16),
    (16, 16, 16),
)
_CUBE = 4  # larger slices with three axes are made of cubes of this side
_HOST = (2, 2, 1)  # chips of one host along each axis


class _CloudType(NamedTuple):
    """A kind of machine in the names of Google Cloud's types."""

    kind: str
    shapes: Sequence[tuple[int, ...]]
    cores_per_chip: int  # counted by the number in the name


_CLOUD_TYPES = {
    "v5litepod": _CloudType("v5e", _SHAPES[2], 1),
    "v5e": _CloudType("v5e", _SHAPES[2], 1),  # a usual name, not one of Google Cloud
    "v6e": _CloudType("v6e", _SHAPES[2], 1),
    "v4": _CloudType("v4", (*_SHAPES[3], *_CUBES), 2),
    "v5p": _CloudType("v5p", (*_SHAPES[3], *_CUBES), 2),
}

_CLOUD_TYPE = re.compile(rf"(?:tpu-)?(?P<type>{'|'.join(_CLOUD_TYPES)})-(?P<number>\d+)")
_GPUS_FIRST = re.compile(r"(?P<number>\d+) ?x ?(?P<gpu>[a-z].*)")

Device = Any  # a device of JAX, which does not type its coordinates, or a stand-in
CollectiveSeconds = Callable[[str, int, tuple[int, ...]], float]
"""Takes an operation, bytes and positions in the mesh; returns seconds."""


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

    name: str  # written by the user
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
        if not self.is_tpu:
            return (False,)
        closes = []
        for length in self.shape:
            closes.append(length % self.fabric.wraps_at == 0)
        if self.fabric.num_axes == 2:
            return tuple(closes)
        return (all(closes),) * 3

    @property
    def num_hosts(self) -> int:
        return len({device.process_index for device in self.stand_ins()})

    def stand_ins(self) -> list[StandIn]:
        """Devices in name only, in the order in which jax lists the real ones."""
        chips = self._list_chips()
        hosts_per_slice = chips[-1][1] + 1
        platform = "tpu" if self.is_tpu else "gpu"
        devices: list[StandIn] = []
        for slice_index in range(self.num_slices):
            first_host = slice_index * hosts_per_slice
            for coords, host in chips:
                device = StandIn(
                    id=len(devices),
                    platform=platform,
                    device_kind=self.fabric.device_kind,
                    coords=coords,
                    process_index=first_host + host,
                    slice_index=slice_index,
                )
                devices.append(device)
        return devices

    def _list_chips(self) -> list[tuple[tuple[int, int, int], int]]:
        """Return coordinates and host of every chip of a slice, host after host."""
        x_length, y_length, z_length = (*self.shape, 1, 1)[:3]
        x_side, y_side, z_side = _HOST if self.is_tpu else (self.chips_per_slice, 1, 1)
        x_side = min(x_side, x_length)
        y_side = min(y_side, y_length)
        z_side = min(z_side, z_length)

        chips = []
        first_chips = itertools.product(
            range(0, z_length, z_side),
            range(0, y_length, y_side),
            range(0, x_length, x_side),
        )
        for host, (z0, y0, x0) in enumerate(first_chips):
            for z, y, x in itertools.product(range(z_side), range(y_side), range(x_side)):
                coords = (x0 + x, y0 + y, z0 + z)
                chips.append((coords, host))
        return chips


def parse_topology(name: str, *, num_slices: int | None = None) -> Topology:
    """Parse "[SLICES*]KIND:SHAPE", for GPUs "[NODES*]KIND:GPUS", or another name of the machine.

    Other names are a type of Google Cloud, a GPU and "NxGPU"; upper case is equal to lower case.
    `num_slices` may state the number of slices instead.

    Raises:
      ValueError: there is no such machine.
    """
    match = _FORM.fullmatch(_normalize_name(name))
    if not match:
        raise ValueError(
            f"--topology={name} is not a machine: must be {_FORMS_TEXT}.{_suggest_machines(name)}"
        )
    slices_text, kind, shape_text = match.groups()
    fabric = find_fabric(kind)
    if fabric is None:
        kinds = [fabric.kind for fabric in FABRICS]
        hint = did_you_mean(kind, kinds, "{}", most=_NUM_SUGGESTIONS)
        raise ValueError(
            f"--topology={name}: there is no kind {kind!r}.{hint} Kinds: {', '.join(kinds)}."
        )
    if slices_text is not None and num_slices is not None:
        raise ValueError(
            f"--topology={name} and --slices={num_slices} both say how many slices there are: "
            "give one."
        )
    count = 1
    if slices_text is not None:
        count = int(slices_text)
    elif num_slices is not None:
        count = num_slices
    shape = tuple(map(int, shape_text.split("x")))
    problem = _check(fabric, shape, count)
    if problem:
        raise ValueError(f"--topology={name}: {problem}.")
    if num_slices is not None:
        name = f"{num_slices}*{name}"
    return Topology(name, fabric, shape, count)


def _normalize_name(name: str) -> str:
    """Return the machine as "[SLICES*]KIND:SHAPE"; unknown names only in lower case.

    Raises:
      ValueError: Google Cloud has no slice of this size.
    """
    lower = name.strip().lower()
    slices, star, machine = lower.rpartition("*")
    match = _CLOUD_TYPE.fullmatch(machine)
    if match is not None:
        cloud_type = match["type"]
        kind = _CLOUD_TYPES[cloud_type].kind
        shape = _find_cloud_shape(name, cloud_type, int(match["number"]))
        return f"{slices}{star}{kind}:{_format_shape(shape)}"

    match = _GPUS_FIRST.fullmatch(machine)
    if match is not None:  # the form 8xh100
        gpu_kind = _find_gpu_kind(match["gpu"])
        number = int(match["number"])
        if gpu_kind is None or not number:
            return lower
        return _format_gpus(slices + star, gpu_kind, number)

    gpu, _, number_text = machine.partition(":")
    gpu_kind = _find_gpu_kind(gpu)
    number = _parse_number(number_text or "1")
    if gpu_kind is None or not number:
        return lower
    return f"{slices}{star}{gpu_kind}:{number}"


def _parse_number(text: str) -> int:
    """Return a whole number; 0 for other text."""
    if not text.isdecimal():
        return 0
    return int(text)


def _format_gpus(slices: str, kind: str, number: int) -> str:
    """Return GPUs as nodes: more than a node has are complete nodes, where they divide."""
    fabric = find_fabric(kind)
    assert fabric is not None, "the kind was found among the fabrics"
    num_nodes, rest = divmod(number, fabric.largest_slice)
    if num_nodes > 1 and not rest and not slices:
        return f"{num_nodes}*{kind}:{fabric.largest_slice}"
    return f"{slices}{kind}:{number}"


def _find_gpu_kind(name: str) -> str | None:
    """Return the kind of a GPU from its kind or the name of its product; None for other names."""
    words = name.removeprefix("nvidia").strip(" -").replace(" ", "-")
    for fabric in FABRICS:
        if fabric.num_axes:
            continue
        product = fabric.device_kind.lower().replace(" ", "-")
        if words in (fabric.kind, product, product.removeprefix("geforce-"), *_list_sizes(fabric)):
            return fabric.kind
    return None


def _list_sizes(fabric: Fabric) -> list[str]:
    """Return the names of a GPU with its memory or its form, such as "h100-80gb" and "h100-sxm"."""
    chip = find_chip(fabric.device_kind)
    assert chip is not None, fabric.device_kind
    gigabytes = f"{chip.memory_bytes // GIB}gb"
    base = fabric.kind.removesuffix(f"-{gigabytes}")
    names = [f"{base}-{gigabytes}"]
    for form in ("sxm", "sxm2", "sxm4", "sxm5"):
        names.append(f"{base}-{form}-{gigabytes}")
        if base == fabric.kind:
            names.append(f"{base}-{form}")
    return names


def _find_cloud_shape(
    name: str,
    cloud_type: str,
    number: int,
) -> tuple[int, ...]:
    """Return the shape of a slice of Google Cloud.

    Raises:
      ValueError: there is no slice of this size.
    """
    machines = _CLOUD_TYPES[cloud_type]
    sizes: dict[int, tuple[int, ...]] = {}
    for shape in machines.shapes:
        num_cores = math.prod(shape) * machines.cores_per_chip
        sizes.setdefault(num_cores, shape)
    if number in sizes:
        return sizes[number]
    cubes = _find_cubes(machines, number)
    if cubes is not None:
        return cubes

    by_distance = sorted(sizes, key=lambda size: abs(size - number))
    nearest = [f"{cloud_type}-{size}" for size in sorted(by_distance[:2])]
    suggestions = " or ".join(nearest)
    if len(machines.shapes[0]) == 3:
        suggestions += f", or a shape such as {cloud_type}:4x4x12"
    raise ValueError(f"--topology={name}: there is no slice of this size. Use {suggestions}.")


def _find_cubes(cloud_type: _CloudType, number: int) -> tuple[int, ...] | None:
    """Return the most compact shape of complete cubes with this number of cores, or None."""
    fabric = find_fabric(cloud_type.kind)
    assert fabric is not None, cloud_type.kind
    chips_per_cube = _CUBE**3
    num_cubes, rest = divmod(number, cloud_type.cores_per_chip * chips_per_cube)
    if fabric.num_axes == 2 or rest or num_cubes * chips_per_cube > fabric.largest_slice:
        return None

    shapes = []
    for low in range(1, num_cubes + 1):
        for middle in range(low, num_cubes // low + 1):
            high, rest = divmod(num_cubes, low * middle)
            if not rest and high >= middle:
                shapes.append((_CUBE * low, _CUBE * middle, _CUBE * high))
    return min(shapes, key=sum, default=None)


def _suggest_machines(name: str) -> str:
    """Return machines that are spelled like a name, or those of the kind that it begins with."""
    _, _, machine = name.strip().lower().rpartition("*")
    lower = _GPUS_FIRST.sub(r"\g<gpu>", machine)
    machines = []
    for fabric in FABRICS:
        if fabric.num_axes:
            shapes = _SHAPES[fabric.num_axes]
            machines.append(f"{fabric.kind}:{_format_shape(shapes[-1])}")
        else:
            machines.append(f"{fabric.kind}:{fabric.largest_slice}")

    kind, *_ = re.split("[^a-z0-9]", lower)
    similar = [machine for machine in machines if kind and machine.startswith(kind)]
    if not similar:
        similar = closest(lower, machines, most=_NUM_SUGGESTIONS)
    if not similar:
        return ""
    suggestions = " or ".join(similar)
    return f" Did you mean {suggestions}?"


def _format_shape(shape: Sequence[int]) -> str:
    """Return a shape as a user writes it, such as "4x4"."""
    return "x".join(map(str, shape))


def _check(
    fabric: Fabric,
    shape: tuple[int, ...],
    num_slices: int,
) -> str | None:
    """Return the rule that a machine violates."""
    if num_slices < 1:
        return f"{num_slices} slices: must be 1 or more"
    if not fabric.num_axes:
        return _check_gpus(fabric, shape)
    return _check_slice(fabric, shape)


def _check_gpus(fabric: Fabric, shape: tuple[int, ...]) -> str | None:
    """Return the rule that a number of GPUs of one node violates."""
    most = fabric.largest_slice
    if len(shape) == 1 and 1 <= shape[0] <= most:
        return None
    kind = fabric.kind
    return f"must be {kind}:N with 1 to {most} GPUs of a node, or 2*{kind}:{most} for two nodes"


def _check_slice(fabric: Fabric, shape: tuple[int, ...]) -> str | None:
    """Return the rule that the shape of a slice of TPUs violates."""
    most = fabric.largest_slice
    has_cubes = fabric.num_axes == 3
    if shape in _SHAPES[fabric.num_axes]:
        return None
    if has_cubes and _is_made_of_cubes(shape) and math.prod(shape) <= most:
        return None
    allowed = ", ".join(map(_format_shape, _SHAPES[fabric.num_axes]))
    if has_cubes:
        allowed += (
            f", or AxBxC with A <= B <= C, each a multiple of {_CUBE}, of at most {most} chips"
        )
    return f"a slice of {fabric.kind} must be one of {allowed}"


def _is_made_of_cubes(shape: tuple[int, ...]) -> bool:
    """Return True for three lengths in ascending order, each a multiple of a cube's side."""
    if len(shape) != 3 or list(shape) != sorted(shape):
        return False
    return all(length > 0 and length % _CUBE == 0 for length in shape)


def make_collective_seconds(devices: Iterable[Device], topology: Topology) -> CollectiveSeconds:
    """Return a function for the time of collectives between devices in the order of the mesh."""
    devices = list(devices)

    def estimate_seconds(
        operation: str,
        num_bytes: int,
        positions: tuple[int, ...],
    ) -> float:
        group = build_group([devices[position] for position in positions], topology)
        return collective_seconds(operation, num_bytes, group, topology.fabric)

    return estimate_seconds


def build_group(members: Sequence[Device], topology: Topology) -> Group:
    """Return the group that these devices form on the topology's fabric."""
    members_by_slice: dict[int, list[Device]] = {}
    for member in members:
        number = _get_slice(member, topology)
        members_by_slice.setdefault(number, []).append(member)
    num_slices = len(members_by_slice)
    first_members = next(iter(members_by_slice.values()))
    if not topology.is_tpu:
        return Group(num_switched=len(first_members), num_slices=num_slices)

    positions_by_axis = []
    for axis in range(len(topology.shape)):
        positions_by_axis.append(sorted({member.coords[axis] for member in first_members}))
    if math.prod(map(len, positions_by_axis)) != len(first_members):
        # Not a box: count it as a line through all of them
        return Group((len(first_members),), (False,), num_slices=num_slices)

    lengths = []
    rings = []
    stride = 1
    axes = zip(positions_by_axis, topology.shape, topology.is_ring, strict=True)
    for positions, length, closes in axes:
        if len(positions) == 1:
            continue
        step = positions[1] - positions[0]
        lengths.append(len(positions))
        rings.append(closes and len(positions) * step == length)
        stride = max(stride, step)
    return Group(tuple(lengths), tuple(rings), stride, num_slices=num_slices)


def _get_slice(member: Device, topology: Topology) -> int:
    """Return the slice or node of a device.

    GPUs to compile for name their node as the process only.
    """
    if topology.num_slices == 1:
        return 0
    if topology.is_tpu:
        return getattr(member, "slice_index", None) or 0
    return getattr(member, "process_index", None) or 0
