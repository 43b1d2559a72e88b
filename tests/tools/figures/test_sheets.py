"""Tiles joined, and maps at the resolution of their images."""

import numpy as np
import pytest

from vit_jax.tools.figures.sheets import (
    arrange_in_rows,
    highlight,
    join_tiles,
    limit_outliers,
    scale_to_full_range,
    smooth,
)


def test_tiles_are_joined_with_gaps():
    tiles = np.arange(8).reshape(2, 2, 1, 2)

    joined = join_tiles(tiles, -1)

    assert joined.tolist() == [
        [0, 1, -1, 2, 3],
        [-1, -1, -1, -1, -1],
        [4, 5, -1, 6, 7],
    ]


def test_tiles_in_rows_are_filled_up():
    five_tiles = np.arange(1, 6).reshape(5, 1, 1)
    many_tiles = np.zeros((28, 2, 2, 3))

    rows = arrange_in_rows(five_tiles, 0)
    many_rows = arrange_in_rows(many_tiles, 1)

    assert rows.shape == (2, 3, 1, 1)
    assert rows.ravel().tolist() == [1, 2, 3, 4, 5, 0]
    assert many_rows.shape == (4, 7, 2, 2, 3)


def test_full_range():
    scaled = scale_to_full_range(np.array([2.0, 4.0, 3.0]))
    constant = scale_to_full_range(np.full(3, 7.0))

    assert scaled.tolist() == [0, 1, 0.5]
    assert constant.tolist() == [0, 0, 0]


@pytest.fixture
def map_hw():
    """A map of 2 x 3 cells, the last one of which is highest."""
    map_hw = np.zeros((2, 3), np.float32)
    map_hw[1, 2] = 0.2
    return map_hw


def test_a_map_is_highest_where_its_patch_is(map_hw):
    """A grid of 2 x 3 patches of 8 x 4 pixels on an image with a border below that no patch covers."""
    found = smooth(map_hw, (8, 4), (19, 12))

    assert found.shape == (19, 12)
    assert found.min() == 0
    assert found.max() == 1

    row, column = divmod(found.argmax(), 12)
    assert row >= 8
    assert column >= 8

    last_row = found[15]
    for row in found[15:]:
        assert np.array_equal(row, last_row)


def test_the_last_cells_of_a_map_may_reach_beyond_the_image(map_hw):
    """Maps of ResNets do."""
    found = smooth(map_hw, (8, 4), (14, 11))

    assert found.shape == (14, 11)


def test_maps_without_differences():
    bright = np.full((2, 2), 0.3, np.float32)
    dark = np.zeros((2, 2), np.float32)

    smooth_bright = smooth(bright, (4, 4), (8, 8))
    smooth_dark = smooth(dark, (4, 4), (8, 8))

    assert smooth_bright.min() == 1
    assert smooth_dark.max() == 0


def test_a_single_patch_does_not_darken_all_others():
    map_hw = np.linspace(1, 2, 256).reshape(16, 16)
    with_outlier = map_hw.copy()
    with_outlier[3, 5] = 50

    limited = limit_outliers(with_outlier)

    np.testing.assert_array_equal(limit_outliers(map_hw), map_hw)
    assert limited[3, 5] == limited.max() < 4.1
    assert (limited != with_outlier).sum() == 1


def test_an_image_is_dark_where_the_map_is_low():
    image = np.full((8, 8, 3), 200, np.uint8)
    map_hw = np.zeros((2, 2), np.float32)
    map_hw[0, 0] = 1

    shown = highlight(image, map_hw, (4, 4))
    first_corner = shown[:40, :40]
    last_corner = shown[-40:, -40:]

    assert shown.shape == (160, 160, 3), "small images are enlarged"
    assert first_corner.mean() > 150
    assert last_corner.mean() < 20
