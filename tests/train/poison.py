"""Images of which one has a label of its own, and losses that are not finite for it."""

import jax.numpy as jnp
import numpy as np
import optax

from vit_jax.data.kinds.in_memory import MemorySource

COUNT = 100
POISONED = 42


def open_data(split, config, seed):
    """Return a hundred random images of the digits' size; one of them alone is of class 9."""
    pixels = np.random.default_rng(0).integers(0, 256, (COUNT, 8, 8, 1), np.uint8)
    labels = np.arange(COUNT) % 9
    labels[POISONED] = 9

    return MemorySource(pixels, labels, tuple("0123456789"))


def infinite(logits_BK, label_BK):
    return optax.softmax_cross_entropy(logits_BK, label_BK) + jnp.where(
        label_BK[:, 9] > 0,
        jnp.inf,
        0.0,
    )


def steep(logits_BK, label_BK):
    """Finite, with a gradient that is not: that of the square root at 0."""
    return optax.softmax_cross_entropy(logits_BK, label_BK) + label_BK[:, 9] * jnp.sqrt(
        jnp.abs(0 * logits_BK[:, 0])
    )
