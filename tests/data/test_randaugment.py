"""Every RandAugment operation against a formula written another way, and the quirks the original has."""

import types

import numpy as np
import pytest

from vit_jax.data import randaugment

IMAGE = np.random.default_rng(0).integers(20, 230, size=(32, 24, 3), dtype=np.uint8)
VALUES = IMAGE.astype(float)
ROWS, COLUMNS = np.meshgrid(np.arange(32.0), np.arange(24.0), indexing="ij")


def apply(name, magnitude, rng=None):
    return getattr(randaugment, name)(rng or np.random.default_rng(0), IMAGE, magnitude / 10)


def blended(degenerate, magnitude):
    factor = magnitude / 10 * 1.8 + 0.1
    return np.clip(degenerate + factor * (VALUES - degenerate), 0, 255)


def sampled(rows, columns):
    """The image at (row, column), rounded, grey outside."""
    rows = np.rint(rows).astype(int)
    columns = np.rint(columns).astype(int)
    inside = (rows >= 0) & (rows < 32) & (columns >= 0) & (columns < 24)

    return np.where(inside[..., None], IMAGE[np.clip(rows, 0, 31), np.clip(columns, 0, 23)], 128)


def autocontrasted(magnitude):
    low = VALUES.min((0, 1))
    high = VALUES.max((0, 1))

    return np.floor((VALUES - low) * 255 / (high - low) + 1e-9)


def equalized(magnitude):
    expected = np.empty_like(VALUES)
    for channel in range(3):
        flat = IMAGE[..., channel].ravel()
        step = (flat.size - np.sum(flat == flat.max())) // 255
        values = [min((int(np.sum(flat < value)) + step // 2) // step, 255) for value in flat]

        expected[..., channel] = np.reshape(values, IMAGE.shape[:2])

    return expected


def posterized(magnitude):
    bits = {0: 1, 5: 2, 10: 4, 15: 6, 20: 8}[magnitude]
    return VALUES // 2 ** (8 - bits) * 2 ** (8 - bits)


def smoothed():
    smooth = VALUES.copy()
    total = sum(VALUES[i : i + 30, j : j + 22] for i in range(3) for j in range(3))
    smooth[1:-1, 1:-1] = np.rint((total + 4 * VALUES[1:-1, 1:-1]) / 13)

    return smooth


GREY = np.rint(VALUES @ [0.299, 0.587, 0.114])[..., None]
FORMULAS = {  # operation: its result at a magnitude, and the tolerance
    "autocontrast": (autocontrasted, 0),
    "equalize": (equalized, 0),
    "invert": (lambda m: 255 - VALUES, 0),
    "posterize": (posterized, 0),
    "solarize": (
        lambda m: np.where({0: 0, 5: 128, 10: 0, 15: 128, 20: 0}[m] > VALUES, VALUES, 255 - VALUES),
        0,
    ),
    "solarize_add": (
        lambda m: np.where(VALUES < 128, np.clip(VALUES + int(m * 11), 0, 255), VALUES),
        0,
    ),
    "brightness": (lambda m: blended(0.0, m), 0.5),
    "contrast": (
        lambda m: blended(32 * 24 // 256, m),
        0.5,
    ),  # the number of pixels / 256 for the mean grey
    "color": (lambda m: blended(GREY, m), 4.5),  # grey is rounded, then scaled
    "sharpness": (lambda m: blended(smoothed(), m), 4.5),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_operations_on_values(name):
    formula, tolerance = FORMULAS[name]
    for magnitude in (0, 5, 10, 15, 20):
        assert np.abs(apply(name, magnitude) - formula(magnitude)).max() <= tolerance, magnitude


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("magnitude", [0, 1, 5, 10])
def test_operations_on_places(sign, magnitude):
    shear = sign * 0.03 * magnitude
    pixels = sign * 10 * magnitude
    angle = sign * np.deg2rad(3 * magnitude)
    rows = ROWS - 15.5
    columns = COLUMNS - 11.5
    sine = np.sin(angle)
    cosine = np.cos(angle)

    expected = {
        "shear_x": sampled(ROWS, COLUMNS + shear * ROWS),
        "shear_y": sampled(ROWS + shear * COLUMNS, COLUMNS),
        "translate_x": sampled(ROWS, COLUMNS + pixels),
        "translate_y": sampled(ROWS + pixels, COLUMNS),
        "rotate": sampled(
            15.5 - sine * columns + cosine * rows,
            11.5 + cosine * columns + sine * rows,
        ),
    }
    for name, image in expected.items():
        found = apply(name, magnitude, types.SimpleNamespace(random=lambda: 0.5 - 0.25 * sign))
        assert np.mean(np.any(found != image, axis=-1)) < 0.05, (
            name
        )  # ties of rounding may fall either way


def test_cutout_covers_a_square():
    row, column = np.random.default_rng(3).integers((32, 24))
    for magnitude in (0, 1, 5, 20):
        half = 4 * magnitude
        covered = (abs(ROWS + 0.5 - row) < half) & (abs(COLUMNS + 0.5 - column) < half)
        found = apply("cutout", magnitude, np.random.default_rng(3))

        assert np.array_equal(found, np.where(covered[..., None], 128, IMAGE))


def test_images_that_stay_as_they_are():
    flat = np.full((4, 4, 3), 77, np.uint8)
    large = np.full((224, 224, 3), 196, np.uint8)

    for operation, image in (
        *(
            (randaugment.autocontrast, flat),
            (randaugment.equalize, flat),
        ),  # one value has no range and no histogram
        (randaugment.contrast, large),  # 224 x 224 / 256 = 196
        (randaugment.sharpness, IMAGE[:2, :2]),  # all of it is border
    ):
        assert np.array_equal(operation(None, image, 1.5), image)

    assert randaugment.randaugment(np.random.default_rng(0), IMAGE, 0, 0) is IMAGE


@pytest.mark.parametrize("name", ["solarize", "posterize"])
def test_saturating_is_the_formula_without_bytes(name, monkeypatch):
    """Saturating arithmetic stops at the limits of bytes: the released code differs at 0 and from 10 on."""
    monkeypatch.setattr(randaugment, "OPERATIONS", (getattr(randaugment, name),))
    for magnitude in range(0, 41, 5):
        unit = 2.0 ** max(8 - int(magnitude * 0.4), 0)
        inverted = np.where(magnitude * 25.6 > VALUES, VALUES, 255 - VALUES)

        expected = {"solarize": inverted, "posterize": VALUES // unit * unit}[name]
        found = randaugment.randaugment(np.random.default_rng(0), IMAGE, 1, magnitude, "saturating")

        assert np.array_equal(found, expected), magnitude


def test_layers_draw_every_operation_alike(monkeypatch):
    assert len(set(randaugment.OPERATIONS)) == 16

    drawn = []
    fakes = tuple(
        lambda rng, image, strength, n=n: drawn.append((n, strength)) or image for n in range(16)
    )
    monkeypatch.setattr(randaugment, "OPERATIONS", fakes)
    rng = np.random.default_rng(0)

    for _ in range(800):
        randaugment.randaugment(rng, IMAGE, 2, 15)

    counts = np.bincount([n for n, _ in drawn], minlength=16)

    assert counts.sum() == 1600
    assert counts.min() > 60
    assert {strength for _, strength in drawn} == {1.5}


@pytest.mark.parametrize("operation", randaugment.OPERATIONS)
def test_small_images(operation):
    rng = np.random.default_rng(0)
    for shape in ((1, 1), (2, 5), (8, 8)):
        found = operation(rng, rng.integers(256, size=(*shape, 3), dtype=np.uint8), 1.0)

        assert found.shape == (*shape, 3)
        assert found.dtype == np.uint8
