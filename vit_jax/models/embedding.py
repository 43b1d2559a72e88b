"""Embedding of an image, or of a ResNet's map of it, as a sequence of tokens.

Legend: B batch, H W height and width of the image or map, C channels, N patches of h x w, D width.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from vit_jax.config.architecture import Architecture
from vit_jax.kernels import dispatch

LECUN_NORMAL = nnx.initializers.lecun_normal()


class PatchEmbedding(nnx.Module):
    """Linear map of every patch (ViT, eq. 1).

    It equals a convolution whose kernel and stride are the patch.
    """

    def __init__(self, a: Architecture, *, rngs: nnx.Rngs):
        shape_hwCD = (*a.patch_size, a.map_channels, a.width)
        kernel_hwCD = LECUN_NORMAL(rngs.params(), shape_hwCD, jnp.float32)
        self.kernel = nnx.Param(kernel_hwCD)

        self.bias = build_bias(a)
        self.dtype = jnp.dtype(a.compute_dtype)

    @jax.named_scope("embedding")
    def __call__(self, image_BHWC: jax.Array) -> jax.Array:
        """Return tokens_BND in raster order. Pixels beyond the last complete patch are ignored."""
        patch_height, patch_width, channels, width = self.kernel.shape
        batch, height, image_width, _ = image_BHWC.shape
        rows = height // patch_height
        columns = image_width // patch_width

        covered = image_BHWC[:, : rows * patch_height, : columns * patch_width]
        patches = covered.reshape(
            batch,
            rows,
            patch_height,
            columns,
            patch_width,
            channels,
        )
        patches = patches.transpose(0, 1, 3, 2, 4, 5)
        patches = patches.reshape(batch, rows * columns, -1)

        kernel = self.kernel[...]
        kernel = kernel.reshape(-1, width)
        patches = patches.astype(self.dtype)
        kernel = kernel.astype(self.dtype)
        tokens_BND = dispatch.multiply(patches, kernel)
        if self.bias is None:
            return tokens_BND

        bias_D = self.bias[...].astype(self.dtype)
        return tokens_BND + bias_D


def build_bias(a: Architecture) -> nnx.Param | None:
    """Return the bias of the patch embedding, (D,); None without one."""
    if not a.patch_bias:
        return None
    return nnx.Param(jnp.zeros((a.width,), jnp.float32))
