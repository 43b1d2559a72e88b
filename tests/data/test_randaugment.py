"""Every RandAugment operation against another formula, and the quirks of the original."""

import functools
import types

import numpy as np
import pytest
from numpy.lib.stride_tricks import sliding_window_view

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
ROWS, COLUMNS = np.indices((HEIGHT, WIDTH)).astype(float)
LUMA = np.rint(VALUES @ [0.299, 0.587, 0.114])
GREY = LUMA[..., None]
MAGNITUDES = (0, 5, 10, 15, 20)


def make_rng(seed=0):
    return np.random.default_rng(seed)


def apply(name, magnitude, rng=None):
    """Apply an operation to the image at a magnitude of 0 to 20."""
    operation = getattr(randaugment, name)
    return operation(
        rng or make_rng(),
        IMAGE,
        magnitude / 10,
    )


def autocontrast(magnitude):
    low = VALUES.min((0, 1))
    high = VALUES.max((0, 1))
    stretched = (VALUES - low) * 255 / (high - low)
    return np.floor(stretched + 1e-9)


def equalize(magnitude):
    """Map each value to the number of darker pixels, in steps of equal numbers of pixels."""
    expected = np.empty_like(VALUES)
    for channel in range(3):
        values = IMAGE[..., channel]
        num_brightest = np.sum(values == values.max())
        step = (values.size - num_brightest) // 255

        for value in np.unique(values):
            num_darker = np.sum(values < value)
            mapped = (num_darker + step // 2) // step
            expected[values == value, channel] = min(mapped, 255)

    return expected


def invert(magnitude):
    return 255 - VALUES


def posterize(magnitude):
    bits = (1, 2, 4, 6, 8)[MAGNITUDES.index(magnitude)]
    unit = 2 ** (8 - bits)
    return VALUES // unit * unit


def solarize(magnitude):
    """Invert bright values; the threshold overflows at magnitudes of 10 and 20."""
    threshold = 128 if magnitude in (5, 15) else 0
    return np.where(threshold > VALUES, VALUES, 255 - VALUES)


def solarize_add(magnitude):
    brighter = VALUES + magnitude * 11
    brighter = np.clip(brighter, 0, 255)
    return np.where(VALUES < 128, brighter, VALUES)


def blend(degenerate, magnitude):
    """Move the image away from a degenerate one, by a factor of 0.1 to 3.7."""
    factor = magnitude / 10 * 1.8 + 0.1
    moved = degenerate + factor * (VALUES - degenerate)
    return np.clip(moved, 0, 255)


def change_brightness(magnitude):
    return blend(0.0, magnitude)


def change_contrast(magnitude):
    """Blend with the number of pixels / 256, which the original takes for the mean grey."""
    return blend(HEIGHT * WIDTH // 256, magnitude)


def change_color(magnitude):
    return blend(GREY, magnitude)


def sharpen(magnitude):
    """Blend with the image after a 3 x 3 filter; the border is not filtered."""
    windows = sliding_window_view(VALUES, (3, 3), axis=(0, 1))
    neighbourhood = windows.sum(axis=(-2, -1))
    inner = (slice(1, -1), slice(1, -1))
    filtered = (neighbourhood + 4 * VALUES[inner]) / 13

    smooth = VALUES.copy()
    smooth[inner] = np.rint(filtered)
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

    for magnitude in MAGNITUDES:
        found = apply(name, magnitude)

        difference = found - formula(magnitude)
        assert np.abs(difference).max() <= tolerance, magnitude


def sample_image(rows, columns):
    """Return the image at (row, column), rounded to a pixel, grey outside."""
    rows = np.rint(rows).astype(int)
    columns = np.rint(columns).astype(int)
    inner_rows = np.clip(rows, 0, HEIGHT - 1)
    inner_columns = np.clip(columns, 0, WIDTH - 1)
    is_inside = (rows == inner_rows) & (columns == inner_columns)

    nearest = IMAGE[inner_rows, inner_columns]
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
    signed = sign * magnitude
    shear = 0.03 * signed
    pixels = 10 * signed
    angle = np.deg2rad(3 * signed)
    rng_of_sign = types.SimpleNamespace(random=lambda: 0.5 - 0.25 * sign)

    expected = {
        "shear_x": sample_image(ROWS, COLUMNS + shear * ROWS),
        "shear_y": sample_image(ROWS + shear * COLUMNS, COLUMNS),
        "translate_x": sample_image(ROWS, COLUMNS + pixels),
        "translate_y": sample_image(ROWS + pixels, COLUMNS),
        "rotate": rotate(angle),
    }
    for name, image in expected.items():
        found = apply(name, magnitude, rng_of_sign)
        is_different = np.any(found != image, axis=-1)
        assert np.mean(is_different) < 0.05, name


def test_cutout_covers_a_square():
    row, column = make_rng(3).integers((HEIGHT, WIDTH))
    row_distance = np.abs(ROWS + 0.5 - row)
    column_distance = np.abs(COLUMNS + 0.5 - column)
    distance = np.maximum(row_distance, column_distance)

    for magnitude in (0, 1, 5, 20):
        found = apply("cutout", magnitude, make_rng(3))

        is_covered = distance < 4 * magnitude
        expected = np.where(is_covered[..., None], 128, IMAGE)
        assert np.array_equal(found, expected)


ONE_VALUE = np.full((4, 4, 3), 77, np.uint8)
MEAN_VALUE = np.full((224, 224, 3), 196, np.uint8)
ALL_AT_THE_BORDER = IMAGE[:2, :2]


@pytest.mark.parametrize(
    ("operation", "image"),
    [
        (randaugment.autocontrast, ONE_VALUE),
        (randaugment.equalize, ONE_VALUE),
        (randaugment.contrast, MEAN_VALUE),
        (randaugment.sharpness, ALL_AT_THE_BORDER),
    ],
    ids=[
        "one value has no range",
        "one value has no histogram",
        "the value is 224 x 224 / 256",
        "all pixels are at the border",
    ],
)
def test_operations_that_change_nothing(operation, image):
    found = operation(None, image, 1.5)

    assert np.array_equal(found, image)


def test_no_layers_change_nothing():
    found = randaugment.apply_randaugment(
        make_rng(),
        IMAGE,
        0,
        0,
    )

    assert found is IMAGE


@pytest.mark.parametrize("name", ["solarize", "posterize"])
def test_saturating_is_the_formula_without_bytes(name, monkeypatch):
    """Saturating arithmetic stops at the limits of bytes.

    The released code differs at 0 and from 10 on.
    """
    operation = getattr(randaugment, name)
    monkeypatch.setattr(randaugment, "OPERATIONS", (operation,))

    for magnitude in range(0, 41, 5):
        found = randaugment.apply_randaugment(
            make_rng(),
            IMAGE,
            1,
            magnitude,
            "saturating",
        )

        if name == "solarize":
            threshold = magnitude * 25.6
            expected = np.where(threshold > VALUES, VALUES, 255 - VALUES)
        else:
            lost_bits = max(8 - int(magnitude * 0.4), 0)
            unit = 2.0**lost_bits
            expected = VALUES // unit * unit
        assert np.array_equal(found, expected), magnitude


def test_layers_sample_all_operations_equally(monkeypatch):
    """All 16 operations occur in 1,600 layers, with the magnitude 15 as 1.5."""
    assert len(set(randaugment.OPERATIONS)) == 16

    numbers = []
    strengths = set()

    def record_operation(number, rng, image, strength):
        numbers.append(number)
        strengths.add(strength)
        return image

    operations = []
    for number in range(16):
        operations.append(functools.partial(record_operation, number))
    monkeypatch.setattr(randaugment, "OPERATIONS", tuple(operations))
    rng = make_rng()
    for _ in range(800):
        randaugment.apply_randaugment(rng, IMAGE, 2, 15)

    counts = np.bincount(numbers, minlength=16)
    assert counts.sum() == 1600
    assert counts.min() > 60
    assert strengths == {1.5}


@pytest.mark.parametrize("operation", randaugment.OPERATIONS)
def test_small_images(operation):
    rng = make_rng()

    for size in ((1, 1), (2, 5), (8, 8)):
        image = rng.integers(
            256,
            size=(*size, 3),
            dtype=np.uint8,
        )

        found = operation(rng, image, 1.0)

        assert found.shape == image.shape
        assert found.dtype == np.uint8
