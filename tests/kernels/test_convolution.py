"""Forms of convolutions, held to the default convolution and to their programs."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.models.small_models import FakeDevices, assert_each_close, find_equations
from vit_jax.kernels.convolution import convolve, convolve_on_cpu
from vit_jax.kernels.devices import trace_for

# Relative to the largest number: float32 sums of up to 147 products, in another order.
TOLERANCE = 2e-6


def sample_array(shape, seed):
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.normal(size=shape), jnp.float32)


@pytest.mark.parametrize(
    "size",
    [
        (8, 8),
        (7, 9),
    ],
    ids=str,
)
@pytest.mark.parametrize("padding", ["SAME", "border"])
@pytest.mark.parametrize(
    ("kernel_size", "stride"),
    [
        (1, 1),
        (1, 2),
        (3, 1),
        (3, 2),
        (7, 2),
    ],
)
def test_the_form_for_cpus_gives_the_same_numbers_and_gradients(
    kernel_size,
    stride,
    padding,
    size,
):
    if padding == "border":
        border = kernel_size // 2
        padding = 2 * [(border, border)]
    kernel_shape = (kernel_size, kernel_size, 3, 4)
    x = sample_array((2, *size, 3), seed=0)
    kernel = sample_array(kernel_shape, seed=1)

    def compute(function):
        def run(x, kernel):
            return function(
                x,
                kernel,
                stride=stride,
                padding=padding,
            )

        y, pull_back = jax.vjp(run, x, kernel)
        gradient = sample_array(y.shape, seed=2)
        return y, *pull_back(gradient)

    compute_compiled = jax.jit(compute, static_argnums=0)
    actual = compute_compiled(convolve_on_cpu)
    expected = compute(convolve)

    assert_each_close(actual, expected, TOLERANCE)


@pytest.mark.parametrize("channels", [3, 16])
@pytest.mark.parametrize(("kernel_size", "stride"), [(1, 1), (1, 2), (3, 1), (3, 2), (7, 2)])
def test_gradients_of_kernels_by_image(kernel_size, stride, channels):
    """Kernel gradients of many positions are sums over images."""
    x = sample_array((2, 46, 48, channels), seed=0)
    kernel = sample_array((kernel_size, kernel_size, channels, 4), seed=1)

    def differentiate(function):
        def run(kernel):
            return function(x, kernel, stride=stride, padding="SAME")

        y, pull_back = jax.vjp(run, kernel)
        return pull_back(sample_array(y.shape, seed=2))

    actual = differentiate(convolve_on_cpu)
    expected = differentiate(convolve)

    assert_each_close(actual, expected, 1e-5)  # sums of up to 2,208 products


def test_images_on_several_devices_are_one_convolution():
    """A loop over images would copy those of other devices."""
    x = jnp.ones((2, 32, 32, 16))
    kernel = jnp.ones((3, 3, 16, 4))

    def loss(kernel):
        return convolve_on_cpu(x, kernel, 1, "SAME").sum()

    loops = []
    for num_devices in (1, 2):
        devices = FakeDevices(platform="cpu", num_devices=num_devices)
        with trace_for(devices):
            program = jax.make_jaxpr(jax.grad(loss))(kernel)
        loops.append(find_equations(program, "scan"))

    assert len(loops[0]) == 1
    assert not loops[1]


def test_gradients_are_convolutions_in_the_order_that_is_fast_in_loops():
    x = jnp.ones((1, 4, 4, 8))
    kernels = jnp.ones((2, 3, 3, 8, 8))

    def run_layer(x, kernel):
        return convolve_on_cpu(x, kernel, 1, "SAME"), None

    def loss(x, kernels):
        y, _ = jax.lax.scan(run_layer, x, kernels)
        return y.sum()

    differentiate = jax.grad(loss, argnums=(0, 1))
    lowered = jax.jit(differentiate).lower(x, kernels)
    orders = re.findall(
        "dim_numbers = (.*?), window",
        lowered.as_text(),
    )
    fast_order = "[b, 0, 1, f]x[0, 1, i, o]->[b, 0, 1, f]"

    assert len(orders) >= 3
    assert set(orders) == {fast_order}
