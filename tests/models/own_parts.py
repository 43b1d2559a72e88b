"""Parts as a user writes them, outside of vit_jax: positions, a block, a network."""

import jax
import jax.numpy as jnp
from flax import nnx

from vit_jax.arrays import ModelOutput


class ScaledPositions(nnx.Module):
    """One learned row, times the number of the token."""

    def __init__(self, architecture, *, rngs):
        self.row = nnx.Param(jax.random.normal(rngs.params(), (1, 1, architecture.width)))
        self.length = architecture.sequence_length

    def __call__(self):
        return self.row[...] * jnp.arange(self.length, dtype=jnp.float32)[None, :, None]


class ShortPositions(ScaledPositions):
    def __call__(self):
        return super().__call__()[:, :1]


class GatedBlock(nnx.Module):
    """x + gate * tanh(x W): no attention."""

    def __init__(self, architecture, *, rngs):
        self.novelty = nnx.Param(jax.random.normal(rngs.params(), (architecture.width, architecture.width)) / 8)
        self.gate = nnx.Param(jnp.full((architecture.width,), 0.5))

    def __call__(self, x_BSD, drop_fraction, key):
        return x_BSD + self.gate[...] * jnp.tanh(x_BSD @ self.novelty[...])


class MeanColour(nnx.Module):
    """A linear classifier of the mean colour, written with a scan over its layers."""

    def __init__(self, architecture, key):
        self.mix = nnx.Param(jax.random.normal(key, (5, 3, 3)))
        self.out = nnx.Linear(3, architecture.num_classes, rngs=nnx.Rngs(key))

    def __call__(self, image_BHWC, *, dropout_key=None):
        mean_BC = image_BHWC.astype(jnp.float32).mean(axis=(1, 2))
        mixed_BC, _ = jax.lax.scan(lambda x, weights: (jnp.tanh(x @ weights), None), mean_BC, self.mix[...])
        return ModelOutput(logits_BK=self.out(mixed_BC))
