"""Places of training crops: their distributions against TensorFlow's and torchvision's numbers."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vit_jax.data import crops

AREAS = (0.05, 1.0)


def sample_boxes(distribution, height=375, width=500, count=10_000):
    """Return boxes (count, 4): top, left, height and width of crops of one image."""
    rng = np.random.default_rng(0)
    boxes = []
    for _ in range(count):
        box = crops.sample_inception_box(
            rng,
            height,
            width,
            AREAS,
            distribution,
        )
        boxes.append(box)
    return np.array(boxes)


@pytest.mark.parametrize(
    ("distribution", "mean"),
    [
        ("tf", 0.342),
        ("torchvision", 0.417),
    ],
)
def test_distributions(distribution, mean):
    """The means were measured with the libraries on 500 x 375; quantiles vary by less than 0.004."""
    boxes = sample_boxes(distribution)

    tops, lefts, heights, widths = boxes.T
    areas = heights * widths / (375 * 500)

    assert areas.mean() == pytest.approx(mean, abs=0.008)
    assert 0.0495 < areas.min() < areas.max() <= 1

    if distribution == "tf":
        expected_quantiles = {
            0.05: 0.065,
            0.25: 0.149,
            0.50: 0.300,
            0.75: 0.503,
            0.95: 0.758,
        }
        for share, expected in expected_quantiles.items():
            quantile = np.quantile(areas, share)
            assert quantile == pytest.approx(expected, abs=0.012)

    assert 0 in tops
    assert 0 in lefts
    assert 375 in tops + heights
    assert 500 in lefts + widths

    ratios = widths / heights
    assert 0.74 < ratios.min() < ratios.max() < 1.35


@settings(derandomize=True, deadline=None, max_examples=200)
@given(
    height=st.integers(1, 400),
    width=st.integers(1, 400),
    distribution=st.sampled_from(["tf", "torchvision"]),
    seed=st.integers(0, 2**32 - 1),
)
def test_boxes_are_inside(height, width, distribution, seed):
    rng = np.random.default_rng(seed)

    box = crops.sample_inception_box(
        rng,
        height,
        width,
        AREAS,
        distribution,
    )

    bottom = box.top + box.height
    right = box.left + box.width

    assert 0 <= box.top < bottom <= height
    assert 0 <= box.left < right <= width


@pytest.mark.parametrize(
    ("distribution", "expected"),
    [
        ("tf", (0, 0, 10, 1000)),
        ("torchvision", (0, (1000 - 13) // 2, 10, 13)),
    ],
)
def test_impossible_boxes_fall_back(distribution, expected):
    """TensorFlow takes the whole image, torchvision the centre with the nearest ratio."""
    rng = np.random.default_rng(0)

    box = crops.sample_inception_box(
        rng,
        10,
        1000,
        (0.9, 1.0),
        distribution,
    )

    assert box == expected


def make_coordinate_image(height, width):
    """Return an image in which each pixel holds its row and its column."""
    image = np.zeros((height, width, 3), np.uint8)
    rows, columns = np.indices((height, width))
    image[..., 0] = rows
    image[..., 1] = columns

    return image


def list_places(rows, columns):
    return list(map(list, itertools.product(rows, columns)))


def assert_uniform(places, rows, columns):
    """Check that all places occur, equally often within five standard deviations."""
    expected_places = list_places(rows, columns)
    expected_count = len(places) / len(expected_places)

    found, counts = np.unique(places, axis=0, return_counts=True)

    deviations = np.abs(counts - expected_count)
    assert found.tolist() == expected_places
    assert deviations.max() < 5 * np.sqrt(expected_count)


@pytest.mark.parametrize("size", [(3, 2), (4, 2), (2, 5)])
def test_random_crops_are_uniform(size):
    """The corner of a crop of coordinates shows the place of the crop."""
    height, width = size
    image = make_coordinate_image(4, 5)
    rng = np.random.default_rng(0)

    corners = []
    for _ in range(1000):
        crop = crops.crop_randomly(rng, image, size)

        corner = crop[0, 0]
        top, left, _ = corner.tolist()
        box = crops.Box(top, left, height, width)
        assert np.array_equal(crop, crops.cut(image, box))
        corners.append((top, left))

    assert_uniform(
        corners,
        range(5 - height),
        range(6 - width),
    )


def test_shifts_are_uniform_and_fill_with_zeros():
    image = np.full((4, 4, 3), 200, np.uint8)
    image[1, 2] = 255
    rng = np.random.default_rng(0)

    places = []
    values = set()
    for _ in range(900):
        shifted = crops.shift_randomly(rng, image, 1)
        (place,) = np.argwhere(shifted[..., 0] == 255)
        places.append(place)
        values.update(np.unique(shifted))

    assert values == {0, 200, 255}
    assert_uniform(places, (0, 1, 2), (1, 2, 3))


def test_simple_crop_mirrors_the_border():
    """Four pixels beyond the border repeat the inner ones, without the outermost.

    Every place of the mirrored image is cut out, and nothing else.
    """
    image = make_coordinate_image(6, 9)
    borders = [(4, 4), (4, 4), (0, 0)]
    padded = np.pad(image, borders, mode="reflect")
    rng = np.random.default_rng(0)

    found = set()
    for _ in range(2000):
        crop = crops.crop_simply(rng, image, (6, 6))
        found.add(crop.tobytes())

    expected = set()
    for top, left in list_places(range(9), range(12)):
        box = crops.Box(top, left, 6, 6)
        crop = crops.cut(padded, box)
        expected.add(crop.tobytes())

    assert found == expected
