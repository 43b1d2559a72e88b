"""Maxima of windows and their gradients, held to the default form."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_array_equal

from vit_jax.kernels.pooling import max_pool, max_pool_on_cpu


@pytest.mark.parametrize("size", [(8, 8), (7, 9), (1, 2), (46, 47)], ids=str)
@pytest.mark.parametrize("padding", ["SAME", ((1, 1), (1, 1)), ((0, 1), (1, 0))], ids=str)
def test_the_form_for_cpus_gives_the_same_numbers_and_gradients(padding, size):
    """Small integers are often equal; the first of them is the maximum.

    Gradients of large images are computed one by one.
    """
    rng = np.random.default_rng(0)
    x = jnp.float32(rng.integers(-3, 3, (2, *size, 4)))

    def compute(function):
        y, pull_back = jax.vjp(lambda x: function(x, padding), x)
        gradient = jnp.arange(1.0, 1 + y.size).reshape(y.shape)
        return y, *pull_back(gradient)

    actual = compute(max_pool_on_cpu)
    expected = compute(max_pool)

    for found, wanted in zip(actual, expected, strict=True):
        assert_array_equal(found, wanted)


def test_a_maximum_that_is_not_a_number_stays():
    x = jnp.ones((1, 8, 8, 1)).at[0, 3, 3, 0].set(jnp.nan)

    y, _ = jax.vjp(lambda x: max_pool_on_cpu(x, "SAME"), x)

    assert_array_equal(y, max_pool(x, "SAME"))
