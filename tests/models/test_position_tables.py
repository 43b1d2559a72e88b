"""Fixed position embeddings against values worked out by hand."""

import numpy as np
import pytest

from vit_jax.models.positions import fixed_positions, sincos2d


def test_sincos2d_first_row_and_last_frequency():
    table = sincos2d((3, 5), 16)
    assert (table.shape, table.dtype) == ((15, 16), np.float32)
    np.testing.assert_array_equal(table[0], [0] * 4 + [1] * 4 + [0] * 4 + [1] * 4)

    row = 2
    column = 3
    expected = [
        np.sin(column * 1e-4),
        np.cos(column * 1e-4),
        np.sin(row * 1e-4),
        np.cos(row * 1e-4),
    ]

    np.testing.assert_allclose(table[row * 5 + column, 3::4], expected, rtol=1e-5)


@pytest.mark.parametrize("has_class_token", [False, True])
def test_a_class_token_comes_first_and_gets_nothing(has_class_token):
    first = int(has_class_token)
    table = fixed_positions("sincos2d", (3, 5), 16, prefix_length=first)

    assert (table.shape, table.dtype) == ((1, first + 15, 16), np.float32)
    assert not table[0, :first].any()
    np.testing.assert_array_equal(table[0, first:], sincos2d((3, 5), 16))

    half = sincos2d(
        (2, 2),
        16,
        (4, 4),
    )  # its patches have their middles between those of the large grid, at 0.5 and 2.5

    np.testing.assert_allclose(half[1, [0, 4]], [np.sin(2.5), np.cos(2.5)], rtol=1e-6)
    np.testing.assert_array_equal(sincos2d((3, 5), 16, (3, 5)), sincos2d((3, 5), 16))

    nothing = fixed_positions("none", (3, 5), 16, prefix_length=first)
    assert (nothing.shape, nothing.dtype, nothing.any()) == (table.shape, np.float32, False)
