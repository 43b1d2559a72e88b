import jax
import jax.numpy as jnp
import numpy as np

from tests.models.small_models import FakeDevices
from vit_jax.kernels.devices import trace_for
from vit_jax.kernels.dispatch import multiply, multiply_each

TOLERANCE = 2e-6  # of the largest number: float32 sums of 15 products at most, in another order


def test_a_product_for_cpus_gives_the_same_numbers_and_gradients():
    rng = np.random.default_rng(0)
    x, kernel, weight = (
        jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((3, 5, 4), (4, 6), (3, 5, 6))
    )

    def results(function):
        y, pull_back = jax.vjp(function, x, kernel)
        return y, *pull_back(weight)

    for here, there in zip(results(multiply), results(jnp.matmul), strict=True):
        np.testing.assert_allclose(
            here,
            there,
            rtol=0,
            atol=TOLERANCE * float(jnp.abs(there).max()),
        )


def test_the_gradient_of_a_kernel_begins_with_the_input():
    x = jnp.ones((3, 5, 4))
    kernel = jnp.ones((4, 6))
    program = jax.make_jaxpr(jax.grad(lambda kernel: multiply(x, kernel).sum()))(kernel)
    product = [equation for equation in program.eqns if equation.primitive.name == "dot_general"][
        -1
    ]

    assert [operand.aval.shape for operand in product.invars] == [(3, 5, 4), (3, 5, 6)]


def test_products_of_one_activation_on_gpus():
    """They are those of each kernel.

    In the sums of their gradients a product comes first, so that cuBLAS can add.
    """
    rng = np.random.default_rng(0)
    x, *kernels = (
        jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((3, 5, 4), *[(4, 6)] * 3)
    )

    def loss(x, kernels):
        return sum(
            scale * jnp.square(y).sum()
            for scale, y in zip((1.0, 2.0, 3.0), multiply_each(x, kernels), strict=True)
        )

    expected = jax.value_and_grad(loss, argnums=(0, 1))(x, kernels)
    with trace_for(FakeDevices(platform="gpu", compute_capability=None)):
        actual = jax.value_and_grad(loss, argnums=(0, 1))(x, kernels)
        program = jax.make_jaxpr(jax.grad(loss))(x, kernels)

    for here, there in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(
            here,
            there,
            rtol=0,
            atol=10 * TOLERANCE * float(jnp.abs(there).max()),
        )

    made_by = {
        output: equation.primitive.name for equation in program.eqns for output in equation.outvars
    }
    sums = [
        e for e in program.eqns if e.primitive.name == "add" and e.outvars[0].aval.shape == x.shape
    ]
    operands = [[made_by[operand] for operand in each.invars] for each in sums]

    assert operands == [["dot_general", "dot_general"], ["dot_general", "add"]]
