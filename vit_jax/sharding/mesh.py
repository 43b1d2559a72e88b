"""One mesh for every run, from a laptop's single device to a pod.

Axes: `replica` between slices or nodes, `data` within one, `model` for tensor parallelism.
"""

from collections.abc import Sequence

import jax
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

AXES = ("replica", "data", "model")
BATCH_AXES = ("replica", "data")


def build_mesh(devices: Sequence[jax.Device]) -> Mesh:
    """All devices along the data axis, in the order that suits their network."""
    grid = mesh_utils.create_device_mesh((1, len(devices), 1), devices)
    return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """The batch dimension split over replicas and data, the others whole."""
    return NamedSharding(mesh, PartitionSpec(BATCH_AXES))


def replicated(mesh: Mesh) -> NamedSharding:
    """The whole array on every device."""
    return NamedSharding(mesh, PartitionSpec())
