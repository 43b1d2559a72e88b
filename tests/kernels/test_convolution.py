import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vit_jax.kernels.convolution import convolve, convolve_on_cpu

TOLERANCE = 2e-6  # of the largest number: float32 sums of up to 147 products, in another order


@pytest.mark.parametrize("size", [(8, 8), (7, 9)], ids=str)
@pytest.mark.parametrize("padding", ["SAME", "border"])
@pytest.mark.parametrize(("kernel_size", "stride"), [(1, 1), (1, 2), (3, 1), (3, 2), (7, 2)])
def test_the_form_for_cpus_gives_the_same_numbers_and_gradients(kernel_size, stride, padding, size):
    border = ((kernel_size // 2,) * 2,) * 2
    rng = np.random.default_rng(0)
    shapes = ((2, *size, 3), (kernel_size, kernel_size, 3, 4))
    x, kernel = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes)

    def results(function):
        options = {"stride": stride, "padding": border if padding == "border" else padding}
        y, pull_back = jax.vjp(lambda x, kernel: function(x, kernel, **options), x, kernel)

        return y, *pull_back(
            jnp.asarray(np.random.default_rng(1).normal(size=y.shape), jnp.float32)
        )

    for here, there in zip(
        jax.jit(results, static_argnums=0)(convolve_on_cpu),
        results(convolve),
        strict=True,
    ):
        np.testing.assert_allclose(
            here,
            there,
            rtol=0,
            atol=TOLERANCE * float(jnp.abs(there).max()),
        )


def test_gradients_are_convolutions_in_the_order_that_is_fast_in_loops():
    x = jnp.ones((1, 4, 4, 8))
    kernels = jnp.ones((2, 3, 3, 8, 8))

    def loss(x, kernels):
        return jax.lax.scan(lambda x, k: (convolve_on_cpu(x, k, 1, "SAME"), None), x, kernels)[
            0
        ].sum()

    text = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(x, kernels).as_text()
    orders = re.findall("dim_numbers = (.*?), window", text)

    assert len(orders) >= 3
    assert set(orders) == {"[b, 0, 1, f]x[0, 1, i, o]->[b, 0, 1, f]"}
