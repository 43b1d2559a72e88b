"""ThreeAugment, colour jitter and random erasing against formulas, and their distributions."""

import collections

import numpy as np
import pytest
from PIL import Image, ImageFilter, ImageOps

from vit_jax.data import augment

RNG = np.random.default_rng
IMAGE = RNG(0).integers(256, size=(32, 24, 3), dtype=np.uint8)
LUMA = IMAGE @ np.array([0.299, 0.587, 0.114])


def test_grey():
    grey = augment.to_grey(IMAGE)

    assert (np.ptp(grey, axis=2) == 0).all()
    assert np.abs(grey[..., 0] - LUMA).max() <= 0.51


def test_three_augment_takes_one_of_three():
    rng = RNG(0)
    kinds = collections.Counter()
    solarized = np.asarray(ImageOps.solarize(Image.fromarray(IMAGE)))

    for _ in range(300):
        found = augment.three_augment(rng, IMAGE)

        assert found.shape == IMAGE.shape
        assert found.dtype == np.uint8

        is_grey, is_solarized = (
            np.array_equal(found, other) for other in (augment.to_grey(IMAGE), solarized)
        )
        kinds["grey" if is_grey else "solarized" if is_solarized else "blurred"] += 1

    assert all(
        70 < kinds[kind] < 130 for kind in ("grey", "solarized", "blurred")
    )  # 3.7 standard deviations


def test_blur_is_that_of_pillow(monkeypatch):
    """Pillow approximates a Gaussian by boxes: within 3 grey levels of a smooth image."""
    smooth = np.asarray(Image.fromarray(IMAGE).filter(ImageFilter.GaussianBlur(1.5)))
    monkeypatch.setattr(augment, "BLUR_PIXELS", (1.0, 1.0))
    found = augment.three_augment(FixedChoice(2), smooth)

    expected = np.asarray(Image.fromarray(smooth).filter(ImageFilter.GaussianBlur(1.0)))
    assert np.abs(found.astype(int) - expected).max() <= 3
    assert np.abs(found.astype(int) - smooth).max() > 8


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


@pytest.mark.parametrize(
    "order",
    [
        (0, 1, 2),
        (2, 0, 1),
    ],
)
def test_color_jitter_by_formula(order):
    expected = IMAGE.astype(float)
    for operation in order:
        luma = expected @ np.array([0.299, 0.587, 0.114])
        other = [0.0, luma.mean(), luma[..., None]][operation]

        expected = np.clip(1.3 * expected - 0.3 * other, 0, 255)

    found = augment.color_jitter(FixedChoice(order=order), IMAGE, 0.3)

    assert found.dtype == np.uint8
    assert (
        np.abs(found - expected).max() <= 3
    )  # three roundings, of which the next operations enlarge the errors


def test_color_jitter_draws_factors_and_orders():
    rng = RNG(0)
    grey = np.full((2, 2, 3), 100, np.uint8)  # only brightness changes it
    levels = [int(augment.color_jitter(rng, grey, 0.3)[0, 0, 0]) for _ in range(500)]

    assert 70 <= min(levels) < 73 < 127 < max(levels) <= 130
    assert np.mean(levels) == pytest.approx(100, abs=3)
    assert np.array_equal(augment.color_jitter(rng, IMAGE, 0.0), IMAGE)


def test_erase():
    rng = RNG(0)
    areas = []

    for _ in range(200):
        image = np.full((60, 80, 3), 128, np.uint8)
        found = augment.erase(rng, image)

        assert found is image

        erased = (found != 128).any(axis=2)
        rows, columns = (np.flatnonzero(erased.any(axis=axis)) for axis in (1, 0))
        height = np.ptp(rows) + 1
        width = np.ptp(columns) + 1

        assert (
            erased.sum() > 0.97 * height * width
        )  # noise may be 128 in all channels, once in 16 million
        assert 0.25 < height / width < 4

        areas.append(height * width / 4800)

    assert 0.018 < min(areas) < max(areas) < 0.34
    assert np.mean(areas) == pytest.approx((0.02 + 1 / 3) / 2, abs=0.03)

    tiny = np.zeros((1, 1, 3), np.uint8)  # no rectangle fits

    assert not augment.erase(rng, tiny).any()
