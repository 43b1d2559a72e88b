"""Forms of matrix products, held to the default product and to their programs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.models.small_models import FakeDevices, assert_each_close, find_equations
from vit_jax.kernels.devices import trace_for
from vit_jax.kernels.dispatch import multiply, multiply_adapted, multiply_each
from vit_jax.kernels.products import LARGE_INPUT, multiply_on_cpu

# Relative to the largest number: float32 sums of at most 15 products, in another order.
TOLERANCE = 2e-6


def sample_arrays(*shapes):
    rng = np.random.default_rng(0)
    arrays = []
    for shape in shapes:
        array = rng.normal(size=shape)
        arrays.append(jnp.float32(array))
    return arrays


def test_a_product_for_cpus_gives_the_same_numbers_and_gradients():
    x, kernel, weight = sample_arrays((3, 5, 4), (4, 6), (3, 5, 6))

    def compute(function):
        y, pull_back = jax.vjp(function, x, kernel)
        return y, *pull_back(weight)

    actual = compute(multiply)
    expected = compute(jnp.matmul)

    assert_each_close(actual, expected, TOLERANCE)


def test_the_gradient_of_a_kernel_begins_with_the_input():
    x = jnp.ones((3, 5, 4))
    kernel = jnp.ones((4, 6))

    def loss(kernel):
        return multiply(x, kernel).sum()

    program = jax.make_jaxpr(jax.grad(loss))(kernel)
    product = find_equations(program, "dot_general")[-1]
    left, right = product.invars

    assert left.aval.shape == (3, 5, 4)
    assert right.aval.shape == (3, 5, 6)


def test_the_gradient_of_a_kernel_begins_with_the_narrower_operand_if_the_input_is_large():
    x, kernel, weight = sample_arrays((2, 1024, 256), (256, 3), (2, 1024, 3))
    assert x.size == LARGE_INPUT

    def differentiate(function):
        def loss(kernel):
            return (function(x, kernel) * weight).sum()

        return jax.grad(loss)

    program = jax.make_jaxpr(differentiate(multiply_on_cpu))(kernel)
    product = find_equations(program, "dot_general")[-1]
    left, right = product.invars
    actual = differentiate(multiply_on_cpu)(kernel)
    expected = differentiate(jnp.matmul)(kernel)

    assert left.aval.shape == (2, 1024, 3)
    assert right.aval.shape == (2, 1024, 256)
    assert product.outvars[0].aval.shape == (2, 3, 256)  # each image is a product
    assert_each_close(actual, expected, 1e-5)  # sums of 2,048 products


def find_operands_of_sums(program, shape):
    """Return the names of the primitives that each sum of this shape adds."""
    producers = {}
    operands = []

    for equation in program.eqns:
        name = equation.primitive.name
        if name == "add" and equation.outvars[0].aval.shape == shape:
            operands.append([producers[operand] for operand in equation.invars])
        producers |= dict.fromkeys(equation.outvars, name)

    return operands


def test_products_of_one_activation_on_gpus():
    """They equal the products by each kernel.

    In the sums of their gradients a product comes first, so that cuBLAS can add.
    """
    x, *kernels = sample_arrays((3, 5, 4), (4, 6), (4, 6), (4, 6))
    gpu = FakeDevices(platform="gpu", compute_capability=None)

    def loss(x, kernels):
        total = 0.0
        for weight, y in enumerate(multiply_each(x, kernels), start=1):
            total += weight * jnp.square(y).sum()
        return total

    differentiate = jax.value_and_grad(loss, argnums=(0, 1))
    expected = differentiate(x, kernels)
    with trace_for(gpu):
        actual = differentiate(x, kernels)
        program = jax.make_jaxpr(jax.grad(loss))(x, kernels)

    assert_each_close(actual, expected, 10 * TOLERANCE)
    assert find_operands_of_sums(program, x.shape) == [
        ["dot_general", "dot_general"],
        ["dot_general", "add"],
    ]


@pytest.mark.parametrize(
    ("platform", "inputs", "rank"),
    [("cpu", 4, 2), ("gpu", 4, 2), ("gpu", 30, 2), ("gpu", 30, 20)],
    ids=["cpu", "gpu, more outputs than inputs", "gpu, fewer outputs", "gpu, large rank"],
)
def test_products_with_factors(platform, inputs, rank):
    """They equal the products by W + A B; a kernel may have no factors."""
    kernel_shapes = ((inputs, 6), (inputs, 7), (inputs, 8))
    factor_shapes = ((inputs, rank), (rank, 6), (inputs, 1), (1, 8))
    shapes = ((4, 8, inputs), *kernel_shapes, *factor_shapes)  # four parts of the positions
    x, *kernels, first_a, first_b, last_a, last_b = sample_arrays(*shapes)
    factors = [(first_a, first_b), None, (last_a, last_b)]

    assert_equals_product_with_merged(platform, x, kernels, factors)


@pytest.mark.parametrize("outputs", [6, 8, 10])
@pytest.mark.parametrize("rank", [2, 20])
def test_one_product_with_factors_on_gpus(outputs, rank):
    shapes = ((4, 8, 8), (8, outputs), (8, rank), (rank, outputs))
    x, kernel, a, b = sample_arrays(*shapes)

    assert_equals_product_with_merged("gpu", x, [kernel], [(a, b)])


def assert_equals_product_with_merged(platform, x, kernels, factors):
    """Hold products and gradients on a platform to those of the merged kernels."""
    devices = FakeDevices(platform=platform, compute_capability=None)

    def multiply_merged(x, kernels, factors):
        products = []
        for kernel, pair in zip(kernels, factors, strict=True):
            if pair is not None:
                kernel = kernel + pair[0] @ pair[1]
            products.append(x @ kernel)
        return products

    def differentiate(function):
        def loss(*arguments):
            total = 0.0
            for weight, y in enumerate(function(*arguments), start=1):
                total += weight * jnp.square(y).sum()
            return total

        compute = jax.value_and_grad(loss, argnums=(0, 1, 2))
        return jax.tree.leaves(compute(x, kernels, factors))

    with trace_for(devices):
        actual = differentiate(multiply_adapted)
    expected = differentiate(multiply_merged)

    assert_each_close(actual, expected, TOLERANCE)
