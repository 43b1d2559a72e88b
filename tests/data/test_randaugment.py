"""Every RandAugment operation against another formula, and the quirks of the original."""

import types

import numpy as np
import pytest

from vit_jax.data import randaugment

HEIGHT = 32
WIDTH = 24
IMAGE = np.random.default_rng(0).integers(
    20,
    230,
    size=(HEIGHT, WIDTH, 3),
    dtype=np.uint8,
)
VALUES = IMAGE.astype(float)
ROWS, COLUMNS = np.meshgrid(np.arange(32.0), np.arange(24.0), indexing="ij")
GREY = np.rint(VALUES @ [0.299, 0.587, 0.114])[..., None]


def apply(name, magnitude, rng=None):
    """Apply an operation to the image at a magnitude of 0 to 20."""
    operation = getattr(randaugment, name)
    return operation(
        rng or np.random.default_rng(0),
        IMAGE,
        magnitude / 10,
    )


def autocontrast(magnitude):
    low = VALUES.min((0, 1))
    high = VALUES.max((0, 1))
    return np.floor((VALUES - low) * 255 / (high - low) + 1e-9)


def equalize(magnitude):
    """Map each value to the number of darker pixels, in steps of equal numbers of pixels."""
    expected = np.empty_like(VALUES)
    for channel in range(3):
        flat = IMAGE[..., channel].ravel()
        step = (flat.size - np.sum(flat == flat.max())) // 255

        mapped = []
        for value in flat:
            num_darker = int(np.sum(flat < value))
            mapped.append(min((num_darker + step // 2) // step, 255))
        expected[..., channel] = np.reshape(mapped, IMAGE.shape[:2])

    return expected


def invert(magnitude):
    return 255 - VALUES


def posterize(magnitude):
    bits = {0: 1, 5: 2, 10: 4, 15: 6, 20: 8}[magnitude]
    unit = 2 ** (8 - bits)
    return VALUES // unit * unit


def solarize(magnitude):
    threshold = {0: 0, 5: 128, 10: 0, 15: 128, 20: 0}[magnitude]
    return np.where(threshold > VALUES, VALUES, 255 - VALUES)


def solarize_add(magnitude):
    added = int(magnitude * 11)
    return np.where(VALUES < 128, np.clip(VALUES + added, 0, 255), VALUES)


def blend(degenerate, magnitude):
    """Move the image away from a degenerate one, by a factor of 0.1 to 3.7."""
    factor = magnitude / 10 * 1.8 + 0.1
    return np.clip(degenerate + factor * (VALUES - degenerate), 0, 255)


def change_brightness(magnitude):
    return blend(0.0, magnitude)


def change_contrast(magnitude):
    """Blend with the number of pixels / 256, which the original takes for the mean grey."""
    return blend(HEIGHT * WIDTH // 256, magnitude)


def change_color(magnitude):
    return blend(GREY, magnitude)


def sharpen(magnitude):
    """Blend with the image after a 3 x 3 filter; the border is not filtered."""
    neighbourhood = 0
    for i in range(3):
        for j in range(3):
            neighbourhood = neighbourhood + VALUES[i : i + HEIGHT - 2, j : j + WIDTH - 2]

    smooth = VALUES.copy()
    smooth[1:-1, 1:-1] = np.rint((neighbourhood + 4 * VALUES[1:-1, 1:-1]) / 13)
    return blend(smooth, magnitude)


FORMULAS = {  # operation: its result at a magnitude, and the tolerance
    "autocontrast": (autocontrast, 0),
    "equalize": (equalize, 0),
    "invert": (invert, 0),
    "posterize": (posterize, 0),
    "solarize": (solarize, 0),
    "solarize_add": (solarize_add, 0),
    "brightness": (change_brightness, 0.5),
    "contrast": (change_contrast, 0.5),
    "color": (change_color, 4.5),  # grey is rounded, then scaled
    "sharpness": (sharpen, 4.5),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_operations_on_values(name):
    formula, tolerance = FORMULAS[name]
    for magnitude in (0, 5, 10, 15, 20):
        difference = np.abs(apply(name, magnitude) - formula(magnitude))
        assert difference.max() <= tolerance, magnitude


def sample_image(rows, columns):
    """Return the image at (row, column), rounded to a pixel, grey outside."""
    rows = np.rint(rows).astype(int)
    columns = np.rint(columns).astype(int)
    is_inside = (rows >= 0) & (rows < HEIGHT) & (columns >= 0) & (columns < WIDTH)

    nearest = IMAGE[np.clip(rows, 0, HEIGHT - 1), np.clip(columns, 0, WIDTH - 1)]
    return np.where(is_inside[..., None], nearest, 128)


def rotate(angle):
    """Return the image rotated around its centre by an angle in radians."""
    rows = ROWS - 15.5
    columns = COLUMNS - 11.5
    sine = np.sin(angle)
    cosine = np.cos(angle)

    return sample_image(
        15.5 - sine * columns + cosine * rows,
        11.5 + cosine * columns + sine * rows,
    )


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("magnitude", [0, 1, 5, 10])
def test_operations_on_places(sign, magnitude):
    """Ties of rounding may fall either way, so that a few pixels may differ."""
    shear = sign * 0.03 * magnitude
    pixels = sign * 10 * magnitude
    rng_of_sign = types.SimpleNamespace(random=lambda: 0.5 - 0.25 * sign)

    expected = {
        "shear_x": sample_image(ROWS, COLUMNS + shear * ROWS),
        "shear_y": sample_image(ROWS + shear * COLUMNS, COLUMNS),
        "translate_x": sample_image(ROWS, COLUMNS + pixels),
        "translate_y": sample_image(ROWS + pixels, COLUMNS),
        "rotate": rotate(sign * np.deg2rad(3 * magnitude)),
    }
    for name, image in expected.items():
        found = apply(name, magnitude, rng_of_sign)
        is_different = np.any(found != image, axis=-1)
        assert np.mean(is_different) < 0.05, name


def test_cutout_covers_a_square():
    row, column = np.random.default_rng(3).integers((HEIGHT, WIDTH))

    for magnitude in (0, 1, 5, 20):
        half = 4 * magnitude
        is_covered = (abs(ROWS + 0.5 - row) < half) & (abs(COLUMNS + 0.5 - column) < half)

        found = apply("cutout", magnitude, np.random.default_rng(3))

        expected = np.where(is_covered[..., None], 128, IMAGE)
        assert np.array_equal(found, expected)


@pytest.mark.parametrize(
    ("operation", "image"),
    [
        pytest.param(
            randaugment.autocontrast,
            np.full((4, 4, 3), 77, np.uint8),
            id="one value has no range",
        ),
        pytest.param(
            randaugment.equalize,
            np.full((4, 4, 3), 77, np.uint8),
            id="one value has no histogram",
        ),
        pytest.param(
            randaugment.contrast,
            np.full((224, 224, 3), 196, np.uint8),
            id="the value is 224 x 224 / 256",
        ),
        pytest.param(
            randaugment.sharpness,
            IMAGE[:2, :2],
            id="all pixels are at the border",
        ),
    ],
)
def test_operations_that_change_nothing(operation, image):
    assert np.array_equal(operation(None, image, 1.5), image)


def test_no_layers_change_nothing():
    assert randaugment.apply_randaugment(np.random.default_rng(0), IMAGE, 0, 0) is IMAGE


@pytest.mark.parametrize("name", ["solarize", "posterize"])
def test_saturating_is_the_formula_without_bytes(name, monkeypatch):
    """Saturating arithmetic stops at the limits of bytes.

    The released code differs at 0 and from 10 on.
    """
    monkeypatch.setattr(
        randaugment,
        "OPERATIONS",
        (getattr(randaugment, name),),
    )

    for magnitude in range(0, 41, 5):
        if name == "solarize":
            expected = np.where(magnitude * 25.6 > VALUES, VALUES, 255 - VALUES)
        else:
            unit = 2.0 ** max(8 - int(magnitude * 0.4), 0)
            expected = VALUES // unit * unit

        rng = np.random.default_rng(0)
        found = randaugment.apply_randaugment(rng, IMAGE, 1, magnitude, "saturating")

        assert np.array_equal(found, expected), magnitude


def test_layers_sample_all_operations_equally(monkeypatch):
    """All 16 operations occur in 1,600 layers, with the magnitude 15 as 1.5."""
    assert len(set(randaugment.OPERATIONS)) == 16

    calls = []

    def make_operation(number):
        def operation(rng, image, strength):
            calls.append((number, strength))
            return image

        return operation

    operations = tuple(make_operation(number) for number in range(16))
    monkeypatch.setattr(randaugment, "OPERATIONS", operations)
    rng = np.random.default_rng(0)
    for _ in range(800):
        randaugment.apply_randaugment(rng, IMAGE, 2, 15)

    counts = np.bincount([number for number, _ in calls], minlength=16)
    assert counts.sum() == 1600
    assert counts.min() > 60
    assert {strength for _, strength in calls} == {1.5}


@pytest.mark.parametrize("operation", randaugment.OPERATIONS)
def test_small_images(operation):
    rng = np.random.default_rng(0)

    for height, width in ((1, 1), (2, 5), (8, 8)):
        image = rng.integers(256, size=(height, width, 3), dtype=np.uint8)
        found = operation(rng, image, 1.0)

        assert found.shape == (height, width, 3)
        assert found.dtype == np.uint8
