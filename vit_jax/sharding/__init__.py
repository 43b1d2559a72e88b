"""The device mesh, the placement of parameters and state on it, and the layout of activations."""

from vit_jax.sharding.mesh import (
    AXES,
    BATCH_AXES,
    Placement,
    batch_sharding,
    build_mesh,
    compiler_options,
    count_slices,
    replicated,
)
from vit_jax.sharding.partition import shard_tree, spec_of

__all__ = [
    "AXES",
    "BATCH_AXES",
    "Placement",
    "batch_sharding",
    "build_mesh",
    "compiler_options",
    "count_slices",
    "replicated",
    "shard_tree",
    "spec_of",
]
