"""The pre-norm block of attention and MLP.

Legend: B batch, S sequence length, R = B S, D width, T heads.
"""

import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from vit_jax.config.architecture import Architecture
from vit_jax.kernels import MIDDLE, dispatch
from vit_jax.models.attention import Attention as Attention
from vit_jax.models.attention import build_attention
from vit_jax.models.dropout import Site, drop_examples, dropout
from vit_jax.models.mlp import Mlp as Mlp
from vit_jax.models.mlp import build_mlp
from vit_jax.models.norm import LayerNorm as LayerNorm
from vit_jax.models.norm import build_norm


class Block(nnx.Module):
    """One layer of the encoder (ViT, eq. 2 and 3).

    `attention` is in the place of the attention that the architecture describes. Attention and MLP
    multiply their outputs by the layer scale themselves: it is cheaper to scale the kernel of their
    last product.
    """

    def __init__(self, a: Architecture, *, rngs: nnx.Rngs, attention: Attention | None = None):
        self.attention_norm = build_norm(a)  # before attention; `a.attention_norm` is after it
        self.attention = attention if attention is not None else build_attention(a, rngs=rngs)
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
        token_BS: Array | None = None,
    ) -> Array:
        """Return x + attention(norm(x)), then x + mlp(norm(x)).

        Args:
          x_BSD: tokens.
          drop_fraction: scalar, probability of dropping a branch of an example (stochastic depth).
          key: random key of dropout and stochastic depth; None outside training.
          token_BS: indices of the tokens in the complete sequence, if patches have been dropped.
        """
        x = dispatch.flatten_tokens(x_BSD)
        normed_BSD = self.attention_norm(x).reshape(x_BSD.shape)
        scale_D = read_layer_scale(self.attention_scale)
        attended_BSD = self.attention(
            normed_BSD, normed_BSD, token_BS=token_BS, output_scale=scale_D
        )
        x = self._add_branches(x, attended_BSD, drop_fraction, key)
        return x.reshape(x_BSD.shape)

    def with_attention(
        self,
        x_BSD: Array,
        drop_fraction: Array,
        key: Array | None,
        token_BS: Array | None = None,
    ) -> tuple[Array, Array]:
        """Return the output of a call, and the attention weights (B, T, S, S)."""
        x = dispatch.flatten_tokens(x_BSD)
        normed_BSD = self.attention_norm(x).reshape(x_BSD.shape)
        scale_D = read_layer_scale(self.attention_scale)
        attended_BSD, weights_BTSS = self.attention.with_weights(
            normed_BSD, normed_BSD, token_BS=token_BS, output_scale=scale_D
        )
        x = self._add_branches(x, attended_BSD, drop_fraction, key)
        return x.reshape(x_BSD.shape), weights_BTSS

    def _add_branches(
        self,
        x: Array,
        attended_BSD: Array,
        drop_fraction: Array,
        key: Array | None,
    ) -> Array:
        """Return x + attention, then x + mlp(norm(x)), with dropout of the branches.

        The stream `x` and the branches have the shape of `dispatch.flatten_tokens`: (R, D) on GPUs,
        (B, S, D) elsewhere.
        """
        batch = attended_BSD.shape[0]
        branch_key = key if self.drops_branches else None

        # Equation 2.
        branch = dispatch.flatten_tokens(attended_BSD)
        branch = dropout(branch, self.dropout_fraction, key, Site.ATTENTION_OUTPUT)
        x = x + drop_examples(branch, drop_fraction, branch_key, Site.ATTENTION_BRANCH, batch)
        x = checkpoint_name(x, MIDDLE)  # kept or computed again by `encoder.REMAT_POLICIES`

        # Equation 3. The MLP has its dropout inside, after each of its layers.
        branch = self.mlp(self.mlp_norm(x), key, read_layer_scale(self.mlp_scale))
        return x + drop_examples(branch, drop_fraction, branch_key, Site.MLP_BRANCH, batch)


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
