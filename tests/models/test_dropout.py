"""Dropout's masks: how many, independent of each other, and the same wherever they are computed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vit_jax.models.dropout import dropout

SHAPE = (8, 64, 512)
SIGMAS = 5  # of what would come of independent draws


def masks(fraction, seed=0, shape=SHAPE):
    """1 where an element stays."""
    return np.asarray(dropout(jnp.ones(shape), fraction, jax.random.key(seed))) > 0


@pytest.mark.parametrize("fraction", [0.1, 0.5, 0.9])
def test_the_fraction_of_rows_columns_and_all(fraction):
    kept = masks(fraction)
    for axes in ((), (0, 1), (2,)):
        over = tuple(axis for axis in range(3) if axis not in axes) if axes else (0, 1, 2)
        count = np.prod([SHAPE[axis] for axis in over])
        bound = SIGMAS * np.sqrt(fraction * (1 - fraction) / count)

        assert np.abs(kept.mean(over) - (1 - fraction)).max() < bound


def test_elements_are_independent_in_pairs_and_in_rectangles():
    """The words of a row and of a column are shared: four elements of two rows and columns must not show it."""
    centred = masks(0.5).reshape(-1, SHAPE[-1]) * 2.0 - 1
    bound = SIGMAS / np.sqrt(centred[1:, 1:].size)

    for rows, columns in ((1, 0), (0, 1), (1, 1), (3, 7)):
        a = centred[rows:, columns:]
        b = centred[: len(centred) - rows, : SHAPE[-1] - columns]

        assert abs((a * b).mean()) < bound

        other_row = centred[: len(centred) - rows, columns:]
        other_column = centred[rows:, : SHAPE[-1] - columns]

        if rows and columns:
            assert abs((a * b * other_row * other_column).mean()) < bound


def test_keys_have_masks_of_their_own():
    first = masks(0.5) * 2.0 - 1
    second = masks(0.5, seed=1) * 2.0 - 1

    assert abs((first * second).mean()) < SIGMAS / np.sqrt(first.size)
    assert (masks(0.5) == masks(0.5)).all()


def test_sites_of_one_key_have_masks_of_their_own():
    ones = jnp.ones(SHAPE)
    key = jax.random.key(0)
    at_sites = [
        np.sign(np.asarray(dropout(ones, 0.5, key, site=site))) * 2 - 1 for site in range(5)
    ]

    for place, first in enumerate(at_sites):
        for second in at_sites[:place]:
            assert abs((first * second).mean()) < SIGMAS / np.sqrt(first.size)


def test_values_are_scaled_and_the_gradient_has_the_same_mask():
    x = jnp.arange(1.0, 4097.0).reshape(8, 512)
    key = jax.random.key(3)
    y, pull_back = jax.vjp(lambda x: dropout(x, 0.25, key), x)
    kept = np.asarray(y) != 0

    np.testing.assert_allclose(y, np.where(kept, x / 0.75, 0), rtol=1e-6)

    (gradient,) = pull_back(2 * jnp.ones_like(x))
    np.testing.assert_allclose(gradient, np.where(kept, 2 / 0.75, 0), rtol=1e-6)


def test_nothing_happens_without_a_key_or_a_fraction():
    x = jnp.ones((2, 3))
    assert dropout(x, 0.5, None) is x
    assert dropout(x, 0.0, jax.random.key(0)) is x


def test_no_mask_is_kept_for_the_backward_pass():
    def loss(x):
        return jnp.square(dropout(x, 0.1, jax.random.key(0))).sum()

    kept = jax.tree.leaves(jax.eval_shape(lambda x: jax.vjp(loss, x)[1], jnp.ones(SHAPE)))
    large = [leaf for leaf in kept if leaf.size == np.prod(SHAPE)]

    assert [leaf.dtype for leaf in large] == [jnp.float32], "what the square keeps, no mask"


def test_the_mask_is_that_of_one_device_on_any_layout():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    apply = jax.jit(
        lambda x: dropout(x, 0.3, jax.random.key(0)),
        in_shardings=sharding,
        out_shardings=sharding,
    )

    np.testing.assert_array_equal(
        apply(jnp.ones(SHAPE)),
        np.where(masks(0.3), np.float32(1 / (1 - 0.3)), 0),
    )
