"""Resizing against what Pillow, timm and Hugging Face made of the same images (tests/weights/reference/resizing.py)."""

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


def difference(found, expected):
    """The largest difference, in grey levels."""
    assert found.shape == expected.shape
    assert found.dtype == np.uint8

    return np.abs(found - expected.astype(np.float64)).max()


@pytest.mark.parametrize("interpolation", resizing.FILTERS)
def test_resize_is_pillows_within_a_grey_level(interpolation):
    image = resizing.image(resizing.IMAGE)
    for size in resizing.SIZES:
        found = resampling.resize(image, size, interpolation, "timm")
        expected = GOLDEN[resizing.key("pillow", interpolation, size)]
        assert difference(found, expected) <= 1
        assert (found != expected).mean() < 0.02  # ties of the last bit

    assert resampling.resize(image, image.shape[:2], interpolation) is image


@pytest.mark.parametrize("interpolation", resizing.FILTERS)
def test_evaluation_prepares_images_as_timm_and_hugging_face_do(interpolation):
    for size in resizing.NETWORKS:
        for fraction in resizing.CROP_FRACTIONS:
            fields = {"interpolation": interpolation, "library": "timm"}
            found = EvaluationTransform(size, "short_side", fraction, **fields)(PHOTOGRAPH)

            assert (
                difference(found, GOLDEN[resizing.key("timm", interpolation, size, fraction)]) <= 1
            )

    crop = EvaluationTransform((10, 10), "short_side", 10 / 11, interpolation=interpolation)(
        PHOTOGRAPH
    )
    squash = EvaluationTransform((12, 8), "direct", 1.0, interpolation=interpolation)(PHOTOGRAPH)

    assert difference(crop, GOLDEN[resizing.key("huggingface", interpolation, "crop")]) <= 1
    assert difference(squash, GOLDEN[resizing.key("huggingface", interpolation, "squash")]) <= 1


def test_dinov3_resizes_floating_point_which_is_within_a_grey_level():
    found = EvaluationTransform((12, 8), "direct", 1.0, interpolation="bilinear")(PHOTOGRAPH)
    assert difference(found, GOLDEN["dinov3"]) <= 1


def test_large_images_are_resized_in_bands_to_the_same_pixels(monkeypatch):
    image = resizing.image((70, 40))
    whole = resampling.resize(image, (9, 11), "bicubic")
    monkeypatch.setattr(resampling, "_BAND", 16)

    assert np.array_equal(resampling.resize(image, (9, 11), "bicubic"), whole)


@settings(derandomize=True, deadline=None, max_examples=60)
@given(
    old=st.tuples(*[st.integers(1, 90)] * 2),
    size=st.tuples(*[st.integers(1, 60)] * 2),
    interpolation=st.sampled_from(resizing.FILTERS),
)
def test_any_size_keeps_a_colour(old, size, interpolation):
    image = np.full((*old, 3), (0, 17, 255), np.uint8)
    found = resampling.resize(image, size, interpolation)

    assert found.shape == (*size, 3)
    assert np.unique(found.reshape(-1, 3), axis=0).tolist() == [[0, 17, 255]]


@settings(derandomize=True, deadline=None, max_examples=100)
@given(old=st.tuples(*[st.integers(1, 400)] * 2), least=st.tuples(*[st.integers(1, 300)] * 2))
def test_covering_is_tight(old, least):
    covered = resampling.covering_size(old, least)

    assert covered[0] >= least[0]
    assert covered[1] >= least[1]
    assert covered[0] == least[0] or covered[1] == least[1]
