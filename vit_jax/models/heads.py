"""From tokens to logits: attention pooling and the classification heads.

Legend: B batch, S sequence length, D width, K classes.
"""

import functools

import jax
import jax.numpy as jnp
from flax import nnx

from vit_jax.config import Architecture
from vit_jax.models.embed import LECUN_NORMAL
from vit_jax.models.transformer import XAVIER_UNIFORM, Attention, LayerNorm, Mlp

constant = functools.cache(nnx.initializers.constant)  # cached: equal modules must hold the very same function


class AttentionPooling(nnx.Module):
    """A learned probe attends to all tokens, then a residual MLP ("MAP" head of big_vision)."""

    def __init__(self, a: Architecture, *, rngs: nnx.Rngs):
        dtype = jnp.dtype(a.compute_dtype)
        self.probe = nnx.Param(XAVIER_UNIFORM(rngs.params(), (1, 1, a.width), jnp.float32))
        self.attention = Attention(a.width, a.num_heads, dtype=dtype, rngs=rngs)
        self.norm = LayerNorm(a)
        self.mlp = Mlp(a.width, a.mlp_dim, form=a.gelu, dtype=dtype, rngs=rngs)

    def __call__(self, tokens_BSD: jax.Array) -> jax.Array:
        """Returns pooled_BD."""
        batch, _, width = tokens_BSD.shape
        probe_B1D = jnp.broadcast_to(self.probe[...].astype(tokens_BSD.dtype), (batch, 1, width))
        x_B1D, _ = self.attention(probe_B1D, tokens_BSD)
        return (x_B1D + self.mlp(self.norm(x_B1D)))[:, 0]


class Head(nnx.Module):
    """Zero-initialised linear classifier, behind a tanh layer of width D where the architecture says "mlp".

    The paper pre-trains with the hidden layer and fine-tunes without (ViT, sec. 3.2). Computes in float32. A network
    of 0 classes ends in its features and has no logits.
    """

    def __init__(self, a: Architecture, *, rngs: nnx.Rngs):
        self.hidden = nnx.Linear(a.width, a.width, kernel_init=LECUN_NORMAL, rngs=rngs) if a.head == "mlp" else None
        bias_init = constant(a.head_bias_init)
        zeros = nnx.initializers.zeros_init()
        self.has_classes = a.num_classes > 0
        self.linear = nnx.Linear(a.width, a.num_classes, kernel_init=zeros, bias_init=bias_init, rngs=rngs)

    def __call__(self, pooled_BD: jax.Array) -> tuple[jax.Array | None, jax.Array]:
        """Returns logits_BK, or None, and the features_BD they are linear in."""
        features_BD = pooled_BD.astype(jnp.float32)
        if self.hidden is not None:
            features_BD = jnp.tanh(self.hidden(features_BD))
        return (self.linear(features_BD) if self.has_classes else None), features_BD
