"""Interconnects of accelerators: links within a slice or node, the network between them.

The numbers are from data sheets. `collective_seconds` models a collective as a ring on every axis
of a torus. No jax here.
"""

import dataclasses
import math

from vit_jax.sharding.chips import find_chip

GIB = 2**30
GIGA = 1e9


@dataclasses.dataclass(frozen=True)
class Fabric:
    """The network of one kind of machine, as planned for.

    Attributes:
      kind: the word of a topology, such as "v5e".
      device_kind: the name that jax has for its chips; `chips.find_chip` knows it.
      num_axes: axes of the torus within a slice, two links of every chip on each; 0 for GPUs behind
        a switch.
      link_bytes_per_second: one link of the torus in one direction; for a GPU, all its links to the
        switch.
      network_bytes_per_second: from one chip to other slices or nodes.
      cores_per_chip: the unit of "core-days"; 1 for GPUs.
      clock_hertz: peak FLOP/s divided by the operations of the matrix units in a cycle; 0 where no
        compiler counts cycles.
      wraps_at: the length, or its multiples, from which an axis closes into a ring; 0 for GPUs.
      usable_bytes: memory for a program, as XLA for TPUs reports it when a program does not fit;
        for GPUs an assumed 92 %.
      largest_slice: chips, or GPUs of a node.
      source: the document with these numbers.
    """

    kind: str
    device_kind: str
    num_axes: int
    link_bytes_per_second: float
    network_bytes_per_second: float
    cores_per_chip: int
    clock_hertz: float
    wraps_at: int
    usable_bytes: int
    largest_slice: int
    source: str


def _build_gpus(
    kind: str,
    device_kind: str,
    gib: int,
    nvlink: float,
    cards: float,
    system: str,
) -> Fabric:
    """Return a node of up to eight GPUs.

    Each has `gib` of memory, `nvlink` GB/s of NVLink or PCIe in both directions, and `cards` Gbit/s
    of network.
    """
    return Fabric(
        kind,
        device_kind,
        num_axes=0,
        link_bytes_per_second=nvlink / 2 * GIGA,
        network_bytes_per_second=cards / 8 * GIGA,
        cores_per_chip=1,
        clock_hertz=0,
        wraps_at=0,
        usable_bytes=int(0.92 * gib * GIB),
        largest_slice=8,
        source=f"NVIDIA {system}",
    )


_PCIE = "PCIe 4.0 x16 without NVLink; network assumed"

FABRICS = (
    Fabric(
        "v4",
        "TPU v4",
        num_axes=3,
        link_bytes_per_second=50 * GIGA,
        network_bytes_per_second=6.25 * GIGA,
        cores_per_chip=2,
        clock_hertz=1.05 * GIGA,
        wraps_at=4,
        usable_bytes=int(30.75 * GIB),
        largest_slice=4096,
        source="Jouppi et al., ISCA 2023 (links); network taken as v5p's",
    ),
    Fabric(
        "v5e",
        "TPU v5 lite",
        num_axes=2,
        link_bytes_per_second=50 * GIGA,
        network_bytes_per_second=3.125 * GIGA,
        cores_per_chip=1,
        clock_hertz=1.5 * GIGA,
        wraps_at=16,
        usable_bytes=int(15.75 * GIB),
        largest_slice=256,
        source=(
            "Google Cloud TPU v5e page: 400 GB/s over 4 links in both directions, "
            "6.4 Tbit/s a pod of 256"
        ),
    ),
    Fabric(
        "v5p",
        "TPU v5",
        num_axes=3,
        link_bytes_per_second=100 * GIGA,
        network_bytes_per_second=6.25 * GIGA,
        cores_per_chip=2,
        clock_hertz=1.75 * GIGA,
        wraps_at=4,
        usable_bytes=int(95.74 * GIB),
        largest_slice=6144,
        source=(
            "Google Cloud TPU v5p page: 1200 GB/s over 6 links in both directions, 50 Gbit/s a chip"
        ),
    ),
    Fabric(
        "v6e",
        "TPU v6 lite",
        num_axes=2,
        link_bytes_per_second=100 * GIGA,
        network_bytes_per_second=12.5 * GIGA,
        cores_per_chip=1,
        clock_hertz=1.75 * GIGA,
        wraps_at=16,
        usable_bytes=int(31.25 * GIB),
        largest_slice=256,
        source=(
            "Google Cloud TPU v6e page: 800 GB/s over 4 links in both directions; "
            "network of 100 Gbit/s a chip assumed"
        ),
    ),
    _build_gpus("v100", "V100-SXM2-32GB", 32, 300, 100, "DGX-1 data sheet, with V100 32GB"),
    _build_gpus("a100-40gb", "A100-SXM4-40GB", 40, 600, 200, "DGX A100 data sheet"),
    _build_gpus("a100-80gb", "A100-SXM4-80GB", 80, 600, 200, "DGX A100 data sheet"),
    _build_gpus("h100", "H100 80GB HBM3", 80, 900, 400, "DGX H100 data sheet"),
    _build_gpus("h200", "H200", 141, 900, 400, "DGX H200 data sheet"),
    _build_gpus("l4", "L4", 24, 64, 12.5, f"L4 data sheet; {_PCIE}"),
    _build_gpus("rtx3090", "GeForce RTX 3090", 24, 64, 1.25, f"GA102 white paper; {_PCIE}"),
    _build_gpus("rtx4090", "GeForce RTX 4090", 24, 64, 1.25, f"Ada white paper; {_PCIE}"),
    _build_gpus("b200", "B200", 180, 1800, 400, "DGX B200 data sheet"),
)

HOP_SECONDS = 1e-6
"""Time from one chip to the next; an assumption."""
NETWORK_SECONDS = 20e-6
"""Time from one slice or node to another; an assumption."""
PASSES = {
    "all-reduce": 2,
    "all-gather": 1,
    "reduce-scatter": 1,
    "all-to-all": 0.25,
    "collective-permute": 1,
}
"""Passes of the complete array over each chip's links.

An all-to-all on a ring sends a quarter past the middle.
"""


@dataclasses.dataclass(frozen=True)
class Group:
    """The chips that take part in one collective.

    Attributes:
      lengths: lengths of the torus' axes that the group spans, without those of length 1; () behind a
        switch.
      is_ring: for each of these axes, True if its ends are joined.
      stride: largest distance of neighbours along an axis, and number of groups that share each
        link.
      num_switched: GPUs of one node that take part; 1 for TPUs.
      num_slices: slices or nodes that take part.
    """

    lengths: tuple[int, ...] = ()
    is_ring: tuple[bool, ...] = ()
    stride: int = 1
    num_switched: int = 1
    num_slices: int = 1


def collective_seconds(operation: str, num_bytes: float, group: Group, fabric: Fabric) -> float:
    """Return the time of one collective that has the links to itself.

    Within a slice all axes of the group work at once, each with one link, two where it is a ring.
    Between slices each chip sends its share of the array. `operation` is a key of `PASSES`;
    `num_bytes` are of the complete array.
    """
    num_members = group.num_switched * math.prod(group.lengths)
    inside = 0.0
    if num_members > 1:
        inside = _compute_inside_seconds(operation, num_bytes, group, fabric)
    if group.num_slices == 1:
        return inside

    passes = max(PASSES[operation], 1)
    share = num_bytes / num_members  # bytes that each chip sends to other slices
    across = passes * share * (1 - 1 / group.num_slices) / fabric.network_bytes_per_second
    return inside + across + passes * NETWORK_SECONDS


def _compute_inside_seconds(
    operation: str,
    num_bytes: float,
    group: Group,
    fabric: Fabric,
) -> float:
    """Return the time within a slice or node."""
    num_links = 0
    num_hops = 0
    for length, is_ring in zip(group.lengths, group.is_ring, strict=True):
        if is_ring:
            num_links += 2
            num_hops += length // 2
        else:
            num_links += 1
            num_hops += length - 1
    num_links = max(num_links, 1)
    num_hops = max(num_hops, 1)

    speed = fabric.link_bytes_per_second / group.stride
    if operation == "collective-permute":  # every chip sends its array to its neighbour
        return num_bytes / speed + HOP_SECONDS * group.stride

    passes = PASSES[operation]
    share = 1 - 1 / (group.num_switched * math.prod(group.lengths))
    transfer_seconds = passes * num_bytes * share / (num_links * speed)
    return transfer_seconds + max(passes, 1) * num_hops * HOP_SECONDS


def find_fabric_of_device(device_kind: str) -> Fabric | None:
    """Return the fabric of a device, by the name that jax has for it, or None."""
    chip = find_chip(device_kind)
    if chip is None:
        return None
    for fabric in FABRICS:
        if find_chip(fabric.device_kind) is chip:
            return fabric
    return None


def find_fabric(kind: str) -> Fabric | None:
    """Return the fabric of this kind, or None."""
    for fabric in FABRICS:
        if fabric.kind == kind:
            return fabric
    return None
