"""Dropout's masks: their fraction, their independence, and the same mask on every layout."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from vit_jax.models.dropout import dropout

SHAPE = (8, 64, 512)
# Bounds are multiples of the deviation of independent random numbers.
SIGMAS = 5


def sample_mask(fraction, seed=0):
    """Return 1 where an element stays."""
    kept = dropout(jnp.ones(SHAPE), fraction, jax.random.key(seed))
    return np.asarray(kept) > 0


def sample_signs(seed=0):
    """Return 1 where an element stays and -1 elsewhere, with mean zero."""
    return sample_mask(0.5, seed) * 2.0 - 1


@pytest.mark.parametrize("fraction", [0.1, 0.5, 0.9])
@pytest.mark.parametrize(
    "axes",
    [(0, 1, 2), (2,), (0, 1)],
    ids=["all", "rows", "columns"],
)
def test_the_fraction_of_rows_columns_and_all(fraction, axes):
    kept = sample_mask(fraction)
    count = np.prod([SHAPE[axis] for axis in axes])
    deviation = np.sqrt(fraction * (1 - fraction) / count)

    error = np.abs(kept.mean(axes) - (1 - fraction))

    assert error.max() < SIGMAS * deviation


@pytest.mark.parametrize(("rows", "columns"), [(1, 0), (0, 1), (1, 1), (3, 7)])
def test_elements_are_independent_in_pairs_and_in_rectangles(rows, columns):
    """The words of a row and of a column are shared.

    Four elements of two rows and columns must not show it.
    """
    signs = sample_signs().reshape(-1, SHAPE[-1])
    bound = SIGMAS / np.sqrt(signs[1:, 1:].size)
    last_row = len(signs) - rows
    last_column = SHAPE[-1] - columns

    first = signs[rows:, columns:]
    second = signs[:last_row, :last_column]
    other_row = signs[:last_row, columns:]
    other_column = signs[rows:, :last_column]

    assert abs((first * second).mean()) < bound
    if rows and columns:
        assert abs((first * second * other_row * other_column).mean()) < bound


def test_every_key_has_another_mask():
    first = sample_signs()
    second = sample_signs(seed=1)

    assert abs((first * second).mean()) < SIGMAS / np.sqrt(first.size)
    assert (sample_mask(0.5) == sample_mask(0.5)).all()


def test_every_site_of_a_key_has_another_mask():
    ones = jnp.ones(SHAPE)
    key = jax.random.key(0)
    bound = SIGMAS / np.sqrt(ones.size)

    def sample_signs_at(site):
        kept = np.asarray(dropout(ones, 0.5, key, site=site))
        return np.sign(kept) * 2 - 1

    at_sites = [sample_signs_at(site) for site in range(5)]

    for first, second in itertools.combinations(at_sites, 2):
        assert abs((first * second).mean()) < bound


def test_values_are_scaled_and_the_gradient_has_the_same_mask():
    x = jnp.arange(1.0, 4097.0).reshape(8, 512)
    key = jax.random.key(3)

    y, pull_back = jax.vjp(lambda x: dropout(x, 0.25, key), x)
    (gradient,) = pull_back(2 * jnp.ones_like(x))
    kept = np.asarray(y) != 0

    assert_allclose(y, np.where(kept, x / 0.75, 0), rtol=1e-6)
    assert_allclose(gradient, np.where(kept, 2 / 0.75, 0), rtol=1e-6)


def test_nothing_happens_without_a_key_or_a_fraction():
    x = jnp.ones((2, 3))
    assert dropout(x, 0.5, None) is x
    assert dropout(x, 0.0, jax.random.key(0)) is x


def test_no_mask_is_kept_for_the_backward_pass():
    def loss(x):
        return jnp.square(dropout(x, 0.1, jax.random.key(0))).sum()

    def keep_for_backward(x):
        _, pull_back = jax.vjp(loss, x)
        return pull_back

    kept = jax.tree.leaves(jax.eval_shape(keep_for_backward, jnp.ones(SHAPE)))
    large = [leaf for leaf in kept if leaf.size == np.prod(SHAPE)]

    assert [leaf.dtype for leaf in large] == [jnp.float32], "what the square keeps, no mask"


def test_the_mask_is_that_of_one_device_on_any_layout():
    mesh = jax.make_mesh(
        (8,),
        ("data",),
        axis_types=(jax.sharding.AxisType.Auto,),
    )
    sharding = jax.sharding.NamedSharding(
        mesh,
        jax.sharding.PartitionSpec("data"),
    )
    apply = jax.jit(
        lambda x: dropout(x, 0.3, jax.random.key(0)),
        in_shardings=sharding,
        out_shardings=sharding,
    )
    expected = np.where(sample_mask(0.3), np.float32(1 / (1 - 0.3)), 0)

    assert_array_equal(apply(jnp.ones(SHAPE)), expected)
