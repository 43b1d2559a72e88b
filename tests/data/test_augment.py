"""Every RandAugment operation against a formula written another way, and the quirks the original has."""

import numpy as np
import pytest

from vit_jax.data import augment

IMAGE = np.random.default_rng(0).integers(20, 230, size=(32, 24, 3), dtype=np.uint8)
VALUES = IMAGE.astype(float)
MAGNITUDES = [0, 5, 10, 15, 20]


class FixedSign:
    """Stands for a generator whose coin always falls the same way."""

    def __init__(self, positive):
        self.positive = positive

    def random(self):
        return 0.25 if self.positive else 0.75


def apply(name, magnitude, rng=None):
    return getattr(augment, name)(rng or np.random.default_rng(0), IMAGE, magnitude / 10)


def blended(degenerate, magnitude):
    factor = magnitude / 10 * 1.8 + 0.1
    return np.clip(degenerate + factor * (VALUES - degenerate), 0, 255)


def sampled(rows, columns):
    """The image at (row, column), rounded, grey outside."""
    rows, columns = np.rint(rows).astype(int), np.rint(columns).astype(int)
    inside = (rows >= 0) & (rows < 32) & (columns >= 0) & (columns < 24)
    return np.where(inside[..., None], IMAGE[np.clip(rows, 0, 31), np.clip(columns, 0, 23)], 128)


ROWS, COLUMNS = np.meshgrid(np.arange(32.0), np.arange(24.0), indexing="ij")


def test_there_are_sixteen():
    assert len(set(augment.OPERATIONS)) == 16


def test_autocontrast():
    found = apply("autocontrast", 0)
    low, high = VALUES.min((0, 1)), VALUES.max((0, 1))
    assert np.array_equal(found, np.floor((VALUES - low) * 255 / (high - low) + 1e-9))
    flat = np.full((4, 4, 3), 77, np.uint8)
    assert np.array_equal(augment.autocontrast(None, flat, 1.0), flat)


def test_equalize():
    found = apply("equalize", 0)
    for channel in range(3):
        flat = IMAGE[..., channel].ravel()
        step = (flat.size - np.sum(flat == flat.max())) // 255
        expected = [min((int(np.sum(flat < value)) + step // 2) // step, 255) for value in flat]
        assert found[..., channel].ravel().tolist() == expected
    flat = np.full((4, 4, 3), 77, np.uint8)
    assert np.array_equal(augment.equalize(None, flat, 1.0), flat)


def test_invert():
    assert np.array_equal(apply("invert", 0), 255 - VALUES)


@pytest.mark.parametrize("magnitude", MAGNITUDES)
def test_posterize(magnitude):
    bits = {0: 0, 5: 2, 10: 4, 15: 6, 20: 8}[magnitude]
    assert np.array_equal(apply("posterize", magnitude), VALUES // 2 ** (8 - bits) * 2 ** (8 - bits))
    assert np.array_equal(apply("posterize", 30), IMAGE)


@pytest.mark.parametrize("magnitude", MAGNITUDES)
def test_solarize(magnitude):
    threshold = magnitude / 10 * 256
    assert np.array_equal(apply("solarize", magnitude), np.where(threshold > VALUES, VALUES, 255 - VALUES))


@pytest.mark.parametrize("magnitude", MAGNITUDES)
def test_solarize_add(magnitude):
    added = np.clip(VALUES + int(magnitude * 11), 0, 255)
    assert np.array_equal(apply("solarize_add", magnitude), np.where(VALUES < 128, added, VALUES))


@pytest.mark.parametrize("magnitude", MAGNITUDES)
def test_color(magnitude):
    grey = np.rint(VALUES @ [0.299, 0.587, 0.114])[..., None]
    assert np.abs(apply("color", magnitude) - blended(grey, magnitude)).max() <= 4.5  # grey is rounded, then scaled


@pytest.mark.parametrize("magnitude", MAGNITUDES)
def test_brightness(magnitude):
    assert np.abs(apply("brightness", magnitude) - blended(0.0, magnitude)).max() <= 0.5


@pytest.mark.parametrize("magnitude", MAGNITUDES)
def test_contrast_takes_the_number_of_pixels_for_the_mean(magnitude):
    assert np.abs(apply("contrast", magnitude) - blended(32 * 24 // 256, magnitude)).max() <= 0.5
    large = np.full((224, 224, 3), 196, np.uint8)
    assert np.array_equal(augment.contrast(None, large, magnitude / 10), large)


@pytest.mark.parametrize("magnitude", MAGNITUDES)
def test_sharpness(magnitude):
    smooth = VALUES.copy()
    total = sum(VALUES[i : i + 30, j : j + 22] for i in range(3) for j in range(3))
    smooth[1:-1, 1:-1] = np.rint((total + 4 * VALUES[1:-1, 1:-1]) / 13)
    assert np.abs(apply("sharpness", magnitude) - blended(smooth, magnitude)).max() <= 4.5  # as for color
    tiny = IMAGE[:2, :2]
    assert np.array_equal(augment.sharpness(None, tiny, 1.0), tiny)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("magnitude", [0, 1, 5, 10])
def test_shifts_and_shears(sign, magnitude):
    shear, pixels = sign * 0.03 * magnitude, sign * 10 * magnitude
    expected = {
        "shear_x": sampled(ROWS, COLUMNS + shear * ROWS),
        "shear_y": sampled(ROWS + shear * COLUMNS, COLUMNS),
        "translate_x": sampled(ROWS, COLUMNS + pixels),
        "translate_y": sampled(ROWS + pixels, COLUMNS),
    }
    for name, image in expected.items():
        found = apply(name, magnitude, FixedSign(sign > 0))
        assert np.mean(np.any(found != image, axis=-1)) < 0.05, name  # ties of rounding may fall either way


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("magnitude", [0, 10, 15])
def test_rotate(sign, magnitude):
    angle = np.deg2rad(3 * magnitude * sign)
    rows, columns = ROWS - 15.5, COLUMNS - 11.5
    expected = sampled(
        15.5 - np.sin(angle) * columns + np.cos(angle) * rows, 11.5 + np.cos(angle) * columns + np.sin(angle) * rows
    )
    turned = [apply("rotate", magnitude, FixedSign(s)) for s in (True, False)]
    assert min(np.mean(np.any(image != expected, axis=-1)) for image in turned) < 0.05


@pytest.mark.parametrize("magnitude", [0, 1, 5, 20])
def test_cutout_covers_a_square(magnitude):
    half = 4 * magnitude
    rng = np.random.default_rng(3)
    row, column = np.random.default_rng(3).integers((32, 24))
    covered = (abs(ROWS + 0.5 - row) < half) & (abs(COLUMNS + 0.5 - column) < half)
    assert np.array_equal(apply("cutout", magnitude, rng), np.where(covered[..., None], 128, IMAGE))


def test_identities_of_high_magnitudes():
    for name, magnitude in (("solarize", 10), ("solarize", 20), ("posterize", 20)):
        assert np.array_equal(apply(name, magnitude), IMAGE)


def test_layers_draw_every_operation_alike(monkeypatch):
    drawn = []
    fakes = tuple(lambda rng, image, strength, n=n: drawn.append((n, strength)) or image for n in range(16))
    monkeypatch.setattr(augment, "OPERATIONS", fakes)
    rng = np.random.default_rng(0)
    for _ in range(800):
        augment.randaugment(rng, IMAGE, 2, 15)
    counts = np.bincount([n for n, _ in drawn], minlength=16)
    assert counts.sum() == 1600
    assert counts.min() > 60
    assert {strength for _, strength in drawn} == {1.5}


def test_no_layers_is_the_image():
    assert augment.randaugment(np.random.default_rng(0), IMAGE, 0, 0) is IMAGE


@pytest.mark.parametrize("shape", [(1, 1), (2, 5), (8, 8)])
def test_small_images(shape):
    rng = np.random.default_rng(0)
    image = rng.integers(256, size=(*shape, 3), dtype=np.uint8)
    for operation in augment.OPERATIONS:
        found = operation(rng, image, 1.0)
        assert found.shape == image.shape
        assert found.dtype == np.uint8
