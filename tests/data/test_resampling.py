"""Resizing against Pillow, timm and Hugging Face (tests/weights/reference/resizing.py)."""

import pathlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.weights.reference import resizing
from vit_jax.data import resampling
from vit_jax.data.records import Record
from vit_jax.data.transforms import EvaluationTransform

GOLDEN = np.load(pathlib.Path(__file__).parents[1] / "golden" / "resizing.npz")
PHOTOGRAPH = Record(resizing.image(resizing.PHOTOGRAPH), 0)


def measure_difference(found, expected):
    """Return the largest difference of two images, in grey levels."""
    assert found.shape == expected.shape
    assert found.dtype == np.uint8

    difference = found - expected.astype(np.float64)
    return np.abs(difference).max()


def read_expected(*words):
    """Return the golden image of these words."""
    return GOLDEN[resizing.key(*words)]


@pytest.mark.parametrize("interpolation", resizing.FILTERS)
def test_resize_is_pillows_within_a_grey_level(interpolation):
    """Less than 2 % of the pixels differ, by ties of the last bit."""
    image = resizing.image(resizing.IMAGE)

    for size in resizing.SIZES:
        expected = read_expected("pillow", interpolation, size)

        found = resampling.resize(image, size, interpolation, "timm")

        assert measure_difference(found, expected) <= 1
        assert np.mean(found != expected) < 0.02

    same_size = image.shape[:2]
    assert resampling.resize(image, same_size, interpolation) is image


@pytest.mark.parametrize("interpolation", resizing.FILTERS)
def test_evaluation_prepares_images_as_timm_does(interpolation):
    for size in resizing.NETWORKS:
        for fraction in resizing.CROP_FRACTIONS:
            transform = EvaluationTransform(
                size,
                "short_side",
                fraction,
                interpolation=interpolation,
                library="timm",
            )

            found = transform(PHOTOGRAPH)

            expected = read_expected("timm", interpolation, size, fraction)
            assert measure_difference(found, expected) <= 1


@pytest.mark.parametrize("interpolation", resizing.FILTERS)
@pytest.mark.parametrize(
    ("name", "size", "resize", "fraction"),
    [
        ("crop", (10, 10), "short_side", 10 / 11),
        ("squash", (12, 8), "direct", 1.0),
    ],
)
def test_evaluation_prepares_images_as_hugging_face_does(
    interpolation,
    name,
    size,
    resize,
    fraction,
):
    transform = EvaluationTransform(
        size,
        resize,
        fraction,
        interpolation=interpolation,
    )

    found = transform(PHOTOGRAPH)

    expected = read_expected("huggingface", interpolation, name)
    assert measure_difference(found, expected) <= 1


def test_dinov3_resizes_floating_point_which_is_within_a_grey_level():
    transform = EvaluationTransform(
        (12, 8),
        "direct",
        1.0,
        interpolation="bilinear",
    )

    found = transform(PHOTOGRAPH)

    assert measure_difference(found, GOLDEN["dinov3"]) <= 1


def test_large_images_are_resized_in_bands_to_the_same_pixels(monkeypatch):
    image = resizing.image((70, 40))
    expected = resampling.resize(image, (9, 11), "bicubic")

    monkeypatch.setattr(resampling, "_BAND", 16)
    found = resampling.resize(image, (9, 11), "bicubic")

    assert np.array_equal(found, expected)


@settings(derandomize=True, deadline=None, max_examples=60)
@given(
    old_height=st.integers(1, 90),
    old_width=st.integers(1, 90),
    height=st.integers(1, 60),
    width=st.integers(1, 60),
    interpolation=st.sampled_from(resizing.FILTERS),
)
def test_any_size_keeps_a_colour(
    old_height,
    old_width,
    height,
    width,
    interpolation,
):
    colour = (0, 17, 255)
    image = np.full((old_height, old_width, 3), colour, np.uint8)

    found = resampling.resize(image, (height, width), interpolation)

    expected = np.full((height, width, 3), colour)
    assert np.array_equal(found, expected)


@settings(derandomize=True, deadline=None, max_examples=100)
@given(
    old_height=st.integers(1, 400),
    old_width=st.integers(1, 400),
    least_height=st.integers(1, 300),
    least_width=st.integers(1, 300),
)
def test_covering_is_tight(old_height, old_width, least_height, least_width):
    """Both sides cover the least size, and one of them exactly."""
    height, width = resampling.find_covering_size(
        (old_height, old_width),
        (least_height, least_width),
    )

    assert height >= least_height
    assert width >= least_width
    assert height == least_height or width == least_width
