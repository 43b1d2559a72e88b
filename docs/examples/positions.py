"""A position embedding: learned weights of a few fixed waves, for any grid.

`model.position_embedding` takes a class `(architecture, rngs)`, called for (1, S, D).

Run it:

    vit-jax pretrain --config=digits --workdir=runs/waves \
        --config.model.position_embedding=docs.examples.positions:LearnedWaves
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from vit_jax.config import Architecture

NUM_WAVES = 8


class LearnedWaves(nnx.Module):
    """cos(pi * wave * row) * cos(pi * wave * column), mixed by one learned matrix."""

    def __init__(self, architecture: Architecture, *, rngs: nnx.Rngs):
        self.kernel = nnx.Param(
            nnx.initializers.normal(0.02)(rngs.params(), (NUM_WAVES**2, architecture.width))
        )
        self.grid = architecture.grid
        self.has_class_token = architecture.pool == "token"

    def __call__(self) -> jax.Array:
        """Returns (1, S, D); the class token, if there is one, comes first and gets zeros."""
        rows, columns = (
            np.linspace(0, 1, size)[:, None] * np.arange(NUM_WAVES) * np.pi for size in self.grid
        )
        waves = np.einsum("rw,cv->rcwv", np.cos(rows), np.cos(columns)).reshape(-1, NUM_WAVES**2)
        table = jnp.asarray(waves, jnp.float32) @ self.kernel[...]
        return jnp.pad(table, ((int(self.has_class_token), 0), (0, 0)))[None]
