"""Position embeddings: added to the tokens, or within attention.

Legend: B batch, h w rows and columns of patches, N = h w patches, S sequence length (N, or N + 1 with a class token at
index 0), D width, h also head dimension.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from vit_jax.config import Architecture
from vit_jax.imports.references import resolve
from vit_jax.models.position_tables import fixed_positions, offset_places, rotary_angles


def _small(a: Architecture, rngs: nnx.Rngs, *shape: int) -> nnx.Param:
    return nnx.Param(a.position_stddev * jax.random.normal(rngs.params(), shape))


class LearnedPositions1D(nnx.Module):
    """One learned row for each token in raster order, those of prefix tokens first.

    With `position_tokens="patches"` prefix tokens have none.
    """

    def __init__(self, architecture: Architecture, *, rngs: nnx.Rngs):
        a = architecture
        self.num_bare = a.prefix_length if a.position_tokens == "patches" else 0
        self.table = _small(a, rngs, 1, a.sequence_length - self.num_bare, a.width)

    def __call__(self) -> jax.Array:
        """Return positions_1SD."""
        return (
            jnp.pad(self.table[...], ((0, 0), (self.num_bare, 0), (0, 0)))
            if self.num_bare
            else self.table[...]
        )


class LearnedPositions2D(nnx.Module):
    """A learned half-width row for each row and each column of patches, concatenated (ViT, App. D.4)."""

    def __init__(self, architecture: Architecture, *, rngs: nnx.Rngs):
        (rows, columns), width = architecture.grid, architecture.width
        self.row_table = _small(architecture, rngs, rows, width // 2)
        self.column_table = _small(architecture, rngs, columns, width // 2)
        self.class_row = (
            _small(architecture, rngs, 1, width) if architecture.num_class_tokens else None
        )

    def __call__(self) -> jax.Array:
        """Return positions_1SD."""
        rows_hD = self.row_table[...]
        columns_wD = self.column_table[...]
        shape = (rows_hD.shape[0], columns_wD.shape[0], rows_hD.shape[1])
        halves = (
            jnp.broadcast_to(columns_wD[None], shape),
            jnp.broadcast_to(rows_hD[:, None], shape),
        )
        grid_hwD = jnp.concatenate(halves, axis=-1)
        table = grid_hwD.reshape(-1, grid_hwD.shape[-1])
        if self.class_row is not None:
            table = jnp.concatenate([self.class_row[...], table])
        return table[None]


class FixedPositions(nnx.Module):
    """Sine-cosine positions, or none: no parameters, and nothing added to a class token.

    `reference_grid` is set for images of another size than the network's, whose patches then have the same coordinates.
    """

    def __init__(self, architecture: Architecture, *, rngs: nnx.Rngs):
        del rngs
        self.reference_grid: tuple[int, int] | None = None
        self.grid = architecture.grid
        self.width = architecture.width
        self.kind = architecture.position_embedding
        self.prefix_length = architecture.prefix_length

    def __call__(self) -> jax.Array:
        """Return positions_1SD."""
        options: dict[str, Any] = {
            "prefix_length": self.prefix_length,
            "reference_grid": self.reference_grid,
        }
        return jnp.asarray(fixed_positions(self.kind, self.grid, self.width, **options))


class RelativePositions(nnx.Module):
    """A learned key for each offset between a query and a key in raster order (ViT, App. D.4; Shaw et al., 2018).

    A query's product with it is added to the logits of attention. A class token has three keys (as query, as key, as
    both), all heads have the same keys, no offset is clipped, and every block has its table: the paper does not say.
    """

    def __init__(self, a: Architecture, num_patches: int, *, rngs: nnx.Rngs):
        self.num_patches = num_patches
        self.has_class_token = a.num_class_tokens > 0
        num_keys = 2 * num_patches - 1 + 3 * self.has_class_token
        self.table = _small(a, rngs, num_keys, a.width // a.num_heads)

    def __call__(self) -> jax.Array:
        """Return keys_SSh: of every query, one for each token."""
        return self.table[...][
            offset_places(self.num_patches, has_class_token=self.has_class_token)
        ]


class RotaryPositions(nnx.Module):
    """Rotary positions (Su et al., 2021) of patches in two dimensions; prefix tokens are not turned.

    "centred" pairs the values of a head with those half a head away, the other kinds with their neighbours.
    """

    def __init__(self, architecture: Architecture):
        a = architecture
        self.kind = a.rope
        self.grid = a.grid
        self.prefix_length = a.prefix_length
        self.has_class_token = a.num_class_tokens > 0
        self.reference_grid = a.rope_grid

    def __call__(self, x_BSE: jax.Array, num_heads: int) -> jax.Array:
        """Return queries or keys, turned by the place of their patch, in the dtype of `x_BSE`; computes in float32."""
        batch, length, width = x_BSE.shape
        assert self.kind is not None
        angles = rotary_angles(
            self.kind,
            self.grid,
            width // num_heads,
            has_class_token=self.has_class_token,
            reference_grid=self.reference_grid,
        )
        angles_S1p = np.pad(angles, ((self.prefix_length, 0), (0, 0)))[:, None]
        is_halved = self.kind == "centred"
        pairs = (2, -1) if is_halved else (-1, 2)
        x = x_BSE.astype(jnp.float32).reshape(batch, length, num_heads, *pairs)
        axis = 3 if is_halved else 4
        left, right = (jax.lax.index_in_dim(x, place, axis, keepdims=False) for place in range(2))
        cos = np.cos(angles_S1p)
        sin = np.sin(angles_S1p)
        turned = jnp.stack([left * cos - right * sin, right * cos + left * sin], axis)
        return turned.reshape(x_BSE.shape).astype(x_BSE.dtype)


POSITIONS: dict[str, Callable[..., nnx.Module]] = {
    "learned_1d": LearnedPositions1D,
    "learned_2d": LearnedPositions2D,
    "sincos2d": FixedPositions,
    "none": FixedPositions,
    "relative": FixedPositions,  # adds nothing
}


def build_positions(a: Architecture, *, rngs: nnx.Rngs) -> nnx.Module:
    """Return the position embedding: built in, or a class with the constructor and call of `LearnedPositions1D`."""
    kind = a.position_embedding
    build = (
        POSITIONS[kind] if kind in POSITIONS else resolve(kind, "config.model.position_embedding")
    )
    return build(a, rngs=rngs)


def add_positions(tokens_BSD: jax.Array, positions: Any) -> jax.Array:
    """Add positions (1, S, D) to tokens.

    Raises:
      ValueError: the position embedding returns another shape.
    """
    positions_1SD = positions()
    expected = (1, *tokens_BSD.shape[1:])
    if positions_1SD.shape != expected:
        raise ValueError(
            f"{type(positions).__name__} returns positions {positions_1SD.shape} for {expected}."
        )
    return tokens_BSD + positions_1SD.astype(tokens_BSD.dtype)
