"""The device mesh, the placement of parameters and training state on it, and the layout of activations."""

from vit_jax.sharding.mesh import AXES as AXES
from vit_jax.sharding.mesh import BATCH_AXES as BATCH_AXES
from vit_jax.sharding.mesh import Placement as Placement
from vit_jax.sharding.mesh import batch_sharding as batch_sharding
from vit_jax.sharding.mesh import build_mesh as build_mesh
from vit_jax.sharding.mesh import compiler_options as compiler_options
from vit_jax.sharding.mesh import count_slices as count_slices
from vit_jax.sharding.mesh import replicated as replicated
from vit_jax.sharding.partition import shard_tree as shard_tree
from vit_jax.sharding.partition import spec_of as spec_of
