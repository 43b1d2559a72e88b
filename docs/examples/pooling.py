"""A pooling: a mean of the tokens with learned weights.

`model.pool` takes a class `(architecture, rngs)`, called with the tokens `x_BSD` for (B, D).

Run it:

    vit-jax pretrain --config=digits --workdir=runs/weighted \
        --config.model.pool=docs.examples.pooling:WeightedMean
"""

import jax
import jax.numpy as jnp
from flax import nnx

from vit_jax.config import Architecture


class WeightedMean(nnx.Module):
    """softmax(x @ score) . x: one learned vector scores the tokens. It begins as the mean."""

    def __init__(self, a: Architecture, *, rngs: nnx.Rngs):
        del rngs
        self.score = nnx.Param(jnp.zeros(a.width))

    def __call__(self, x_BSD: jax.Array) -> jax.Array:
        """Return one vector for each image, (B, D). There is no class token among the tokens."""
        x_BSD = x_BSD.astype(jnp.float32)
        weight_BS = jax.nn.softmax(x_BSD @ self.score[...])
        return jnp.einsum("bs,bsd->bd", weight_BS, x_BSD)
