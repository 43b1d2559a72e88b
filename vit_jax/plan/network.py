"""Which chips a collective of a compiled step joins, and so how long it takes on their fabric."""

import math
from collections.abc import Callable, Sequence
from typing import Any

from vit_jax.cost.fabrics import Group, collective_seconds
from vit_jax.plan.topology import Topology


def make_collective_seconds(devices: Sequence[Any], topology: Topology) -> Callable[[str, int, tuple[int, ...]], float]:
    """Returns (operation, bytes, positions in the mesh) -> seconds.

    Args:
      devices: of the mesh, in its order: what positions count in.
      topology: whose fabric joins them.
    """

    def seconds(operation: str, num_bytes: int, positions: tuple[int, ...]) -> float:
        group = group_of([devices[position] for position in positions], topology)
        return collective_seconds(operation, num_bytes, group, topology.fabric)

    return seconds


def group_of(members: Sequence[Any], topology: Topology) -> Group:
    """Where these devices lie to each other."""
    slices: dict[int, list[Any]] = {}
    for member in members:
        slices.setdefault(_slice_of(member, topology), []).append(member)
    inside = next(iter(slices.values()))
    if not topology.is_tpu:
        return Group(num_switched=len(inside), num_slices=len(slices))
    axes = [sorted({member.coords[axis] for member in inside}) for axis in range(len(topology.shape))]
    if math.prod(map(len, axes)) != len(inside):  # no box: a line through all of them
        return Group((len(inside),), (False,), num_slices=len(slices))
    lengths, rings, stride = [], [], 1
    for places, length, closes in zip(axes, topology.shape, topology.is_ring, strict=True):
        if len(places) > 1:
            step = places[1] - places[0]
            lengths.append(len(places))
            rings.append(closes and len(places) * step == length)
            stride = max(stride, step)
    return Group(tuple(lengths), tuple(rings), stride, num_slices=len(slices))


def _slice_of(device: Any, topology: Topology) -> int:
    index = getattr(device, "slice_index", None) if topology.num_slices > 1 else 0
    return index or 0
