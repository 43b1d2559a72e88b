"""Mixup and CutMix by hand, the distribution of their weights, and images that could not be read."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vit_jax.config.schema import InputConfig
from vit_jax.data.mixing import cutmix_weight, mix, mixup_weight

B = 6
K = 4
H = 8
W = 10
IMAGE = np.random.default_rng(0).normal(size=(B, H, W, 3)).astype(np.float32)
LABEL = np.eye(K, dtype=np.float32)[np.arange(B) % K]


def mixed(key=0, mask=None, **fields):
    config = InputConfig(
        train_split="train",
        test_split="test",
        image_size=(H, W),
        **fields,
    )
    mask = jnp.ones(B) if mask is None else jnp.asarray(mask, jnp.float32)
    image, label = mix(jax.random.key(key), jnp.asarray(IMAGE), jnp.asarray(LABEL), mask, config)

    assert (image.dtype, label.dtype) == (jnp.float32,) * 2

    return np.asarray(image), np.asarray(label)


@pytest.mark.parametrize("unreadable", [None, 2])
def test_mixup_by_hand(unreadable):
    image, label = mixed(mask=np.arange(B) != unreadable, mixup_alpha=1.0)
    part = float(label[0, 0])

    assert 0.5 < part < 0.95

    for row in range(B):
        # Neither the unreadable one nor the one mixed with it
        weight = 1 if unreadable in (row, row - 1) else part

        np.testing.assert_allclose(
            image[row],
            weight * IMAGE[row] + (1 - weight) * IMAGE[row - 1],
            rtol=1e-5,
            atol=1e-6,
        )
        np.testing.assert_allclose(
            label[row],
            weight * LABEL[row] + (1 - weight) * LABEL[row - 1],
            rtol=1e-6,
        )


@pytest.mark.parametrize("unreadable", [None, 2])
def test_cutmix_by_hand(unreadable):
    """Each pixel comes from one image; the label has the shares of the pixels."""
    image, label = mixed(mask=np.arange(B) != unreadable, cutmix_alpha=1.0)
    for row in range(B):
        is_alone = unreadable in (row, row - 1)
        is_own = (image[row] == IMAGE[row]).all(axis=2)

        assert np.array_equal(image[row], np.where(is_own[..., None], IMAGE[row], IMAGE[row - 1]))

        share = is_own.mean()

        assert share == 1 if is_alone else 0 < share < 1
        np.testing.assert_allclose(
            label[row],
            share * LABEL[row] + (1 - share) * LABEL[row - 1],
            rtol=1e-6,
        )

        rows, columns = (np.flatnonzero(~is_own.all(axis=axis)) for axis in (1, 0))

        assert (~is_own).sum() == len(rows) * len(columns)  # a rectangle


def test_mixup_and_cutmix_take_turns():
    """0.3 of 300 steps have CutMix, within four standard deviations of a binomial; the others mixup."""

    def is_cutmix(key):
        image, _ = mix(key, jnp.asarray(IMAGE), jnp.asarray(LABEL), jnp.ones(B), config)
        return jnp.isin(image[1], jnp.asarray(IMAGE[:2])).all()

    fields = {
        "mixup_alpha": 0.8,
        "cutmix_alpha": 1.0,
        "cutmix_fraction": 0.3,
    }
    config = InputConfig(
        train_split="train",
        test_split="test",
        image_size=(H, W),
        **fields,
    )
    found = np.asarray(jax.jit(jax.vmap(is_cutmix))(jax.random.split(jax.random.key(0), 300)))

    assert abs(found.mean() - 0.3) < 4 * np.sqrt(0.3 * 0.7 / 300)


def test_weight_is_the_larger_part_of_a_beta():
    """With alpha 1 the weight is uniform on 1/2 to 1: mean 3/4, and 1,000 draws know it to 0.005."""
    weights = jax.vmap(lambda key: mixup_weight(key, 1.0))(
        jax.random.split(jax.random.key(0), 1000)
    )

    assert 0.5 <= float(weights.min()) < float(weights.max()) <= 1.0
    assert float(weights.mean()) == pytest.approx(0.75, abs=0.02)


def test_boxes_of_cutmix():
    """A box has the aspect of the image; with alpha 1 its area is uniform before the border cuts it off.

    A centre is uniform. A box with sides of s images has (1 - s / 4)^2 of its area inside on
    average, and s^2 is uniform: the mean of s^2 (1 - s / 4)^2 is 1/2 - 1/5 + 1/48 = 0.321.
    """
    draw = jax.jit(jax.vmap(lambda key: cutmix_weight(key, 1.0, 64, 96)[..., 0]))
    inside = 1 - np.asarray(draw(jax.random.split(jax.random.key(0), 3000)))

    assert set(np.unique(inside)) == {0, 1}
    assert inside.mean() == pytest.approx(1 / 2 - 1 / 5 + 1 / 48, abs=0.02)

    heights = inside.any(axis=2).sum(axis=1)
    widths = inside.any(axis=1).sum(axis=1)
    free = ~(inside[:, [0, -1]].any(axis=(1, 2)) | inside[:, :, [0, -1]].any(axis=(1, 2))) & (
        heights > 0
    )

    assert free.sum() > 200
    assert np.abs(heights[free] / 64 - widths[free] / 96).max() < 1 / 64 + 1e-9  # rounded down
    assert (heights[free] % 2 == 1).any()


def test_boxes_of_odd_sides_keep_their_last_pixel():
    """The mean area of a box on 16 pixels, as the sum over all its sides and centres."""
    pixels = 16
    side = np.floor(pixels * np.sqrt(np.linspace(0, 1, 100_001)[1:])).astype(
        int
    )  # of a uniform area
    sides, counts = np.unique(side, return_counts=True)
    covered = [
        np.mean([_covered(centre, side, pixels) for centre in range(pixels)]) for side in sides
    ]

    expected = np.average(np.square(np.asarray(covered) / pixels), weights=counts)
    draw = jax.jit(jax.vmap(lambda key: cutmix_weight(key, 1.0, pixels, pixels).mean()))
    weights = draw(jax.random.split(jax.random.key(1), 40_000))

    assert 1 - expected == pytest.approx(0.700, abs=1e-3)
    assert float(weights.mean()) == pytest.approx(1 - expected, abs=0.005)


def _covered(centre, side, pixels):
    return min(centre + (side + 1) // 2, pixels) - max(centre - side // 2, 0)
