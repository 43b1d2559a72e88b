"""The device mesh, the placement of parameters and state on it, and the layout of activations."""

from vit_jax.sharding.mesh import (
    AXES,
    BATCH_AXES,
    Options,
    Placement,
    batch_sharding,
    build_mesh,
    compiler_options,
    count_slices,
    replicate,
)
from vit_jax.sharding.partition import find_spec, shard_tree

__all__ = [
    "AXES",
    "BATCH_AXES",
    "Options",
    "Placement",
    "batch_sharding",
    "build_mesh",
    "compiler_options",
    "count_slices",
    "find_spec",
    "replicate",
    "shard_tree",
]
