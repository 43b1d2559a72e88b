import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.models.product import multiply

TOLERANCE = 2e-6  # of the largest number: float32 sums of 15 products at most, in another order


def test_a_product_for_cpus_gives_the_same_numbers_and_gradients():
    rng = np.random.default_rng(0)
    x, kernel, weight = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((3, 5, 4), (4, 6), (3, 5, 6)))

    def results(function):
        y, pull_back = jax.vjp(function, x, kernel)
        return y, *pull_back(weight)

    for here, there in zip(results(multiply), results(jnp.matmul), strict=True):
        np.testing.assert_allclose(here, there, rtol=0, atol=TOLERANCE * float(jnp.abs(there).max()))


def test_the_gradient_of_a_kernel_begins_with_the_input():
    x, kernel = jnp.ones((3, 5, 4)), jnp.ones((4, 6))
    program = jax.make_jaxpr(jax.grad(lambda kernel: multiply(x, kernel).sum()))(kernel)
    product = [equation for equation in program.eqns if equation.primitive.name == "dot_general"][-1]
    assert [operand.aval.shape for operand in product.invars] == [(3, 5, 4), (3, 5, 6)]
