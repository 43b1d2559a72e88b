"""ThreeAugment, colour jitter and random erasing against formulas, and their distributions."""

import collections

import numpy as np
import pytest
from PIL import Image, ImageFilter, ImageOps

from vit_jax.data import augment

RNG = np.random.default_rng
IMAGE = RNG(0).integers(
    256,
    size=(32, 24, 3),
    dtype=np.uint8,
)
LUMA_OF_RGB = np.array([0.299, 0.587, 0.114])


def test_grey():
    grey = augment.convert_to_grey(IMAGE)

    red, green, blue = np.moveaxis(grey, -1, 0)
    assert np.array_equal(red, green)
    assert np.array_equal(red, blue)
    difference = red - IMAGE @ LUMA_OF_RGB
    assert np.abs(difference).max() <= 0.51


def test_three_augment_takes_one_of_three():
    """Each third of 300 images is within 3.7 standard deviations."""
    rng = RNG(0)
    grey = augment.convert_to_grey(IMAGE)
    solarized = ImageOps.solarize(Image.fromarray(IMAGE))

    kinds = collections.Counter()
    for _ in range(300):
        found = augment.apply_three_augment(rng, IMAGE)

        assert found.shape == IMAGE.shape
        assert found.dtype == np.uint8
        if np.array_equal(found, grey):
            kinds["grey"] += 1
        elif np.array_equal(found, np.asarray(solarized)):
            kinds["solarized"] += 1
        else:
            kinds["blurred"] += 1

    assert len(kinds) == 3
    for count in kinds.values():
        assert 70 < count < 130


def test_blur_is_that_of_pillow(monkeypatch):
    """Pillow approximates a Gaussian by boxes: within 3 grey levels of a smooth image."""
    image = Image.fromarray(IMAGE)
    blur = ImageFilter.GaussianBlur(1.5)
    smooth_image = image.filter(blur)
    smooth = np.asarray(smooth_image)
    monkeypatch.setattr(augment, "BLUR_PIXELS", (1.0, 1.0))

    found = augment.apply_three_augment(FixedChoice(2), smooth)

    found = found.astype(int)
    narrower_blur = ImageFilter.GaussianBlur(1.0)
    expected = smooth_image.filter(narrower_blur)
    difference = np.abs(found - np.asarray(expected))
    change = np.abs(found - smooth)

    assert difference.max() <= 3
    assert change.max() > 8


class FixedChoice:
    """Random numbers: one choice, one order, and factors at the top of their range."""

    def __init__(self, choice=0, order=(0, 1, 2)):
        self.choice = choice
        self.order = order

    def integers(self, size):
        return self.choice

    def permutation(self, size):
        return np.array(self.order)

    def uniform(self, low, high):
        return high


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
def test_color_jitter_by_formula(order):
    """There are three roundings, and each operation enlarges the errors before it."""
    expected = IMAGE.astype(float)
    for operation in order:
        luma = expected @ LUMA_OF_RGB
        others = (0.0, luma.mean(), luma[..., None])  # of brightness, contrast and saturation
        other = others[operation]
        expected = np.clip(1.3 * expected - 0.3 * other, 0, 255)

    found = augment.jitter_colors(
        FixedChoice(order=order),
        IMAGE,
        0.3,
    )

    assert found.dtype == np.uint8
    assert np.abs(found - expected).max() <= 3


def test_color_jitter_samples_factors():
    """Only brightness changes a grey image."""
    rng = RNG(0)
    grey = np.full((2, 2, 3), 100, np.uint8)

    levels = []
    for _ in range(500):
        found = augment.jitter_colors(rng, grey, 0.3)
        levels.append(int(found[0, 0, 0]))

    assert 70 <= min(levels) < 73 < 127 < max(levels) <= 130
    assert np.mean(levels) == pytest.approx(100, abs=3)


def test_no_color_jitter_changes_nothing():
    found = augment.jitter_colors(RNG(0), IMAGE, 0.0)

    assert np.array_equal(found, IMAGE)


def measure_extent(is_set):
    """Return the height and width of the smallest rectangle that holds the pixels."""
    rows, columns = np.nonzero(is_set)
    height = np.ptp(rows) + 1
    width = np.ptp(columns) + 1
    return height, width


def test_erase():
    """Noise fills a rectangle; it is 128 in all channels once in 16 million pixels."""
    rng = RNG(0)

    areas = []
    for _ in range(200):
        image = np.full((60, 80, 3), 128, np.uint8)

        found = augment.erase(rng, image)

        is_erased = (found != 128).any(axis=2)
        height, width = measure_extent(is_erased)
        area = height * width
        assert found is image
        assert is_erased.sum() > 0.97 * area
        assert 0.25 < height / width < 4
        areas.append(area / 4800)

    assert 0.018 < min(areas) < max(areas) < 0.34
    expected_mean = (0.02 + 1 / 3) / 2
    assert np.mean(areas) == pytest.approx(expected_mean, abs=0.03)


def test_no_rectangle_fits_into_a_tiny_image():
    tiny = np.zeros((1, 1, 3), np.uint8)

    for seed in range(20):
        found = augment.erase(RNG(seed), tiny)

        assert not found.any()
