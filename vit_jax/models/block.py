"""The pre-norm block of attention and MLP.

Legend: B batch, S sequence length, D width, T heads, Q queries (= S).

`dispatch.flatten_tokens` returns (B, S, D) as (B S, D) on GPUs, where layers that treat all tokens
alike are faster on it, and unchanged elsewhere. Names of such arrays have no suffix.
"""

import functools
from collections.abc import Callable
from typing import TypeVar

import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from vit_jax.config.architecture import Architecture
from vit_jax.kernels import MIDDLE, dispatch

# `X as X`: these are for blocks of users, which import them from here.
from vit_jax.models.attention import Attention as Attention
from vit_jax.models.attention import build_attention
from vit_jax.models.dropout import Site, drop_examples, dropout
from vit_jax.models.mlp import Mlp as Mlp
from vit_jax.models.mlp import build_mlp
from vit_jax.models.norm import LayerNorm as LayerNorm
from vit_jax.models.norm import build_norm

Attended = TypeVar("Attended")  # outputs, or outputs and weights


class Block(nnx.Module):
    """One layer of the encoder (ViT, eq. 2 and 3).

        h = x + attention_scale * attention(attention_norm(x))
        output = h + mlp_scale * mlp(mlp_norm(h))

    Each scale (layer scale) is given to the last layer of its branch as `output_scale`: to multiply
    the kernel of this layer, (D, D), costs less than to multiply its output, (B, S, D).

    The argument `attention` replaces the attention that the architecture describes.
    """

    def __init__(self, a: Architecture, *, rngs: nnx.Rngs, attention: Attention | None = None):
        # The norm before attention. `a.attention_norm` is another one, inside attention.
        self.attention_norm = build_norm(a)
        self.attention = attention if attention is not None else build_attention(a, rngs=rngs)
        self.mlp_norm = build_norm(a)
        self.mlp = build_mlp(a, rngs=rngs)
        self.attention_scale = build_layer_scale(a)
        self.mlp_scale = build_layer_scale(a)
        self.dropout_fraction = a.dropout_fraction
        self.has_stochastic_depth = a.stochastic_depth_fraction > 0

    def __call__(
        self,
        x_BSD: Array,
        drop_fraction: Array,
        key: Array | None,
        token_BS: Array | None = None,
    ) -> Array:
        """Return the output, (B, S, D).

        Args:
          x_BSD: tokens.
          drop_fraction: scalar, probability of dropping a branch of an example (stochastic depth).
          key: random key of dropout and stochastic depth; None outside training.
          token_BS: indices of the tokens in the complete sequence, if patches have been dropped.
        """
        attended_BSD = self._attend(self.attention, x_BSD, token_BS)
        return self._add_branches(x_BSD, attended_BSD, drop_fraction, key)

    def with_attention(
        self,
        x_BSD: Array,
        drop_fraction: Array,
        key: Array | None,
        token_BS: Array | None = None,
    ) -> tuple[Array, Array]:
        """Return the output of a call, and the attention weights (B, T, S, S)."""
        attend = self.attention.with_weights
        attended_BSD, weights_BTSS = self._attend(attend, x_BSD, token_BS)
        output_BSD = self._add_branches(x_BSD, attended_BSD, drop_fraction, key)
        return output_BSD, weights_BTSS

    def _attend(
        self, attend: Callable[..., Attended], x_BSD: Array, token_BS: Array | None
    ) -> Attended:
        """Return the result of `attend`, a method of the attention, on norm(x)."""
        tokens = dispatch.flatten_tokens(x_BSD)
        normed_BSD = self.attention_norm(tokens).reshape(x_BSD.shape)
        return attend(
            queries_BQD=normed_BSD,
            tokens_BSD=normed_BSD,
            token_BS=token_BS,
            output_scale=read_layer_scale(self.attention_scale),  # attention_scale of equation 2
        )

    def _add_branches(
        self,
        x_BSD: Array,
        attended_BSD: Array,
        drop_fraction: Array,
        key: Array | None,
    ) -> Array:
        """Return the output of the block, from its input and the output of attention.

        Each use of `key` draws other random numbers, by the number of its `Site`.
        """
        drop_branch = functools.partial(
            drop_examples,
            fraction=drop_fraction,
            key=key if self.has_stochastic_depth else None,
            batch=x_BSD.shape[0],
        )
        x = dispatch.flatten_tokens(x_BSD)
        attended = dispatch.flatten_tokens(attended_BSD)

        # Equation 2.
        attended = dropout(attended, self.dropout_fraction, key, Site.ATTENTION_OUTPUT)
        x = x + drop_branch(attended, site=Site.ATTENTION_BRANCH)
        x = checkpoint_name(x, MIDDLE)  # the backward pass may use it: `encoder.REMAT_POLICIES`

        # Equation 3. The MLP has dropout inside, after each of its layers.
        scale_D = read_layer_scale(self.mlp_scale)
        mlp_output = self.mlp(self.mlp_norm(x), key, output_scale=scale_D)
        x = x + drop_branch(mlp_output, site=Site.MLP_BRANCH)
        return x.reshape(x_BSD.shape)


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
