"""Mixup and CutMix by hand, the distribution of their weights, and unreadable images."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose

from vit_jax.config.schema import InputConfig
from vit_jax.data.mixing import mix, sample_cutmix_weight, sample_mixup_weight

B = 6
K = 4
H = 8
W = 10
KEY = jax.random.key(0)
RNG = np.random.default_rng(0)
IMAGE = RNG.normal(size=(B, H, W, 3)).astype(np.float32)
CLASSES = np.arange(B) % K
LABEL = np.eye(K, dtype=np.float32)[CLASSES]


def make_config(**fields):
    return InputConfig(
        train_split="train",
        test_split="test",
        image_size=(H, W),
        **fields,
    )


def mix_by_key(key, mask, config):
    return mix(
        key,
        jnp.asarray(IMAGE),
        jnp.asarray(LABEL),
        jnp.asarray(mask, jnp.float32),
        config,
    )


def mix_readable(unreadable, **fields):
    """Mix the batch without an unreadable row; return images and labels in NumPy."""
    mask = np.arange(B) != unreadable
    config = make_config(**fields)

    image, label = mix_by_key(KEY, mask, config)

    assert image.dtype == jnp.float32
    assert label.dtype == jnp.float32
    return np.asarray(image), np.asarray(label)


def blend(rows, row, weight):
    """Return the weighted mean of a row and the row before it."""
    before = rows[row - 1]
    return before + weight * (rows[row] - before)


def is_mixed(row, unreadable):
    """Return whether both images of a row are readable."""
    return unreadable not in (row, row - 1)


@pytest.mark.parametrize("unreadable", [None, 2])
def test_mixup_by_hand(unreadable):
    """Each row is blended with the row before it, unless one of the two is unreadable."""
    image, label = mix_readable(unreadable, mixup_alpha=1.0)

    sampled_weight = float(label[0, 0])
    assert 0.5 < sampled_weight < 0.95

    for row in range(B):
        weight = sampled_weight if is_mixed(row, unreadable) else 1

        expected_image = blend(IMAGE, row, weight)
        expected_label = blend(LABEL, row, weight)
        assert_allclose(
            image[row],
            expected_image,
            rtol=1e-5,
            atol=1e-6,
        )
        assert_allclose(
            label[row],
            expected_label,
            rtol=1e-6,
        )


@pytest.mark.parametrize("unreadable", [None, 2])
def test_cutmix_by_hand(unreadable):
    """Each pixel comes from one image; the label has the shares of the pixels."""
    image, label = mix_readable(unreadable, cutmix_alpha=1.0)

    for row in range(B):
        original = IMAGE[row]
        before = IMAGE[row - 1]
        is_kept = (image[row] == original).all(axis=2)
        expected_image = np.where(
            is_kept[..., None],
            original,
            before,
        )
        assert np.array_equal(image[row], expected_image)

        share = is_kept.mean()
        if is_mixed(row, unreadable):
            assert 0 < share < 1
        else:
            assert share == 1
        expected_label = blend(LABEL, row, share)
        assert_allclose(
            label[row],
            expected_label,
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

    @jax.jit
    @jax.vmap
    def is_cutmix(key):
        image, _ = mix_by_key(key, np.ones(B), config)
        first_two = jnp.asarray(IMAGE[:2])
        return jnp.isin(image[1], first_two).all()

    keys = jax.random.split(KEY, 300)
    found = np.asarray(is_cutmix(keys))

    deviation = np.sqrt(0.3 * 0.7 / 300)
    assert found.mean() == pytest.approx(0.3, abs=4 * deviation)


def test_weight_is_the_larger_part_of_a_beta():
    """With alpha 1 the weight is uniform on 1/2 to 1.

    Its mean is 3/4, which 1,000 samples estimate to 0.005.
    """
    keys = jax.random.split(KEY, 1000)
    sample = jax.vmap(lambda key: sample_mixup_weight(key, 1.0))

    weights = np.asarray(sample(keys))

    assert 0.5 <= weights.min() < weights.max() <= 1.0
    assert weights.mean() == pytest.approx(0.75, abs=0.02)


def find_uncut_boxes(is_inside):
    """Return which boxes (N, H, W) have pixels and touch no border."""
    num_pixels = is_inside.sum(axis=(1, 2))
    num_inner_pixels = is_inside[:, 1:-1, 1:-1].sum(axis=(1, 2))
    has_pixels = num_pixels > 0
    return has_pixels & (num_pixels == num_inner_pixels)


def make_cutmix_sampler(height, width):
    """Return a function from keys to the weights (N, H, W) of pixels, with alpha 1."""

    @jax.jit
    @jax.vmap
    def sample(key):
        weight = sample_cutmix_weight(key, 1.0, height, width)
        return weight[..., 0]

    return sample


def test_boxes_of_cutmix():
    """A box has the aspect of the image; with alpha 1 its area is uniform before the border cuts it.

    A centre is uniform. A box with sides of s images has (1 - s / 4)^2 of its area inside on
    average, and s^2 is uniform: the mean of s^2 (1 - s / 4)^2 is 1/2 - 1/5 + 1/48 = 0.321.
    """
    sample = make_cutmix_sampler(64, 96)
    keys = jax.random.split(KEY, 3000)

    inside = 1 - np.asarray(sample(keys))

    expected_mean = 1 / 2 - 1 / 5 + 1 / 48
    assert set(np.unique(inside)) == {0, 1}
    assert inside.mean() == pytest.approx(expected_mean, abs=0.02)

    boxes = inside[find_uncut_boxes(inside)]
    heights = boxes.any(axis=2).sum(axis=1)
    widths = boxes.any(axis=1).sum(axis=1)

    assert len(boxes) > 200
    differences = np.abs(heights / 64 - widths / 96)
    assert differences.max() < 1 / 64 + 1e-9, "sides are rounded down"
    assert (heights % 2 == 1).any()


def count_covered(centre, side, pixels):
    """Return the pixels that a box of this side covers in one direction."""
    half = side // 2
    larger_half = side - half
    first = max(centre - half, 0)
    end = min(centre + larger_half, pixels)
    return end - first


def test_boxes_of_odd_sides_keep_their_last_pixel():
    """The mean area of a box on 16 pixels is that of the sum over all sides and centres."""
    pixels = 16
    uniform_areas = np.linspace(0, 1, 100_001)[1:]
    exact_sides = pixels * np.sqrt(uniform_areas)
    all_sides = np.floor(exact_sides).astype(int)
    sides, counts = np.unique(all_sides, return_counts=True)

    mean_covered = []
    for side in sides:
        covered = [count_covered(centre, side, pixels) for centre in range(pixels)]
        mean_covered.append(np.mean(covered))
    mean_shares = np.array(mean_covered) / pixels
    expected = 1 - np.average(mean_shares**2, weights=counts)

    sample = make_cutmix_sampler(pixels, pixels)
    keys = jax.random.split(jax.random.key(1), 40_000)
    weights = np.asarray(sample(keys))

    assert expected == pytest.approx(0.700, abs=1e-3)
    assert weights.mean() == pytest.approx(expected, abs=0.005)
