"""Mixup by hand, its weights' distribution, and images that could not be read."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vit_jax.data.mixup import mix, mixup

B, K = 6, 4
IMAGE = np.random.default_rng(0).normal(size=(B, 2, 3, 3)).astype(np.float32)
LABEL = np.eye(K, dtype=np.float32)[np.arange(B) % K]
ONES = np.ones(B, np.float32)


def test_by_hand():
    image, label, mask = mix(jnp.float32(0.75), jnp.asarray(IMAGE), jnp.asarray(LABEL), jnp.asarray(ONES))
    for row in range(B):
        np.testing.assert_allclose(image[row], 0.75 * IMAGE[row] + 0.25 * IMAGE[row - 1], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(label[row], 0.75 * LABEL[row] + 0.25 * LABEL[row - 1], rtol=1e-6)
    assert np.array_equal(mask, ONES)


def test_weight_one_changes_nothing():
    image, label, _ = mix(jnp.float32(1), jnp.asarray(IMAGE), jnp.asarray(LABEL), jnp.asarray(ONES))
    assert np.array_equal(image, IMAGE)
    assert np.array_equal(label, LABEL)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_dtypes_are_kept_inside_jit(dtype):
    arguments = jnp.asarray(IMAGE, dtype), jnp.asarray(LABEL), jnp.asarray(ONES)
    image, label, mask = jax.jit(mixup, static_argnums=4)(jax.random.key(0), *arguments, 0.5)
    assert (image.dtype, label.dtype, mask.dtype) == (dtype, jnp.float32, jnp.float32)
    np.testing.assert_allclose(label.sum(axis=1), 1, rtol=1e-6)
    assert not np.array_equal(image, arguments[0])


def test_weight_is_the_larger_part_of_a_beta():
    """With alpha 1 the weight is uniform on 1/2 to 1: mean 3/4, and 1,000 draws know it to 0.005."""

    def weight_of(key):
        label = mixup(key, jnp.asarray(IMAGE), jnp.asarray(LABEL), jnp.asarray(ONES), 1.0)[1]
        return label[1, 1]

    weights = jax.vmap(weight_of)(jax.random.split(jax.random.key(0), 1000))
    assert float(weights.min()) >= 0.5
    assert float(weights.max()) <= 1.0
    assert float(weights.mean()) == pytest.approx(0.75, abs=0.02)


def test_unreadable_images_touch_nobody():
    mask = ONES.copy()
    mask[2] = 0
    image, label, found = mix(jnp.float32(0.6), jnp.asarray(IMAGE), jnp.asarray(LABEL), jnp.asarray(mask))
    for row in (2, 3):  # the unreadable one, and the one that would have been mixed with it
        assert np.array_equal(image[row], IMAGE[row])
        assert np.array_equal(label[row], LABEL[row])
    np.testing.assert_allclose(image[4], 0.6 * IMAGE[4] + 0.4 * IMAGE[3], rtol=1e-5, atol=1e-6)
    assert np.array_equal(found, mask)
