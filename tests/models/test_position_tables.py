"""Fixed position embeddings against values worked out by hand."""

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from vit_jax.models.positions import build_fixed_positions, compute_sincos2d


def test_sincos2d_first_row_and_last_frequency():
    row = 2
    column = 3
    sines_and_cosines = [0] * 4 + [1] * 4
    first_row = 2 * sines_and_cosines
    last_frequency = [
        np.sin(column * 1e-4),
        np.cos(column * 1e-4),
        np.sin(row * 1e-4),
        np.cos(row * 1e-4),
    ]

    table = compute_sincos2d((3, 5), 16)

    assert table.shape == (15, 16)
    assert table.dtype == np.float32
    assert_array_equal(table[0], first_row)
    assert_allclose(
        table[row * 5 + column, 3::4],
        last_frequency,
        rtol=1e-5,
    )


@pytest.mark.parametrize("has_class_token", [False, True])
def test_a_class_token_comes_first_and_gets_nothing(has_class_token):
    first = int(has_class_token)

    table = build_fixed_positions(
        "sincos2d",
        (3, 5),
        16,
        prefix_length=first,
    )
    expected = compute_sincos2d((3, 5), 16)

    assert table.shape == (1, first + 15, 16)
    assert table.dtype == np.float32
    assert not table[0, :first].any()
    assert_array_equal(table[0, first:], expected)


@pytest.mark.parametrize("has_class_token", [False, True])
def test_no_positions_are_zeros(has_class_token):
    first = int(has_class_token)

    table = build_fixed_positions(
        "none",
        (3, 5),
        16,
        prefix_length=first,
    )

    assert table.shape == (1, first + 15, 16)
    assert table.dtype == np.float32
    assert not table.any()


def test_positions_of_a_smaller_grid_lie_between_those_of_the_large_one():
    """The middles of the patches are at 0.5 and 2.5."""
    half = compute_sincos2d((2, 2), 16, (4, 4))
    whole = compute_sincos2d((3, 5), 16, (3, 5))
    expected = compute_sincos2d((3, 5), 16)

    assert_allclose(
        half[1, [0, 4]],
        [np.sin(2.5), np.cos(2.5)],
        rtol=1e-6,
    )
    assert_array_equal(whole, expected)
