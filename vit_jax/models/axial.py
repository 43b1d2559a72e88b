"""Axial blocks: attention along the rows of patches, then along the columns (ViT, App. D.6).

Legend: B batch, S sequence length, D width, T heads; l lines of s tokens.
"""

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from vit_jax.config.architecture import Architecture
from vit_jax.models.attention import Attention, build_attention
from vit_jax.models.block import Block
from vit_jax.models.dropout import split_key


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
        self.rows = build_line_block(a, num_columns, rngs)
        self.columns = build_line_block(a, num_rows, rngs)

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


def build_line_block(a: Architecture, length: int, rngs: nnx.Rngs) -> Block:
    """Return a block whose attention is within lines of `length` tokens."""
    attention = build_attention(
        a,
        rngs=rngs,
        attention_class=functools.partial(LineAttention, length=length),
        num_patches=length,
    )
    return Block(a, rngs=rngs, attention=attention)


class LineAttention(Attention):
    """Attention of each token to the `length` tokens of its line: its row or its column."""

    def __init__(self, *arguments: Any, length: int, **options: Any):
        super().__init__(*arguments, **options)
        self.length = length

    def __call__(
        self,
        queries_BQD: Array,
        tokens_BSD: Array,
        token_BS: Array | None = None,
        output_scale: Array | None = None,
    ) -> Array:
        """Return (B, S, D), as `Attention` with queries of the same length."""
        assert token_BS is None, "lines need all patches"
        line_queries = self._split_lines(queries_BQD)
        line_tokens = self._split_lines(tokens_BSD)
        output = super().__call__(line_queries, line_tokens, output_scale=output_scale)
        return output.reshape(queries_BQD.shape)

    def with_weights(
        self,
        queries_BQD: Array,
        tokens_BSD: Array,
        token_BS: Array | None = None,
        output_scale: Array | None = None,
    ) -> tuple[Array, Array]:
        """Return output and weights as `Attention`; weights (B, T, S, S) are 0 outside of lines."""
        assert token_BS is None, "lines need all patches"
        line_queries = self._split_lines(queries_BQD)
        line_tokens = self._split_lines(tokens_BSD)
        output, weights = super().with_weights(line_queries, line_tokens, output_scale=output_scale)

        batch, length, _ = tokens_BSD.shape
        num_lines = length // self.length
        shape_BlTss = (
            batch,
            num_lines,
            self.num_heads,
            self.length,
            self.length,
        )
        weights_BlTss = weights.reshape(shape_BlTss)
        is_same_line = jnp.eye(num_lines)
        weights_BTlsls = jnp.einsum("BlTqs,lm->BTlqms", weights_BlTss, is_same_line)
        weights_BTSS = weights_BTlsls.reshape(batch, -1, length, length)
        return output.reshape(queries_BQD.shape), weights_BTSS

    def _split_lines(self, x_BSD: Array) -> Array:
        """Return the lines of all images one after the other, (B l, s, D)."""
        width = x_BSD.shape[-1]
        return x_BSD.reshape(-1, self.length, width)


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
