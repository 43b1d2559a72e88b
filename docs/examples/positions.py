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
        shape = (NUM_WAVES**2, architecture.width)
        self.kernel = nnx.Param(nnx.initializers.normal(0.02)(rngs.params(), shape))
        self.grid = architecture.grid
        self.has_class_token = architecture.pool == "token"

    def __call__(self) -> jax.Array:
        """Return (1, S, D); the class token, if there is one, comes first and gets zeros."""
        num_rows, num_columns = self.grid
        row_waves = compute_waves(num_rows)
        column_waves = compute_waves(num_columns)
        waves = np.einsum("rw,cv->rcwv", row_waves, column_waves).reshape(-1, NUM_WAVES**2)
        table_ND = jnp.asarray(waves, jnp.float32) @ self.kernel[...]
        num_class_tokens = int(self.has_class_token)
        return jnp.pad(table_ND, ((num_class_tokens, 0), (0, 0)))[None]


def compute_waves(size: int) -> np.ndarray:
    """Return the waves along a side of the grid, (size, NUM_WAVES)."""
    position = np.linspace(0, 1, size)[:, None]
    return np.cos(position * np.arange(NUM_WAVES) * np.pi)
