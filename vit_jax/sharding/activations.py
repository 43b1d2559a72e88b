"""Layout of named activations on a mesh: the batch over replicas and data, heads and hidden units over model.

Without it the compiler may follow the placement of FSDP's parameters instead and gather the batch on every device.
"""

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from vit_jax.activations import Place
from vit_jax.sharding.mesh import BATCH_AXES

AFTER_THE_BATCH: dict[str, tuple[str | None, ...]] = {
    "tokens_BSD": (None, None),
    "heads_BSTh": (None, "model", None),
    "hidden_BSM": (None, "model"),
    "map_BHWC": (None, None, None),
}


def place_activations(mesh: Mesh) -> Place:
    """Returns (name, activation) -> activation, for `activations.placed_by`."""

    def place(name: str, activation: jax.Array) -> jax.Array:
        spec = PartitionSpec(BATCH_AXES, *AFTER_THE_BATCH[name])
        return jax.lax.with_sharding_constraint(activation, NamedSharding(mesh, spec))

    return place
