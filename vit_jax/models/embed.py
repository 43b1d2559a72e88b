"""From an image, or a ResNet's map of it, to a sequence of tokens: patch embedding and position embeddings.

Legend: B batch, H W height and width of the image or map, C its channels, h w rows and columns of patches,
N = h w patches, S sequence length (N, or N + 1 with a class token at index 0), D width.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from vit_jax.config import Architecture
from vit_jax.positions import fixed_positions
from vit_jax.references import resolve

LECUN_NORMAL = nnx.initializers.lecun_normal()


class PatchEmbedding(nnx.Module):
    """Linear map of every patch. Equal to a convolution whose kernel and stride are the patch (ViT, eq. 1)."""

    def __init__(self, a: Architecture, *, rngs: nnx.Rngs):
        shape = (*a.patch_size, a.map_channels, a.width)
        self.kernel = nnx.Param(LECUN_NORMAL(rngs.params(), shape, jnp.float32))
        self.bias = nnx.Param(jnp.zeros((a.width,), jnp.float32))
        self.dtype = jnp.dtype(a.compute_dtype)

    @jax.named_scope("embedding")
    def __call__(self, image_BHWC: jax.Array) -> jax.Array:
        """Returns tokens_BND in raster order; what is left at the bottom and on the right is not seen."""
        patch_height, patch_width, channels, width = self.kernel.shape
        batch, height, image_width, _ = image_BHWC.shape
        rows, columns = height // patch_height, image_width // patch_width
        covered = image_BHWC[:, : rows * patch_height, : columns * patch_width]
        patches = covered.reshape(batch, rows, patch_height, columns, patch_width, channels)
        patches = patches.transpose(0, 1, 3, 2, 4, 5).reshape(batch, rows * columns, -1)
        kernel = self.kernel[...].reshape(-1, width)
        return patches.astype(self.dtype) @ kernel.astype(self.dtype) + self.bias[...].astype(self.dtype)


def _small(a: Architecture, rngs: nnx.Rngs, *shape: int) -> nnx.Param:
    return nnx.Param(a.position_stddev * jax.random.normal(rngs.params(), shape))


class LearnedPositions1D(nnx.Module):
    """One learned row for each token in raster order, the class token's first."""

    def __init__(self, architecture: Architecture, *, rngs: nnx.Rngs):
        self.table = _small(architecture, rngs, 1, architecture.sequence_length, architecture.width)

    def __call__(self) -> jax.Array:
        """Returns positions_1SD."""
        return self.table[...]


class LearnedPositions2D(nnx.Module):
    """A learned half-width row for each row and each column of patches, concatenated (ViT, App. D.4)."""

    def __init__(self, architecture: Architecture, *, rngs: nnx.Rngs):
        (rows, columns), width = architecture.grid, architecture.width
        self.row_table = _small(architecture, rngs, rows, width // 2)
        self.column_table = _small(architecture, rngs, columns, width // 2)
        self.class_row = _small(architecture, rngs, 1, width) if architecture.pool == "token" else None

    def __call__(self) -> jax.Array:
        """Returns positions_1SD."""
        rows_hD, columns_wD = self.row_table[...], self.column_table[...]
        shape = (rows_hD.shape[0], columns_wD.shape[0], rows_hD.shape[1])
        halves = (jnp.broadcast_to(columns_wD[None], shape), jnp.broadcast_to(rows_hD[:, None], shape))
        grid_hwD = jnp.concatenate(halves, axis=-1)
        table = grid_hwD.reshape(-1, grid_hwD.shape[-1])
        if self.class_row is not None:
            table = jnp.concatenate([self.class_row[...], table])
        return table[None]


class FixedPositions(nnx.Module):
    """Sine-cosine positions, or none: no parameters, and nothing added to a class token."""

    def __init__(self, architecture: Architecture, *, rngs: nnx.Rngs):
        del rngs
        self.grid, self.width = architecture.grid, architecture.width
        self.kind, self.has_class_token = architecture.position_embedding, architecture.pool == "token"

    def __call__(self) -> jax.Array:
        """Returns positions_1SD."""
        return jnp.asarray(fixed_positions(self.kind, self.grid, self.width, has_class_token=self.has_class_token))


POSITIONS: dict[str, Callable[..., nnx.Module]] = {
    "learned_1d": LearnedPositions1D,
    "learned_2d": LearnedPositions2D,
    "sincos2d": FixedPositions,
    "none": FixedPositions,
}


def build_positions(a: Architecture, *, rngs: nnx.Rngs) -> nnx.Module:
    """The position embedding of an architecture: one of ours, or "package.module:name" of the user's own.

    That is a class with the constructor and call of `LearnedPositions1D`: its call returns (1, S, D).
    """
    kind = a.position_embedding
    build = POSITIONS[kind] if kind in POSITIONS else resolve(kind, "config.model.position_embedding")
    return build(a, rngs=rngs)
