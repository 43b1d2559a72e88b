"""Pre-norm blocks of attention and MLP: the standard block, and the axial block.

Legend: B batch, S sequence length, R = B S, D width, T heads, M MLP dimension.
"""

import functools
import math
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from vit_jax.config.architecture import Architecture
from vit_jax.kernels import MIDDLE, dispatch
from vit_jax.models.attention import Attention, LineAttention
from vit_jax.models.dropout import Site, drop_examples, dropout, split_key
from vit_jax.models.mlp import Mlp as Mlp
from vit_jax.models.mlp import build_mlp
from vit_jax.models.norm import LayerNorm as LayerNorm
from vit_jax.models.norm import build_norm
from vit_jax.models.positions import RelativePositions, RotaryPositions

QKV_BIASES: dict[str, tuple[str, ...]] = {
    "all": ("query", "key", "value"),
    "query_value": ("query", "value"),
    "none": (),
}


class Block(nnx.Module):
    """One layer of the encoder (ViT, eq. 2 and 3).

    With LayerScale (Touvron et al., 2021) a learned vector multiplies each branch. With a `length`,
    attention is within lines of this number of tokens.
    """

    def __init__(
        self,
        a: Architecture,
        *,
        rngs: nnx.Rngs,
        length: int | None = None,
    ):
        self.attention_norm = build_norm(a)  # before attention; `a.attention_norm` is after it
        self.attention = build_attention(a, length, rngs)
        self.mlp_norm = build_norm(a)
        self.mlp = build_mlp(a, rngs=rngs)
        self.attention_scale = build_layer_scale(a)
        self.mlp_scale = build_layer_scale(a)
        self.dropout_fraction = a.dropout_fraction
        self.drops_examples = a.stochastic_depth_fraction > 0

    def __call__(
        self,
        x_BSD: Array,
        drop_fraction: Array,
        key: Array | None,
    ) -> Array:
        """Return x + attention(norm(x)), then x + mlp(norm(x)).

        Args:
          x_BSD: tokens.
          drop_fraction: scalar, probability of dropping a branch of an example (stochastic depth).
          key: random key of dropout and stochastic depth; None outside training.
        """
        output_BSD, _ = self._run(x_BSD, drop_fraction, key, keeps_weights=False)
        return output_BSD

    def with_attention(
        self,
        x_BSD: Array,
        drop_fraction: Array,
        key: Array | None,
    ) -> tuple[Array, Array]:
        """Return the output and the attention weights (B, T, S, S)."""
        output_BSD, weights_BTSS = self._run(x_BSD, drop_fraction, key, keeps_weights=True)
        assert weights_BTSS is not None
        return output_BSD, weights_BTSS

    def _run(
        self,
        x_BSD: Array,
        drop_fraction: Array,
        key: Array | None,
        *,
        keeps_weights: bool,
    ) -> tuple[Array, Array | None]:
        """Return the output, and the attention weights (B, T, S, S) if `keeps_weights`.

        Sums and branches have the shape of `dispatch.flatten_tokens`: (R, D) on GPUs, (B, S, D)
        elsewhere.
        """
        batch = x_BSD.shape[0]
        drop_key = key if self.drops_examples else None

        def finish_branch(branch: Array, scale_D: nnx.Param | None, site: Site) -> Array:
            if scale_D is not None:
                branch = branch * scale_D[...].astype(branch.dtype)
            return drop_examples(branch, drop_fraction, drop_key, site, batch)

        # Equation 2: x + attention(norm(x)).
        normed = self.attention_norm(dispatch.flatten_tokens(x_BSD))
        normed_BSD = normed.reshape(x_BSD.shape)
        weights_BTSS = None
        if keeps_weights:
            attended_BSD, weights_BTSS = self.attention.with_weights(normed_BSD, normed_BSD)
        else:
            attended_BSD = self.attention(normed_BSD, normed_BSD)

        x = dispatch.flatten_tokens(x_BSD)
        attended = dispatch.flatten_tokens(attended_BSD)
        attended = dropout(attended, self.dropout_fraction, key, Site.ATTENTION_OUTPUT)
        x = x + finish_branch(attended, self.attention_scale, Site.ATTENTION_BRANCH)
        x = checkpoint_name(x, MIDDLE)

        # Equation 3: x + mlp(norm(x)).
        expanded = self.mlp(self.mlp_norm(x), fraction=self.dropout_fraction, key=key)
        x = x + finish_branch(expanded, self.mlp_scale, Site.MLP_BRANCH)
        return x.reshape(x_BSD.shape), weights_BTSS


class AxialBlock(nnx.Module):
    """Two blocks in the place of one: attention along rows, then along columns (ViT, App. D.6)."""

    def __init__(
        self,
        a: Architecture,
        *,
        rngs: nnx.Rngs,
    ):
        self.grid = a.grid
        num_rows, num_columns = a.grid
        self.rows = Block(a, rngs=rngs, length=num_columns)
        self.columns = Block(a, rngs=rngs, length=num_rows)

    def __call__(
        self,
        x_BSD: Array,
        drop_fraction: Array,
        key: Array | None,
    ) -> Array:
        """Return (B, S, D), as `Block`; the tokens are patches in raster order."""
        row_key, column_key = split_key(key)
        x_BSD = self.rows(x_BSD, drop_fraction, row_key)

        by_column_BSD = _transpose_grid(x_BSD, self.grid)
        by_column_BSD = self.columns(by_column_BSD, drop_fraction, column_key)
        return _transpose_grid(by_column_BSD, self.grid[::-1])

    def with_attention(
        self,
        x_BSD: Array,
        drop_fraction: Array,
        key: Array | None,
    ) -> tuple[Array, Array]:
        """Return the output and the weights (2, B, T, S, S) of both attentions.

        Weights are 0 outside of rows, and outside of columns.
        """
        row_key, column_key = split_key(key)
        x_BSD, row_weights_BTSS = self.rows.with_attention(x_BSD, drop_fraction, row_key)

        by_column_BSD = _transpose_grid(x_BSD, self.grid)
        by_column_BSD, column_weights_BTSS = self.columns.with_attention(
            by_column_BSD,
            drop_fraction,
            column_key,
        )
        column_weights_BTSS = _reorder_weights(column_weights_BTSS, self.grid)
        both_2BTSS = jnp.stack([row_weights_BTSS, column_weights_BTSS])
        return _transpose_grid(by_column_BSD, self.grid[::-1]), both_2BTSS


def _transpose_grid(x_BSD: Array, grid: tuple[int, int]) -> Array:
    """Return the tokens of a grid, which are in raster order, one column after the other."""
    batch, length, width = x_BSD.shape
    by_row = x_BSD.reshape(batch, *grid, width)
    by_column = by_row.swapaxes(1, 2)
    return by_column.reshape(batch, length, width)


def _reorder_weights(weights_BTSS: Array, grid: tuple[int, int]) -> Array:
    """Return attention weights of tokens in raster order from those of the order by columns."""
    num_rows, num_columns = grid
    token_S = np.arange(num_rows * num_columns)
    row_S, column_S = np.divmod(token_S, num_columns)
    index_S = column_S * num_rows + row_S  # in the order by columns
    return weights_BTSS[:, :, index_S[:, None], index_S]


def build_attention(
    a: Architecture,
    length: int | None,
    rngs: nnx.Rngs,
) -> Attention:
    """Return the attention of a block; with a `length`, within lines of this number of tokens."""
    biases = QKV_BIASES[a.qkv_bias]
    if a.linear_bias:
        biases = (*biases, "out")

    positions = None
    if a.position_embedding == "relative":
        num_patches = length or math.prod(a.grid)
        positions = RelativePositions(a, num_patches, rngs=rngs)
    rotary = None
    if a.rope is not None:
        rotary = RotaryPositions(a)
    norm = None
    if a.attention_norm:
        norm = build_norm(a)

    build: Callable[..., Attention] = Attention
    if length is not None:
        build = functools.partial(LineAttention, length=length)
    return build(
        a.width,
        a.num_heads,
        dtype=jnp.dtype(a.compute_dtype),
        rngs=rngs,
        form=a.block_attention,
        positions=positions,
        rotary=rotary,
        norm=norm,
        biases=biases,
    )


def find_attention_form(a: Architecture) -> str:
    """Return the form that attention has in standard blocks on the devices of `trace_for`.

    Raises:
      ValueError: cuDNN does not compute this attention.
    """
    return dispatch.choose_attention(
        a.block_attention,
        length=a.attention_lengths[0],  # the second length of an axial block has the same form
        num_heads=a.num_heads,
        head_dim=a.width // a.num_heads,
        dtype=jnp.dtype(a.compute_dtype),
    )


def build_layer_scale(a: Architecture) -> nnx.Param | None:
    """Return the vector that multiplies a branch; None without LayerScale."""
    if a.layer_scale is None:
        return None
    scale_D = jnp.full(a.width, a.layer_scale)
    return nnx.Param(scale_D)
