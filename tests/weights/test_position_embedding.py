"""Tables of positions on other grids: against numbers worked by hand, SciPy, and filters written out."""

import math

import numpy as np
import pytest
import scipy.ndimage

from vit_jax.weights.position_embedding import resize_grid, resize_rows

FILTERS = {
    "bilinear": (1, lambda x: 1 - x),
    "bicubic": (2, lambda x: 1.5 * x**3 - 2.5 * x**2 + 1 if x < 1 else -0.5 * x**3 + 2.5 * x**2 - 4 * x + 2),
    "lanczos3": (3, lambda x: np.sinc(x) * np.sinc(x / 3)),
}
"""Radius and value at a distance: the triangle, Keys' cubic with a slope of -0.5, and the windowed sinc."""

GRIDS = [
    ((14, 14), (24, 24)),
    ((24, 24), (14, 14)),
    ((7, 7), (37, 5)),
    ((3, 5), (7, 4)),
    ((1, 6), (1, 9)),
    ((1, 6), (4, 3)),
    ((6, 1), (9, 1)),
    ((5, 4), (1, 6)),
    ((5, 4), (1, 1)),
    ((1, 1), (3, 2)),
]


def table(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def resized(cells, grid, method="corners"):
    """Of a table with one channel."""
    return resize_grid(np.array(cells, np.float32)[..., None], grid, method)[..., 0].tolist()


def test_two_by_two_becomes_three_by_three():
    assert resized([[0, 1], [2, 3]], (3, 3)) == [[0, 0.5, 1], [1, 1.5, 2], [2, 2.5, 3]]
    assert resized([[0, 0], [0, 4]], (3, 3)) == [[0, 0, 0], [0, 1, 2], [0, 2, 4]]


def test_three_by_two_becomes_five_by_four():
    """New rows lie at 0, 1/2, 1, 3/2, 2 of the old ones, new columns at 0, 1/3, 2/3, 1."""
    expected = [[0, 1, 2, 3], [3, 4, 5, 6], [6, 7, 8, 9], [18, 19, 20, 21], [30, 31, 32, 33]]
    np.testing.assert_allclose(resized([[0, 3], [6, 9], [30, 33]], (5, 4)), expected, rtol=1e-6)


def test_shrinking_keeps_what_lies_on_the_new_grid():
    assert resized([[1, 2, 3], [4, 5, 6], [7, 8, 9]], (2, 2)) == [[1, 3], [7, 9]]
    assert resized([[0, 3, 6, 9]], (1, 3)) == [[0, 4.5, 9]]


@pytest.mark.parametrize(("old", "new"), GRIDS)
def test_corners_are_the_order_1_zoom_of_scipy(old, new):
    old_hwD = table(*old, 3)
    zoom = (new[0] / old[0], new[1] / old[1], 1)
    expected = scipy.ndimage.zoom(old_hwD.astype(np.float64), zoom, order=1)
    found = resize_grid(old_hwD, new)
    assert found.shape == (*new, 3)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected, rtol=0, atol=5e-7)  # the last bit of float32 below 4 is worth 2.4e-7


@pytest.mark.parametrize(("old", "new"), [grids for grids in GRIDS if min(*grids[0], *grids[1]) > 1])
def test_corners_stay_to_the_bit(old, new):
    old_hwD = table(*old, 3)
    found = resize_grid(old_hwD, new)
    for corner in ((0, 0), (0, -1), (-1, 0), (-1, -1)):
        assert found[corner].tobytes() == old_hwD[corner].tobytes()


def by_filter(old_n, new_n, method):
    """(new, old): each new sample's weights, samples in the middles of cells; widened where cells become fewer."""
    radius, value = FILTERS[method]
    stretch = max(old_n / new_n, 1.0)
    rows = []
    for i in range(new_n):
        centre = (i + 0.5) * old_n / new_n
        distances = [abs(j + 0.5 - centre) / stretch for j in range(old_n)]
        weights = [float(value(x)) if x < radius else 0.0 for x in distances]
        rows.append([weight / math.fsum(weights) for weight in weights])
    return np.array(rows)


@pytest.mark.parametrize("method", FILTERS)
@pytest.mark.parametrize(("old", "new"), [((14, 14), (24, 24)), ((9, 4), (5, 7)), ((1, 6), (1, 3))])
def test_other_filters(old, new, method):
    old_hwD = table(*old, 3)
    rows, columns = (by_filter(*sizes, method) for sizes in zip(old, new, strict=True))
    expected = np.stack([rows @ channel @ columns.T for channel in np.moveaxis(old_hwD.astype(np.float64), -1, 0)], -1)
    found = resize_grid(old_hwD, new, method)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-5)  # weights and sums are float32 there
    assert np.abs(found - resize_grid(old_hwD, new)).max() > 1e-2


@pytest.mark.parametrize("method", ["corners", *FILTERS])
def test_the_same_grid_is_the_same_bytes(method):
    old_hwD = table(3, 5, 4)
    assert resize_grid(old_hwD, (3, 5), method).tobytes() == old_hwD.tobytes()
    old_SD = table(16, 4)
    assert resize_rows(old_SD, (3, 5), (3, 5), method).tobytes() == old_SD.tobytes()


def test_an_unknown_filter_is_refused_whatever_the_grid():
    for grid in ((2, 2), (3, 3)):
        with pytest.raises(ValueError, match="'nearest': use one of corners, bilinear, bicubic, lanczos3"):
            resize_grid(table(2, 2, 1), grid, "nearest")


@pytest.mark.parametrize("num_first", [0, 1])
def test_rows_before_the_patches_stay(num_first):
    """Five by three cells become two by seven: the raster goes along the rows of the image, not along its columns."""
    old_SD = table(num_first + 15, 4)
    found = resize_rows(old_SD, (5, 3), (2, 7), "corners")
    assert found.shape == (num_first + 14, 4)
    assert found[:num_first].tobytes() == old_SD[:num_first].tobytes()
    patches = scipy.ndimage.zoom(old_SD[num_first:].reshape(5, 3, 4).astype(np.float64), (2 / 5, 7 / 3, 1), order=1)
    np.testing.assert_allclose(found[num_first:].reshape(2, 7, 4), patches, rtol=0, atol=5e-7)
