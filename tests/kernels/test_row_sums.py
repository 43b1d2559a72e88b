"""Vectors beside the rows of a matrix on GPUs, held to JAX's broadcast."""

import jax
import jax.numpy as jnp
import pytest

from tests.models.small_models import FakeDevices, assert_each_close
from vit_jax.kernels.devices import trace_for
from vit_jax.kernels.dispatch import repeat_rows


@pytest.mark.parametrize("num_rows", [16, 15], ids=["eight parts", "one part"])
def test_a_repeated_vector_has_the_gradient_of_a_broadcast(num_rows):
    vector = jnp.arange(3.0)
    weight = jnp.arange(num_rows * 3.0).reshape(num_rows, 3) / 10

    def loss(vector):
        return (repeat_rows(vector, weight.shape) * weight).sum()

    expected = jax.value_and_grad(loss)(vector)
    with trace_for(FakeDevices(platform="gpu", compute_capability=None)):
        actual = jax.value_and_grad(loss)(vector)

    assert_each_close(actual, expected, 1e-6)
