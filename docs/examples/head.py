"""A head: a cosine classifier (Gidaris and Komodakis, 2018).

`model.head` takes a class `(architecture, rngs)`, called with `pooled_BD` for
`(logits_BK, features_BD)`.

Run it:

    vit-jax pretrain --config=digits --workdir=runs/cosine \
        --config.model.head=docs.examples.head:CosineHead
"""

import jax
import jax.numpy as jnp
from flax import nnx

from vit_jax.config import Architecture


def scale_to_unit_length(x: jax.Array) -> jax.Array:
    """Return vectors of length 1."""
    square = jnp.square(x).sum(axis=-1, keepdims=True)
    return x * jax.lax.rsqrt(square + 1e-12)


class CosineHead(nnx.Module):
    """scale * cosine(features, vector of the class), with a learned scale."""

    def __init__(self, a: Architecture, *, rngs: nnx.Rngs):
        self.vectors = nnx.Param(jax.random.normal(rngs.params(), (a.num_classes, a.width)))
        self.log_scale = nnx.Param(jnp.log(10.0))

    def __call__(self, pooled_BD: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return the logits, and the features from which they are computed; both float32."""
        features_BD = scale_to_unit_length(pooled_BD.astype(jnp.float32))
        vectors_KD = scale_to_unit_length(self.vectors[...])
        logits_BK = jnp.exp(self.log_scale[...]) * features_BD @ vectors_KD.T
        return logits_BK, features_BD
