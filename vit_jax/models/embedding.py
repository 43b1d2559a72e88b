"""Embedding of an image, or of a ResNet's map of it, as a sequence of tokens.

Legend: B batch, H W height and width of the image or map, C channels; Y rows and X columns of
patches, N = Y X patches, each of h x w pixels, M of them kept; D width.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from vit_jax.config.architecture import Architecture
from vit_jax.kernels import dispatch

LECUN_NORMAL = nnx.initializers.lecun_normal()


class PatchEmbedding(nnx.Module):
    """Linear map of every patch (ViT, eq. 1).

    It equals a convolution whose kernel and stride are the patch.
    """

    def __init__(
        self,
        a: Architecture,
        *,
        rngs: nnx.Rngs,
    ):
        shape_hwCD = (*a.patch_size, a.map_channels, a.width)
        kernel_hwCD = LECUN_NORMAL(rngs.params(), shape_hwCD, jnp.float32)
        self.kernel = nnx.Param(kernel_hwCD)
        self.bias = nnx.Param(jnp.zeros(a.width)) if a.patch_bias else None
        self.dtype = jnp.dtype(a.compute_dtype)

    @jax.named_scope("embedding")
    def __call__(self, image_BHWC: Array, kept_BM: Array | None = None) -> Array:
        """Return tokens_BND, or the tokens of the patches in `kept_BM` alone, (B, M, D).

        Pixels beyond the last complete patch are ignored.
        """
        patch_height, patch_width, _, width = self.kernel.shape
        patches = split_patches(image_BHWC, patch_height, patch_width)
        if kept_BM is not None:
            patches = jnp.take_along_axis(patches, kept_BM[..., None], axis=1)
        kernel_hwCD = self.kernel[...]
        kernel = kernel_hwCD.reshape(-1, width)

        patches = patches.astype(self.dtype)
        kernel = kernel.astype(self.dtype)
        tokens_BND = dispatch.multiply(patches, kernel)
        if self.bias is None:
            return tokens_BND

        bias_D = self.bias[...]
        bias_D = bias_D.astype(self.dtype)
        return tokens_BND + bias_D


def split_patches(
    image_BHWC: Array,
    patch_height: int,
    patch_width: int,
) -> Array:
    """Return the pixels of each patch, (B, N, h w C), line by line from the top left."""
    batch, height, width, channels = image_BHWC.shape
    num_rows = height // patch_height
    num_columns = width // patch_width
    covered_BHWC = image_BHWC[:, : num_rows * patch_height, : num_columns * patch_width]

    shape_BYhXwC = (
        batch,
        num_rows,
        patch_height,
        num_columns,
        patch_width,
        channels,
    )
    pixels_BYhXwC = covered_BHWC.reshape(shape_BYhXwC)
    pixels_BYXhwC = pixels_BYhXwC.swapaxes(2, 3)
    return pixels_BYXhwC.reshape(batch, num_rows * num_columns, -1)
