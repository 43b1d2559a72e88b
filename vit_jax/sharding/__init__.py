"""The device mesh, the placement of parameters and training state on it, and the layout of activations."""

from vit_jax.sharding.activations import place_activations
from vit_jax.sharding.mesh import batch_sharding, build_mesh, compiler_options, replicated
from vit_jax.sharding.rules import shard_tree, spec_of

__all__ = [
    "batch_sharding",
    "build_mesh",
    "compiler_options",
    "place_activations",
    "replicated",
    "shard_tree",
    "spec_of",
]
