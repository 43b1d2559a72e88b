"""The pre-norm block of attention and MLP.

Legend: B batch, S sequence length, R = B S, D width, T heads.
"""

import functools
from collections.abc import Callable

import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from vit_jax.config.architecture import Architecture
from vit_jax.kernels import MIDDLE, dispatch
from vit_jax.models.attention import Attention as Attention
from vit_jax.models.attention import RecordedAttention, build_attention
from vit_jax.models.dropout import Site, drop_examples, dropout
from vit_jax.models.mlp import Mlp as Mlp
from vit_jax.models.mlp import build_mlp
from vit_jax.models.norm import LayerNorm as LayerNorm
from vit_jax.models.norm import build_norm


class Block(nnx.Module):
    """One layer of the encoder (ViT, eq. 2 and 3)."""

    def __init__(
        self,
        a: Architecture,
        *,
        rngs: nnx.Rngs,
        build_attention: Callable[..., Attention] = build_attention,
    ):
        self.attention_norm = build_norm(a)  # before attention; `a.attention_norm` is after it
        self.attention = build_attention(a, rngs=rngs)
        self.mlp_norm = build_norm(a)
        self.mlp = build_mlp(a, rngs=rngs)
        self.attention_scale = build_layer_scale(a)
        self.mlp_scale = build_layer_scale(a)
        self.dropout_fraction = a.dropout_fraction
        self.drops_branches = a.stochastic_depth_fraction > 0

    def __call__(
        self,
        x_BSD: Array,
        drop_fraction: Array,
        key: Array | None,
        attend: Callable[..., Array] | None = None,
    ) -> Array:
        """Return x + attention(norm(x)), then x + mlp(norm(x)).

        Args:
          x_BSD: tokens; sums and branches are (R, D) on GPUs (`dispatch.flatten_tokens`).
          drop_fraction: scalar, probability of dropping a branch of an example (stochastic depth).
          key: random key of dropout and stochastic depth; None outside training.
          attend: attention in the place of the block's.
        """
        attend = attend or self.attention
        drop = functools.partial(
            drop_examples,
            fraction=drop_fraction,
            key=key if self.drops_branches else None,
            batch=x_BSD.shape[0],
        )
        x = dispatch.flatten_tokens(x_BSD)

        # Equation 2.
        normed_BSD = self.attention_norm(x).reshape(x_BSD.shape)
        scale_D = read_layer_scale(self.attention_scale)
        attended_BSD = attend(normed_BSD, normed_BSD, output_scale=scale_D)
        branch = dispatch.flatten_tokens(attended_BSD)
        branch = dropout(branch, self.dropout_fraction, key, Site.ATTENTION_OUTPUT)
        x = x + drop(branch, site=Site.ATTENTION_BRANCH)
        x = checkpoint_name(x, MIDDLE)

        # Equation 3.
        branch = self.mlp(self.mlp_norm(x), key, read_layer_scale(self.mlp_scale))
        x = x + drop(branch, site=Site.MLP_BRANCH)
        return x.reshape(x_BSD.shape)

    def with_attention(
        self,
        x_BSD: Array,
        drop_fraction: Array,
        key: Array | None,
    ) -> tuple[Array, Array]:
        """Return the output and the attention weights (B, T, S, S)."""
        attention = RecordedAttention(self.attention)
        output_BSD = self(x_BSD, drop_fraction, key, attend=attention)
        assert attention.weights_BTQS is not None
        return output_BSD, attention.weights_BTQS


def build_layer_scale(a: Architecture) -> nnx.Param[Array] | None:
    """Return a learned vector that multiplies a branch (Touvron et al., 2021), or None."""
    if a.layer_scale is None:
        return None
    return nnx.Param(jnp.full(a.width, a.layer_scale))


def read_layer_scale(parameter: nnx.Param[Array] | None) -> Array | None:
    """Return the vector of `build_layer_scale`, (D,); None without one."""
    if parameter is None:
        return None
    return parameter[...]
