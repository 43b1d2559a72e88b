"""A head: a cosine classifier (Gidaris and Komodakis, 2018).

`model.head` takes a class `(architecture, rngs)`, called with `pooled_BD` for `(logits_BK, features_BD)`.

vit-jax pretrain --config=digits --workdir=runs/cosine --config.model.head=docs.examples.head:CosineHead
"""

import jax
import jax.numpy as jnp
from flax import nnx

from vit_jax.config import Architecture


def unit(x: jax.Array) -> jax.Array:
    """Return vectors of length 1."""
    return x * jax.lax.rsqrt(jnp.square(x).sum(axis=-1, keepdims=True) + 1e-12)


class CosineHead(nnx.Module):
    """scale * cosine(features, vector of the class), with a learned scale."""

    def __init__(self, a: Architecture, *, rngs: nnx.Rngs):
        self.vectors = nnx.Param(jax.random.normal(rngs.params(), (a.num_classes, a.width)))
        self.log_scale = nnx.Param(jnp.log(10.0))

    def __call__(self, pooled_BD: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return the logits, and the features that they are computed from; both float32."""
        features_BD = unit(pooled_BD.astype(jnp.float32))
        return jnp.exp(self.log_scale[...]) * features_BD @ unit(self.vectors[...]).T, features_BD
