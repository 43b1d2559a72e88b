"""Pre-norm blocks of attention and MLP: the ordinary one, and the axial one, which is two along rows and columns.

Legend: B batch, S sequence length, R = B S, D width, T heads, M MLP dimension, h w rows and columns of patches.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from vit_jax.config import Architecture
from vit_jax.kernels.devices import platform
from vit_jax.models.attention import Attention, LineAttention, choose_form
from vit_jax.models.dropout import drop_examples, dropout
from vit_jax.models.mlp import Mlp as Mlp
from vit_jax.models.mlp import build_mlp
from vit_jax.models.norm import LayerNorm as LayerNorm
from vit_jax.models.norm import build_norm
from vit_jax.models.positions import RelativePositions, RotaryPositions


def as_rows(x_BSD: jax.Array) -> jax.Array:
    """Return (B S, D) on GPUs, and elsewhere the array as it is: the form of tokens within a block.

    Gradients of norms and biases are sums over B and S. XLA for GPUs computes them from transposed copies in float32,
    but not if it is one dimension. XLA for TPUs is faster with two dimensions.
    """
    return x_BSD.reshape(-1, x_BSD.shape[-1]) if platform() == "gpu" else x_BSD


def _build_attention(a: Architecture, length: int | None, rngs: nnx.Rngs) -> Attention:
    biases = {"all": ("query", "key", "value"), "query_value": ("query", "value"), "none": ()}[
        a.qkv_bias
    ]
    options: dict[str, Any] = {
        "dtype": jnp.dtype(a.compute_dtype),
        "rngs": rngs,
        "form": a.block_attention,
    }
    options["biases"] = (*biases, "out") if a.linear_bias else biases
    if a.attention_norm:
        options["norm"] = build_norm(a)
    if a.position_embedding == "relative":
        options["positions"] = RelativePositions(a, length or math.prod(a.grid), rngs=rngs)
    if a.rope is not None:
        options["rotary"] = RotaryPositions(a)
    if length is None:
        return Attention(a.width, a.num_heads, **options)
    return LineAttention(a.width, a.num_heads, length=length, **options)


def attention_form(a: Architecture) -> str:
    """Return the form of self-attention in standard blocks, on the devices of `placed_by`.

    Raises:
      ValueError: as `choose_form`.
    """
    head_dim = a.width // a.num_heads
    dtype = jnp.dtype(a.compute_dtype)
    (form,) = {
        choose_form(
            a.block_attention, length=length, num_heads=a.num_heads, head_dim=head_dim, dtype=dtype
        )
        for length in a.attention_lengths
    }
    return form


class Block(nnx.Module):
    """One layer of the encoder: x + attention(norm(x)), then x + mlp(norm(x)).

    With LayerScale (Touvron et al., 2021) a learned vector multiplies each branch. With a `length`, attention is within
    lines of this number of tokens.
    """

    def __init__(self, a: Architecture, *, rngs: nnx.Rngs, length: int | None = None):
        self.attention_norm = build_norm(a)  # of the input; `a.attention_norm` is of the output
        self.attention = _build_attention(a, length, rngs)
        self.mlp_norm = build_norm(a)
        self.mlp = build_mlp(a, rngs=rngs)
        scales = [
            None if a.layer_scale is None else nnx.Param(jnp.full(a.width, a.layer_scale))
            for _ in range(2)
        ]
        self.attention_scale, self.mlp_scale = scales
        self.dropout_fraction = a.dropout_fraction
        self.drops_examples = a.stochastic_depth_fraction > 0

    def __call__(
        self, x_BSD: jax.Array, drop_fraction: jax.Array, key: jax.Array | None
    ) -> jax.Array:
        """Args: drop_fraction: scalar, probability of leaving out each residual branch of an example."""
        norm_BSD = self._normalised(x_BSD)
        return self._add(x_BSD, self.attention(norm_BSD, norm_BSD), drop_fraction, key)

    def with_attention(
        self, x_BSD: jax.Array, drop_fraction: jax.Array, key: jax.Array | None
    ) -> tuple[jax.Array, jax.Array]:
        """Return the output and the attention weights (B, T, S, S)."""
        norm_BSD = self._normalised(x_BSD)
        branch, weights_BTSS = self.attention.with_weights(norm_BSD, norm_BSD)
        return self._add(x_BSD, branch, drop_fraction, key), weights_BTSS

    def _normalised(self, x_BSD: jax.Array) -> jax.Array:
        return self.attention_norm(as_rows(x_BSD)).reshape(x_BSD.shape)

    def _add(
        self,
        x_BSD: jax.Array,
        branch_BSD: jax.Array,
        drop_fraction: jax.Array,
        key: jax.Array | None,
    ) -> jax.Array:
        """Add both residual branches: that of the attention as computed, that of the MLP."""
        shape = x_BSD.shape

        def drop(branch: jax.Array, site: int) -> jax.Array:
            if key is None or not self.drops_examples:
                return branch
            return drop_examples(branch.reshape(shape), drop_fraction, key, site).reshape(
                branch.shape
            )

        x = as_rows(x_BSD)
        branch = dropout(as_rows(branch_BSD), self.dropout_fraction, key, site=2)
        x = checkpoint_name(x + drop(_scaled(branch, self.attention_scale), site=3), "middle")
        branch = self.mlp(self.mlp_norm(x), fraction=self.dropout_fraction, key=key)
        return (x + drop(_scaled(branch, self.mlp_scale), site=4)).reshape(shape)


def _scaled(branch: jax.Array, scale: nnx.Param | None) -> jax.Array:
    return branch if scale is None else branch * scale[...].astype(branch.dtype)


class AxialBlock(nnx.Module):
    """Two blocks in the place of one: the first has attention along rows, the second along columns (ViT, App. D.6)."""

    def __init__(self, a: Architecture, *, rngs: nnx.Rngs):
        rows, columns = self.grid = a.grid
        self.rows = Block(a, rngs=rngs, length=columns)
        self.columns = Block(a, rngs=rngs, length=rows)

    def __call__(
        self, x_BSD: jax.Array, drop_fraction: jax.Array, key: jax.Array | None
    ) -> jax.Array:
        """Return (B, S, D), as `Block`; the tokens are patches in raster order."""
        of_rows, of_columns = (None, None) if key is None else jax.random.split(key)
        x_BSD = self.rows(x_BSD, drop_fraction, of_rows)
        return _turned(
            self.columns(_turned(x_BSD, self.grid), drop_fraction, of_columns), self.grid[::-1]
        )

    def with_attention(
        self, x_BSD: jax.Array, drop_fraction: jax.Array, key: jax.Array | None
    ) -> tuple[jax.Array, jax.Array]:
        """Return the output and the weights (2, B, T, S, S) of both attentions, 0 outside of rows and of columns."""
        of_rows, of_columns = (None, None) if key is None else jax.random.split(key)
        x_BSD, rows_BTSS = self.rows.with_attention(x_BSD, drop_fraction, of_rows)
        x_BSD, columns_BTSS = self.columns.with_attention(
            _turned(x_BSD, self.grid), drop_fraction, of_columns
        )
        places = (
            np.arange(x_BSD.shape[1]).reshape(self.grid[::-1]).T.ravel()
        )  # among the columns, in raster order
        both = jnp.stack([rows_BTSS, columns_BTSS[:, :, places[:, None], places]])
        return _turned(x_BSD, self.grid[::-1]), both


def _turned(x_BSD: jax.Array, grid: tuple[int, int]) -> jax.Array:
    """The tokens of a grid in raster order, one column after the other."""
    return x_BSD.reshape(x_BSD.shape[0], *grid, -1).swapaxes(1, 2).reshape(x_BSD.shape)
