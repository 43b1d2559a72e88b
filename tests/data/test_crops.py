"""Where training crops are: distributions against TensorFlow's and torchvision's numbers."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vit_jax.data import crops

AREAS = (0.05, 1.0)


def sample_areas(distribution, height=375, width=500, count=10_000):
    rng = np.random.default_rng(0)
    boxes = np.array(
        [crops.sample_inception_box(rng, height, width, AREAS, distribution) for _ in range(count)]
    )

    return boxes, boxes[:, 2] * boxes[:, 3] / (height * width)


@pytest.mark.parametrize(
    ("distribution", "mean"),
    [
        ("tf", 0.342),
        ("torchvision", 0.417),
    ],
)
def test_distributions(distribution, mean):
    """Measured with the libraries on 500 x 375; the quantiles' own noise here is below 0.004."""
    boxes, areas = sample_areas(distribution)

    assert areas.mean() == pytest.approx(mean, abs=0.008)

    if distribution == "tf":
        quantiles = np.quantile(areas, [0.05, 0.25, 0.50, 0.75, 0.95])
        assert quantiles == pytest.approx([0.065, 0.149, 0.300, 0.503, 0.758], abs=0.012)

    for place, size, length in ((boxes[:, 0], boxes[:, 2], 375), (boxes[:, 1], boxes[:, 3], 500)):
        assert np.any(place == 0)
        assert np.any(place + size == length)

    ratios = boxes[:, 3] / boxes[:, 2]

    assert 0.74 < ratios.min() < ratios.max() < 1.35
    assert 0.0495 < areas.min() < areas.max() <= 1


@settings(derandomize=True, deadline=None, max_examples=200)
@given(
    height=st.integers(1, 400),
    width=st.integers(1, 400),
    distribution=st.sampled_from(["tf", "torchvision"]),
    seed=st.integers(0, 2**32 - 1),
)
def test_boxes_are_inside(height, width, distribution, seed):
    box = crops.sample_inception_box(
        np.random.default_rng(seed),
        height,
        width,
        AREAS,
        distribution,
    )

    assert 0 <= box.top < box.top + box.height <= height
    assert 0 <= box.left < box.left + box.width <= width


def test_impossible_boxes_fall_back():
    rng = np.random.default_rng(0)

    assert crops.sample_inception_box(rng, 10, 1000, (0.9, 1.0), "tf") == (0, 0, 10, 1000)
    assert crops.sample_inception_box(rng, 10, 1000, (0.9, 1.0), "torchvision") == (
        0,
        (1000 - 13) // 2,
        10,
        13,
    )


def assert_uniform(places, rows, columns):
    found, counts = np.unique(places, axis=0, return_counts=True)

    assert found.tolist() == [[row, column] for row in rows for column in columns]

    expected = len(places) / (len(rows) * len(columns))
    assert np.all(np.abs(counts - expected) < 5 * np.sqrt(expected))


@pytest.mark.parametrize(
    "size",
    [
        (3, 2),
        (4, 2),
        (2, 5),
    ],
)
def test_random_crops_are_uniform(size):
    """A pixel holds its own place, so the corner of a crop shows where it was cut."""
    image = np.stack(
        np.broadcast_arrays(np.arange(4)[:, None], np.arange(5)[None, :], 0),
        axis=-1,
    ).astype(np.uint8)
    rng = np.random.default_rng(0)
    found = [crops.random_crop(rng, image, size) for _ in range(1000)]

    for crop in found:
        top, left = crop[0, 0, :2]
        assert np.array_equal(crop, image[top : top + size[0], left : left + size[1]])

    assert_uniform(
        [crop[0, 0, :2] for crop in found],
        range(4 - size[0] + 1),
        range(5 - size[1] + 1),
    )


def test_shifts_are_uniform_and_fill_with_zeros():
    image = np.full((4, 4, 3), 200, np.uint8)
    image[1, 2] = 255
    rng = np.random.default_rng(0)
    found = [crops.random_shift(rng, image, 1) for _ in range(900)]

    assert set(np.unique(found)) == {0, 200, 255}
    assert_uniform([np.argwhere(moved[..., 0] == 255)[0] for moved in found], (0, 1, 2), (1, 2, 3))


def test_simple_crop_mirrors_the_border():
    """A pixel holds its own place; four pixels beyond the border repeat those inside, without the outermost."""
    image = np.stack(
        np.broadcast_arrays(np.arange(6)[:, None], np.arange(9)[None, :], 0),
        axis=-1,
    ).astype(np.uint8)
    padded = np.pad(image, [(4, 4), (4, 4), (0, 0)], mode="reflect")
    rng = np.random.default_rng(0)
    found = set()

    for _ in range(2000):
        crop = crops.simple_crop(rng, image, (6, 6))
        matches = [
            (top, left)
            for top in range(9)
            for left in range(12)
            if np.array_equal(crop, padded[top : top + 6, left : left + 6])
        ]

        assert matches

        found.update(matches)

    assert found == {(top, left) for top in range(9) for left in range(12)}
