"""A block: parallel attention and MLP on one norm, as in ViT-22B.

`model.block` takes a class `(architecture, rngs)`, called with `(x_BSD, drop_fraction, key)`.

Run it:

    vit-jax pretrain --config=digits --workdir=runs/parallel \
        --config.model.block=docs.examples.block:ParallelBlock
"""

import jax
import jax.numpy as jnp
from flax import nnx

from vit_jax.config import Architecture
from vit_jax.models.block import Attention, LayerNorm, Mlp


class ParallelBlock(nnx.Module):
    """x + attention(norm(x)) + mlp(norm(x)). The encoder stacks L of these and scans over them."""

    def __init__(self, a: Architecture, *, rngs: nnx.Rngs):
        dtype = jnp.dtype(a.compute_dtype)
        self.norm = LayerNorm(a)
        self.attention = Attention(a.width, a.num_heads, dtype=dtype, rngs=rngs)
        self.mlp = Mlp(a.width, a.mlp_dim, form=a.gelu, dtype=dtype, rngs=rngs)

    def __call__(
        self,
        x_BSD: jax.Array,
        drop_fraction: jax.Array,
        key: jax.Array | None,
    ) -> jax.Array:
        """Return the output (B, S, D).

        `drop_fraction` and `key` are for stochastic depth and dropout, which this block does not
        have.
        """
        del drop_fraction, key
        norm_BSD = self.norm(x_BSD)
        attended_BSD = self.attention(norm_BSD, norm_BSD)
        return x_BSD + attended_BSD + self.mlp(norm_BSD)

    def with_attention(
        self,
        x_BSD: jax.Array,
        drop_fraction: jax.Array,
        key: jax.Array | None,
    ) -> tuple:
        """Return the output and the attention weights; only for models that return attention."""
        del drop_fraction, key
        norm_BSD = self.norm(x_BSD)
        attended_BSD, weights_BTSS = self.attention.with_weights(norm_BSD, norm_BSD)
        return x_BSD + attended_BSD + self.mlp(norm_BSD), weights_BTSS
