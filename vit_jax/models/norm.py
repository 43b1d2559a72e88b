"""Norms over the width of tokens: layer norm and RMS norm (Zhang & Sennrich, 2019).

Legend: D width of the normalised axis; other dimensions do not matter here.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from vit_jax.config.architecture import Architecture
from vit_jax.kernels import STATISTICS


class LayerNorm(nnx.Module):
    """Normalises over the last axis.

    Flax's own layer mixes bfloat16 and float32 in a way that strict dtype promotion rejects.
    """

    def __init__(
        self,
        a: Architecture,
        width: int | None = None,
    ):
        width = width or a.width
        self.scale = nnx.Param(jnp.ones(width))
        self.bias = nnx.Param(jnp.zeros(width))
        self.epsilon = a.layer_norm_epsilon
        self.dtype = jnp.dtype(a.compute_dtype)

    @jax.named_scope("norm")
    def __call__(self, x: Array) -> Array:
        """Return an array of the shape of `x`, (..., D), in the compute dtype."""
        x = x.astype(jnp.float32)
        mean = x.mean(-1, keepdims=True)
        squares = jnp.square(x)
        mean_of_squares = squares.mean(-1, keepdims=True)  # in the same pass over x
        mean = checkpoint_name(mean, STATISTICS)
        mean_of_squares = checkpoint_name(mean_of_squares, STATISTICS)

        variance = mean_of_squares - jnp.square(mean)
        variance = jnp.maximum(variance, 0.0)  # rounding can make it negative
        inverse = jax.lax.rsqrt(variance + self.epsilon)

        scale = inverse * self.scale[...]
        normed = (x - mean) * scale
        normed = normed + self.bias[...]
        return normed.astype(self.dtype)


class RMSNorm(nnx.Module):
    """Divides by the root mean square over the last axis."""

    def __init__(
        self,
        a: Architecture,
        width: int | None = None,
    ):
        width = width or a.width
        self.scale = nnx.Param(jnp.ones(width))
        self.epsilon = a.layer_norm_epsilon
        self.dtype = jnp.dtype(a.compute_dtype)

    @jax.named_scope("norm")
    def __call__(self, x: Array) -> Array:
        """Return an array of the shape of `x`, (..., D), in the compute dtype."""
        x = x.astype(jnp.float32)
        squares = jnp.square(x)
        mean_of_squares = squares.mean(-1, keepdims=True)
        mean_of_squares = checkpoint_name(mean_of_squares, STATISTICS)
        inverse = jax.lax.rsqrt(mean_of_squares + self.epsilon)

        scale = inverse * self.scale[...]
        normed = x * scale
        return normed.astype(self.dtype)


Norm = LayerNorm | RMSNorm
NORMS: dict[str, Callable[..., Norm]] = {
    "layer": LayerNorm,
    "rms": RMSNorm,
}


def build_norm(a: Architecture, width: int | None = None) -> Norm:
    """Return a norm of the architecture's kind.

    `width` is the number of values that it normalises; None: the width D of tokens.
    """
    norm_class = NORMS[a.norm]
    return norm_class(a, width)


def identity(x: Array) -> Array:
    """Return `x`, in the place of a norm or scale that a network does not have."""
    return x
