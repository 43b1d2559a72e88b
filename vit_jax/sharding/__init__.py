"""Which device holds what: the mesh, and rules that place every parameter on it."""

from vit_jax.sharding.mesh import batch_sharding, build_mesh, replicated
from vit_jax.sharding.rules import shard_tree

__all__ = ["batch_sharding", "build_mesh", "replicated", "shard_tree"]
