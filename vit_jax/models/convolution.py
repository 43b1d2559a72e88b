"""What the ResNets are made of: standardised convolutions, group norm and pooling.

Legend: B batch, H W height and width, C channels, I O channels of a kernel's input and output, G groups.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from vit_jax.config import Architecture
from vit_jax.config.variants import NUM_GROUPS
from vit_jax.models.embed import LECUN_NORMAL

CONVOLUTION = "convolution"  # the name under which rematerialisation knows what a convolution gave
Padding = str | Sequence[tuple[int, int]]


class StandardizedConv(nnx.Module):
    """A convolution without bias whose kernel has mean 0 and variance 1 in every output channel, at every use.

    The two releases guard the division differently (BiT adds to the variance, ViT's hybrids to its root), so the
    architecture says which.
    """

    def __init__(
        self,
        size: int,
        inputs: int,
        outputs: int,
        *,
        stride: int = 1,
        padding: Padding,
        a: Architecture,
        rngs: nnx.Rngs,
    ):
        self.kernel = nnx.Param(LECUN_NORMAL(rngs.params(), (size, size, inputs, outputs), jnp.float32))
        self.stride, self.padding = stride, padding if isinstance(padding, str) else tuple(padding)
        self.epsilon, self.epsilon_added_to = a.standardization_epsilon, a.standardization_epsilon_added_to
        self.dtype = jnp.dtype(a.compute_dtype)

    def __call__(self, x_BHWC: jax.Array) -> jax.Array:
        """Returns (B, H / stride, W / stride, O), rounded up where the padding covers the border."""
        kernel = standardize(self.kernel[...], self.epsilon, self.epsilon_added_to).astype(self.dtype)
        y_BHWO = jax.lax.conv_general_dilated(
            x_BHWC.astype(self.dtype),
            kernel,
            window_strides=(self.stride, self.stride),
            padding=self.padding,
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )
        return checkpoint_name(y_BHWO, CONVOLUTION)


def standardize(kernel_HWIO: jax.Array, epsilon: float, epsilon_added_to: str) -> jax.Array:
    """Subtracts the mean of every output channel and divides by its standard deviation, in float32.

    Args:
      kernel_HWIO: float32.
      epsilon: guards the division.
      epsilon_added_to: "variance", before the root, or "std", after it.
    """
    centred = kernel_HWIO - kernel_HWIO.mean(axis=(0, 1, 2), keepdims=True)
    variance = jnp.square(centred).mean(axis=(0, 1, 2), keepdims=True)
    if epsilon_added_to == "variance":
        return centred * jax.lax.rsqrt(variance + epsilon)
    return centred / (jnp.sqrt(variance) + epsilon)


class GroupNorm(nnx.Module):
    """Normalises over H, W and the channels of a group, statistics in float32 from centred values."""

    def __init__(self, channels: int, a: Architecture, *, initial_scale: float = 1.0):
        self.scale = nnx.Param(jnp.full((channels,), initial_scale))
        self.bias = nnx.Param(jnp.zeros((channels,)))
        self.epsilon, self.dtype = a.group_norm_epsilon, jnp.dtype(a.compute_dtype)

    def __call__(self, x_BHWC: jax.Array) -> jax.Array:
        batch, height, width, channels = x_BHWC.shape
        shape = (batch, height, width, NUM_GROUPS, channels // NUM_GROUPS)
        centred = x_BHWC.astype(jnp.float32).reshape(shape)
        centred = centred - centred.mean(axis=(1, 2, 4), keepdims=True)
        inverse_std = jax.lax.rsqrt(jnp.square(centred).mean(axis=(1, 2, 4), keepdims=True) + self.epsilon)
        normal_BHWC = (centred * inverse_std).reshape(x_BHWC.shape)
        return (normal_BHWC * self.scale[...] + self.bias[...]).astype(self.dtype)


def max_pool(x_BHWC: jax.Array, padding: str) -> jax.Array:
    """Maximum over 3x3 windows, two cells apart. "SAME" pads with nothing, "VALID" does not pad."""
    return jax.lax.reduce_window(x_BHWC, -jnp.inf, jax.lax.max, (1, 3, 3, 1), (1, 2, 2, 1), padding)
