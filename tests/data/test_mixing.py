"""Mixup and CutMix by hand, the distribution of their weights, and unreadable images."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vit_jax.config.schema import InputConfig
from vit_jax.data.mixing import mix, sample_cutmix_weight, sample_mixup_weight

B = 6
K = 4
H = 8
W = 10
IMAGE = np.random.default_rng(0).normal(size=(B, H, W, 3)).astype(np.float32)
LABEL = np.eye(K, dtype=np.float32)[np.arange(B) % K]


def make_config(**fields):
    return InputConfig(
        train_split="train",
        test_split="test",
        image_size=(H, W),
        **fields,
    )


def mix_batch(mask, **fields):
    """Mix the batch under one fixed key; return images and labels in NumPy."""
    image, label = mix(
        jax.random.key(0),
        jnp.asarray(IMAGE),
        jnp.asarray(LABEL),
        jnp.asarray(mask, jnp.float32),
        make_config(**fields),
    )

    assert image.dtype == jnp.float32
    assert label.dtype == jnp.float32
    return np.asarray(image), np.asarray(label)


def blend(rows, row, weight):
    """Return the weighted mean of a row and the row before it."""
    return weight * rows[row] + (1 - weight) * rows[row - 1]


def is_mixed(row, unreadable):
    """Return whether both images of a row are readable."""
    return unreadable not in (row, row - 1)


@pytest.mark.parametrize("unreadable", [None, 2])
def test_mixup_by_hand(unreadable):
    """Each row is blended with the row before it, unless one of the two is unreadable."""
    image, label = mix_batch(np.arange(B) != unreadable, mixup_alpha=1.0)

    drawn_weight = float(label[0, 0])
    assert 0.5 < drawn_weight < 0.95

    for row in range(B):
        weight = drawn_weight if is_mixed(row, unreadable) else 1

        expected_image = blend(IMAGE, row, weight)
        expected_label = blend(LABEL, row, weight)
        np.testing.assert_allclose(
            image[row],
            expected_image,
            rtol=1e-5,
            atol=1e-6,
        )
        np.testing.assert_allclose(label[row], expected_label, rtol=1e-6)


@pytest.mark.parametrize("unreadable", [None, 2])
def test_cutmix_by_hand(unreadable):
    """Each pixel comes from one image; the label has the shares of the pixels."""
    image, label = mix_batch(np.arange(B) != unreadable, cutmix_alpha=1.0)

    for row in range(B):
        is_kept = (image[row] == IMAGE[row]).all(axis=2)
        expected_image = np.where(
            is_kept[..., None],
            IMAGE[row],
            IMAGE[row - 1],
        )
        assert np.array_equal(image[row], expected_image)

        share = is_kept.mean()
        if is_mixed(row, unreadable):
            assert 0 < share < 1
        else:
            assert share == 1
        np.testing.assert_allclose(
            label[row],
            blend(LABEL, row, share),
            rtol=1e-6,
        )

        is_pasted = ~is_kept
        num_rows = is_pasted.any(axis=1).sum()
        num_columns = is_pasted.any(axis=0).sum()
        assert is_pasted.sum() == num_rows * num_columns, "the pasted pixels are a rectangle"


def test_mixup_and_cutmix_take_turns():
    """CutMix has 0.3 of 300 steps, within four standard deviations of a binomial; mixup the rest."""
    config = make_config(
        mixup_alpha=0.8,
        cutmix_alpha=1.0,
        cutmix_fraction=0.3,
    )

    def is_cutmix(key):
        image, _ = mix(
            key,
            jnp.asarray(IMAGE),
            jnp.asarray(LABEL),
            jnp.ones(B),
            config,
        )
        return jnp.isin(image[1], jnp.asarray(IMAGE[:2])).all()

    keys = jax.random.split(jax.random.key(0), 300)
    found = np.asarray(jax.jit(jax.vmap(is_cutmix))(keys))

    deviation = np.sqrt(0.3 * 0.7 / 300)
    assert abs(found.mean() - 0.3) < 4 * deviation


def test_weight_is_the_larger_part_of_a_beta():
    """With alpha 1 the weight is uniform on 1/2 to 1.

    Its mean is 3/4, which 1,000 samples estimate to 0.005.
    """
    keys = jax.random.split(jax.random.key(0), 1000)
    weights = jax.vmap(lambda key: sample_mixup_weight(key, 1.0))(keys)

    assert 0.5 <= float(weights.min()) < float(weights.max()) <= 1.0
    assert float(weights.mean()) == pytest.approx(0.75, abs=0.02)


def find_uncut_boxes(is_inside):
    """Return which boxes (N, H, W) have pixels and touch no border."""
    touches_rows = is_inside[:, [0, -1]].any(axis=(1, 2))
    touches_columns = is_inside[:, :, [0, -1]].any(axis=(1, 2))
    return is_inside.any(axis=(1, 2)) & ~(touches_rows | touches_columns)


def test_boxes_of_cutmix():
    """A box has the aspect of the image; with alpha 1 its area is uniform before the border cuts it.

    A centre is uniform. A box with sides of s images has (1 - s / 4)^2 of its area inside on
    average, and s^2 is uniform: the mean of s^2 (1 - s / 4)^2 is 1/2 - 1/5 + 1/48 = 0.321.
    """
    sample = jax.jit(jax.vmap(lambda key: sample_cutmix_weight(key, 1.0, 64, 96)[..., 0]))
    inside = 1 - np.asarray(sample(jax.random.split(jax.random.key(0), 3000)))

    assert set(np.unique(inside)) == {0, 1}
    assert inside.mean() == pytest.approx(1 / 2 - 1 / 5 + 1 / 48, abs=0.02)

    is_uncut = find_uncut_boxes(inside)
    heights = inside.any(axis=2).sum(axis=1)[is_uncut]
    widths = inside.any(axis=1).sum(axis=1)[is_uncut]

    assert is_uncut.sum() > 200
    assert np.abs(heights / 64 - widths / 96).max() < 1 / 64 + 1e-9, "sides are rounded down"
    assert (heights % 2 == 1).any()


def count_covered(centre, side, pixels):
    """Return the pixels that a box of this side covers in one direction."""
    return min(centre + (side + 1) // 2, pixels) - max(centre - side // 2, 0)


def test_boxes_of_odd_sides_keep_their_last_pixel():
    """The mean area of a box on 16 pixels is that of the sum over all sides and centres."""
    pixels = 16
    uniform_areas = np.linspace(0, 1, 100_001)[1:]
    all_sides = np.floor(pixels * np.sqrt(uniform_areas)).astype(int)
    sides, counts = np.unique(all_sides, return_counts=True)

    mean_covered = []
    for side in sides:
        covered = [count_covered(centre, side, pixels) for centre in range(pixels)]
        mean_covered.append(np.mean(covered))
    mean_areas = np.square(np.asarray(mean_covered) / pixels)
    expected = 1 - np.average(mean_areas, weights=counts)

    sample = jax.jit(jax.vmap(lambda key: sample_cutmix_weight(key, 1.0, pixels, pixels).mean()))
    weights = sample(jax.random.split(jax.random.key(1), 40_000))

    assert expected == pytest.approx(0.700, abs=1e-3)
    assert float(weights.mean()) == pytest.approx(expected, abs=0.005)
