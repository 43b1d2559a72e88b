"""Where training crops lie: distributions against TensorFlow's and torchvision's numbers."""

import numpy as np
import pytest

from vit_jax.data import crops

AREAS = (0.05, 1.0)


def sample_areas(distribution, height=375, width=500, count=10_000):
    rng = np.random.default_rng(0)
    boxes = np.array([crops.sample_inception_box(rng, height, width, AREAS, distribution) for _ in range(count)])
    return boxes, boxes[:, 2] * boxes[:, 3] / (height * width)


def test_tf_distribution():
    """Measured with sample_distorted_bounding_box on 500 x 375; the quantiles' own noise here is below 0.004."""
    _, areas = sample_areas("tf")
    assert areas.mean() == pytest.approx(0.342, abs=0.008)
    quantiles = np.quantile(areas, [0.05, 0.25, 0.50, 0.75, 0.95])
    assert quantiles == pytest.approx([0.065, 0.149, 0.300, 0.503, 0.758], abs=0.012)


def test_torchvision_distribution():
    _, areas = sample_areas("torchvision")
    assert areas.mean() == pytest.approx(0.417, abs=0.008)


@pytest.mark.parametrize("distribution", ["tf", "torchvision"])
@pytest.mark.parametrize("size", [(375, 500), (8, 8), (1, 1), (1, 50), (300, 2), (5, 7)])
def test_boxes_lie_inside(distribution, size):
    boxes, _ = sample_areas(distribution, *size, count=200)
    assert np.all(boxes[:, :2] >= 0)
    assert np.all(boxes[:, 2:] >= 1)
    assert np.all(boxes[:, 0] + boxes[:, 2] <= size[0])
    assert np.all(boxes[:, 1] + boxes[:, 3] <= size[1])


@pytest.mark.parametrize("distribution", ["tf", "torchvision"])
def test_aspect_and_area_are_kept(distribution):
    boxes, areas = sample_areas(distribution, count=1000)
    ratios = boxes[:, 3] / boxes[:, 2]
    assert ratios.min() > 0.74
    assert ratios.max() < 1.35
    assert areas.min() > 0.0495
    assert areas.max() <= 1


def test_every_corner_is_reached():
    boxes, _ = sample_areas("tf", 8, 8, count=2000)
    small = boxes[boxes[:, 2] <= 4]
    assert np.any(small[:, 0] == 0)
    assert np.any(small[:, 0] + small[:, 2] == 8)
    assert np.any(small[:, 1] == 0)
    assert np.any(small[:, 1] + small[:, 3] == 8)


def test_impossible_boxes_fall_back():
    rng = np.random.default_rng(0)
    assert crops.sample_inception_box(rng, 10, 1000, (0.9, 1.0), "tf") == (0, 0, 10, 1000)
    top, left, height, width = crops.sample_inception_box(rng, 10, 1000, (0.9, 1.0), "torchvision")
    assert (top, height) == (0, 10)
    assert width == 13
    assert left == (1000 - 13) // 2


@pytest.mark.parametrize("size", [(3, 2), (4, 2), (2, 5)])
def test_random_crops_are_uniform(size):
    """A pixel holds its own place, so the corner of a crop tells where it was cut."""
    image = np.stack(np.broadcast_arrays(np.arange(4)[:, None], np.arange(5)[None, :], 0), axis=-1).astype(np.uint8)
    rng = np.random.default_rng(0)
    crops_found = [crops.random_crop(rng, image, size) for _ in range(3000)]
    assert {crop.shape for crop in crops_found} == {(*size, 3)}
    for crop in crops_found[:50]:
        top, left = crop[0, 0, :2]
        assert np.array_equal(crop, image[top : top + size[0], left : left + size[1]])
    places, counts = np.unique([crop[0, 0, :2] for crop in crops_found], axis=0, return_counts=True)
    rows, columns = 4 - size[0] + 1, 5 - size[1] + 1
    assert places.tolist() == [[row, column] for row in range(rows) for column in range(columns)]
    expected = 3000 / (rows * columns)
    assert np.all(np.abs(counts - expected) < 5 * np.sqrt(expected))


def test_shifts_are_uniform_and_fill_with_zeros():
    image = np.full((4, 4, 3), 200, np.uint8)
    image[1, 2] = 255
    rng = np.random.default_rng(0)
    places = []
    for _ in range(900):
        moved = crops.random_shift(rng, image, 1)
        places.append(tuple(np.argwhere(moved[..., 0] == 255)[0]))
        assert set(np.unique(moved)) <= {0, 200, 255}
    values, counts = np.unique(places, axis=0, return_counts=True)
    assert values.tolist() == [[r, c] for r in (0, 1, 2) for c in (1, 2, 3)]
    assert counts.min() > 60  # of 100 expected; four standard deviations are 38
