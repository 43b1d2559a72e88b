"""Dropout's masks: their fraction, their independence, and the same mask on every layout."""

import functools
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
    key = jax.random.key(seed)
    kept = dropout(jnp.ones(SHAPE), fraction, key)
    return np.asarray(kept) > 0


def sample_signs(seed=0):
    """Return 1 where an element stays and -1 elsewhere, with mean zero."""
    return sample_mask(0.5, seed) * 2.0 - 1


@pytest.mark.parametrize("fraction", [0.1, 0.5, 0.9])
@pytest.mark.parametrize(
    "axes",
    [
        (0, 1, 2),
        (2,),
        (0, 1),
    ],
    ids=["all", "rows", "columns"],
)
def test_the_fraction_of_rows_columns_and_all(fraction, axes):
    kept = sample_mask(fraction)
    share = kept.mean(axes)
    count = kept.size / share.size
    variance = fraction * (1 - fraction) / count

    error = np.abs(share - (1 - fraction))

    assert error.max() < SIGMAS * np.sqrt(variance)


@pytest.mark.parametrize(
    ("rows", "columns"),
    [
        (1, 0),
        (0, 1),
        (1, 1),
        (3, 7),
    ],
)
def test_elements_are_independent_in_pairs_and_in_rectangles(rows, columns):
    """The words of a row and of a column are shared.

    Four elements of two rows and columns must not show it.
    """
    signs = sample_signs().reshape(-1, SHAPE[-1])
    bound = SIGMAS / np.sqrt(signs.size)
    height, width = signs.shape
    left = signs[:, : width - columns]
    right = signs[:, columns:]

    pairs = left[: height - rows] * right[rows:]
    other_pairs = right[: height - rows] * left[rows:]

    assert abs(pairs.mean()) < bound
    if rows and columns:
        rectangles = pairs * other_pairs
        assert abs(rectangles.mean()) < bound


def test_every_key_has_another_mask():
    first = sample_signs()
    second = sample_signs(seed=1)
    product = first * second
    bound = SIGMAS / np.sqrt(product.size)

    assert abs(product.mean()) < bound
    assert_array_equal(sample_signs(), first)


def test_every_site_of_a_key_has_another_mask():
    ones = jnp.ones(SHAPE)
    key = jax.random.key(0)
    bound = SIGMAS / np.sqrt(ones.size)

    def sample_signs_at(site):
        kept = dropout(ones, 0.5, key, site=site)
        return np.sign(kept) * 2 - 1

    signs_by_site = list(map(sample_signs_at, range(5)))

    for first, second in itertools.combinations(signs_by_site, 2):
        product = first * second
        assert abs(product.mean()) < bound


def test_values_are_scaled_and_the_gradient_has_the_same_mask():
    numbers = jnp.arange(1.0, 4097.0)
    x = numbers.reshape(8, 512)
    key = jax.random.key(3)

    def drop(x):
        return dropout(x, 0.25, key)

    y, pull_back = jax.vjp(drop, x)
    (gradient,) = pull_back(jnp.ones_like(x))
    is_kept = np.asarray(y) != 0
    scale = np.where(is_kept, 1 / 0.75, 0)

    assert_allclose(y, x * scale, rtol=1e-6)
    assert_allclose(gradient, scale, rtol=1e-6)


def test_nothing_happens_without_a_key_or_a_fraction():
    x = jnp.ones((2, 3))
    key = jax.random.key(0)

    assert dropout(x, 0.5, None) is x
    assert dropout(x, 0.0, key) is x


def test_no_mask_is_kept_for_the_backward_pass():
    x = jnp.ones(SHAPE)
    key = jax.random.key(0)

    def loss(x):
        dropped = dropout(x, 0.1, key)
        return jnp.square(dropped).sum()

    def keep_for_backward(x):
        _, pull_back = jax.vjp(loss, x)
        return pull_back

    kept = jax.eval_shape(keep_for_backward, x)
    dtypes = []
    for leaf in jax.tree.leaves(kept):
        if leaf.size == x.size:
            dtypes.append(leaf.dtype)

    assert dtypes == [jnp.float32], "what the square keeps, no mask"


def test_the_mask_is_that_of_one_device_on_any_layout():
    mesh = jax.make_mesh(
        (8,),
        ("data",),
        axis_types=(jax.sharding.AxisType.Auto,),
    )
    spec = jax.sharding.PartitionSpec("data")
    sharding = jax.sharding.NamedSharding(mesh, spec)
    scale = np.float32(1 / (1 - 0.3))
    expected = np.where(sample_mask(0.3), scale, 0)

    @functools.partial(
        jax.jit,
        in_shardings=sharding,
        out_shardings=sharding,
    )
    def drop(x):
        return dropout(x, 0.3, jax.random.key(0))

    dropped = drop(jnp.ones(SHAPE))

    assert_array_equal(dropped, expected)
