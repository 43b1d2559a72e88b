"""Tiles joined, and maps at the resolution of their images."""

import numpy as np

from vit_jax.tools.figures.sheets import (
    arrange_in_rows,
    highlight,
    join_tiles,
    scale_to_full_range,
    smooth,
)


def test_tiles_are_joined_with_gaps():
    tiles = np.arange(8).reshape(2, 2, 1, 2)

    assert join_tiles(tiles, -1).tolist() == [
        [0, 1, -1, 2, 3],
        [-1, -1, -1, -1, -1],
        [4, 5, -1, 6, 7],
    ]


def test_tiles_in_rows_are_filled_up():
    tiles = arrange_in_rows(np.arange(1, 6).reshape(5, 1, 1), 0)

    assert tiles.shape == (2, 3, 1, 1)
    assert tiles.ravel().tolist() == [1, 2, 3, 4, 5, 0]
    assert arrange_in_rows(np.zeros((28, 2, 2, 3)), 1).shape == (4, 7, 2, 2, 3)


def test_full_range():
    assert scale_to_full_range(np.array([2.0, 4.0, 3.0])).tolist() == [0, 1, 0.5]
    assert scale_to_full_range(np.full(3, 7.0)).tolist() == [0, 0, 0]


def test_a_map_is_highest_where_its_patch_is():
    """A grid of 2 x 3 patches of 8 x 4 pixels on an image with a border below that no patch covers."""
    map_hw = np.zeros((2, 3), np.float32)
    map_hw[1, 2] = 0.2

    found = smooth(map_hw, (8, 4), (19, 12))

    assert found.shape == (19, 12)
    assert found.min() == 0
    assert found.max() == 1

    row, column = np.unravel_index(found.argmax(), found.shape)
    assert row >= 8
    assert column >= 8

    last_row = found[15:16]
    assert np.array_equal(found[15:], last_row.repeat(4, axis=0))


def test_the_last_cells_of_a_map_may_reach_beyond_the_image():
    """Maps of ResNets do."""
    map_hw = np.zeros((2, 3), np.float32)
    map_hw[1, 2] = 0.2

    assert smooth(map_hw, (8, 4), (14, 11)).shape == (14, 11)


def test_maps_without_differences():
    bright = np.full((2, 2), 0.3, np.float32)
    dark = np.zeros((2, 2), np.float32)

    assert smooth(bright, (4, 4), (8, 8)).min() == 1
    assert smooth(dark, (4, 4), (8, 8)).max() == 0


def test_an_image_is_dark_where_the_map_is_low():
    image = np.full((8, 8, 3), 200, np.uint8)
    map_hw = np.array([[1.0, 0.0], [0.0, 0.0]], np.float32)

    shown = highlight(image, map_hw, (4, 4))

    assert shown.shape == (160, 160, 3), "small images are enlarged"
    assert shown[:40, :40].mean() > 150
    assert shown[-40:, -40:].mean() < 20
