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
        self.kernel = nnx.Param(LECUN_NORMAL(rngs.params(), shape_hwCD, jnp.float32))
        self.bias: nnx.Param | None
        if a.patch_bias:
            self.bias = nnx.Param(jnp.zeros((a.width,), jnp.float32))
        else:
            self.bias = None
        self.dtype = jnp.dtype(a.compute_dtype)

    @jax.named_scope("embedding")
    def __call__(self, image_BHWC: jax.Array) -> jax.Array:
        """Return tokens_BND in raster order. Pixels beyond the last complete patch are ignored."""
        patch_height, patch_width, channels, width = self.kernel.shape
        batch, height, image_width, _ = image_BHWC.shape
        rows = height // patch_height
        columns = image_width // patch_width

        covered = image_BHWC[:, : rows * patch_height, : columns * patch_width]
        patches = covered.reshape(batch, rows, patch_height, columns, patch_width, channels)
        patches = patches.transpose(0, 1, 3, 2, 4, 5).reshape(batch, rows * columns, -1)

        kernel = self.kernel[...].reshape(-1, width)
        tokens_BND = dispatch.multiply(patches.astype(self.dtype), kernel.astype(self.dtype))
        if self.bias is None:
            return tokens_BND
        return tokens_BND + self.bias[...].astype(self.dtype)
