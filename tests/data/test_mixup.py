"""Mixup by hand, its weights' distribution, and images that could not be read."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vit_jax.data.mixup import mixup

B, K = 6, 4
IMAGE = np.random.default_rng(0).normal(size=(B, 2, 3, 3)).astype(np.float32)
LABEL = np.eye(K, dtype=np.float32)[np.arange(B) % K]


@pytest.mark.parametrize("unreadable", [None, 2])
def test_by_hand(unreadable):
    mask = np.where(np.arange(B) == unreadable, 0, 1).astype(np.float32)
    image, label, found = mixup(jax.random.key(0), jnp.asarray(IMAGE), jnp.asarray(LABEL), jnp.asarray(mask), 1.0)
    assert np.array_equal(found, mask)
    assert (image.dtype, label.dtype, found.dtype) == (jnp.float32,) * 3
    mixed = float(label[0, 0])
    assert 0.5 < mixed < 0.95
    for row in range(B):
        weight = 1 if unreadable in (row, row - 1) else mixed  # neither the unreadable one nor the one mixed with it
        np.testing.assert_allclose(
            image[row], weight * IMAGE[row] + (1 - weight) * IMAGE[row - 1], rtol=1e-5, atol=1e-6
        )
        np.testing.assert_allclose(label[row], weight * LABEL[row] + (1 - weight) * LABEL[row - 1], rtol=1e-6)


def test_weight_is_the_larger_part_of_a_beta():
    """With alpha 1 the weight is uniform on 1/2 to 1: mean 3/4, and 1,000 draws know it to 0.005."""
    arguments = jnp.asarray(IMAGE[:, :1], jnp.bfloat16), jnp.asarray(LABEL), jnp.ones(B, jnp.float32), 1.0
    mixed = jax.jit(jax.vmap(lambda key: mixup(key, *arguments)))
    image, label, mask = mixed(jax.random.split(jax.random.key(0), 1000))
    assert (image.dtype, label.dtype, mask.dtype) == (jnp.bfloat16, jnp.float32, jnp.float32)
    np.testing.assert_allclose(label.sum(axis=2), 1, rtol=1e-6)
    weights = label[:, 1, 1]
    assert 0.5 <= float(weights.min()) < float(weights.max()) <= 1.0
    assert float(weights.mean()) == pytest.approx(0.75, abs=0.02)
