"""Products of activations with kernels whose gradients are fast on CPUs or on GPUs.

Legend: I O channels of a kernel's input and output; other dimensions of an activation do not matter
here.
"""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import Array

Kernels = tuple[Array, ...]
MANY_POSITIONS = 512
"""Positions of an image from which gradients of kernels are computed by image on CPUs."""
LARGE_INPUT = 2**19
"""Values of an input, 2 MiB in float32, from which its transpose takes long on CPUs."""


@jax.custom_vjp
def multiply_on_cpu(x_I: Array, kernel_IO: Array) -> Array:
    """Return `x_I @ kernel_IO`, whose kernel gradient is the input's transpose times a gradient.

    JAX transposes the product of the output's gradient and the input instead. XLA for CPUs (jaxlib
    0.10.2) has to transpose the first operand, and meanwhile computes all elementwise operations
    that lead to it again. The gradient of an output has many, of residuals and norms, an input few.
    The transpose of a large input takes longer than that, so there the narrower one is first.
    """
    return x_I @ kernel_IO


def _multiply_and_save(x_I: Array, kernel_IO: Array) -> tuple[Array, tuple[Array, Array]]:
    """Return the product, and its operands for the backward pass."""
    return x_I @ kernel_IO, (x_I, kernel_IO)


def _differentiate(
    saved: tuple[Array, Array],
    gradient_O: Array,
) -> tuple[Array, Array]:
    """Return the gradients of input and kernel."""
    x_I, kernel_IO = saved
    dx_I = gradient_O @ kernel_IO.T
    inputs, outputs = kernel_IO.shape
    if inputs > outputs and x_I.size >= LARGE_INPUT:
        return dx_I, _differentiate_kernel_by_image(gradient_O, x_I).T
    return dx_I, _differentiate_kernel_by_image(x_I, gradient_O)


def _differentiate_kernel_by_image(x_I: Array, gradient_O: Array) -> Array:
    """Return `differentiate_kernel` as a sum over images, if they have many positions.

    XLA reads all positions of the second operand for every few channels of the first. Those of one
    image stay in the cache of a core.
    """
    num_positions = math.prod(x_I.shape[1:-1])
    if num_positions < MANY_POSITIONS:
        return differentiate_kernel(x_I, gradient_O)

    positions = tuple(range(1, x_I.ndim - 1))
    products_BIO = jax.lax.dot_general(
        x_I,
        gradient_O,
        ((positions, positions), ((0,), (0,))),
        preferred_element_type=jnp.float32,
    )
    return products_BIO.sum(axis=0).astype(x_I.dtype)


def differentiate_kernel(x_I: Array, gradient_O: Array) -> Array:
    """Return the sum over positions of the outer product of input and gradient, (I, O)."""
    positions = tuple(range(x_I.ndim - 1))
    dimension_numbers = ((positions, positions), ((), ()))
    return jax.lax.dot_general(x_I, gradient_O, dimension_numbers)


multiply_on_cpu.defvjp(_multiply_and_save, _differentiate)


@jax.custom_vjp
def multiply_each_on_gpu(x_I: Array, kernels_IO: Kernels) -> tuple[Array, ...]:
    """Return the products of one activation with several kernels.

    The gradient of the activation adds each product to the sum of the others. XLA for GPUs lets
    cuBLAS add, if the product is the first operand of the sum. JAX makes it the second.
    """
    return tuple(multiply_alone(x_I, kernel_IO) for kernel_IO in kernels_IO)


def _multiply_each_and_save(x_I: Array, kernels_IO: Kernels) -> tuple:
    """Return the products, and their operands for the backward pass."""
    return multiply_each_on_gpu(x_I, kernels_IO), (x_I, kernels_IO)


def _differentiate_each(
    saved: tuple[Array, Kernels],
    gradients_O: tuple[Array, ...],
) -> tuple[Array, Kernels]:
    """Return the gradients of the input and of each kernel."""
    x_I, kernels_IO = saved
    products_I = []
    for gradient_O, kernel_IO in zip(gradients_O, kernels_IO, strict=True):
        products_I.append(gradient_O @ kernel_IO.T)

    dx_I = add_products(products_I)

    kernel_gradients_IO = []
    for gradient_O in gradients_O:
        operands = jax.lax.optimization_barrier((x_I, gradient_O))
        kernel_gradient_IO = differentiate_kernel(*operands)
        kernel_gradients_IO.append(kernel_gradient_IO)
    return dx_I, tuple(kernel_gradients_IO)


def add_products(products_I: Sequence[Array]) -> Array:
    """Return the sum of products, each of which is the first operand of its addition."""
    sum_I = products_I[0]
    for product_I in products_I[1:]:
        sum_I = product_I + sum_I
    return sum_I


multiply_each_on_gpu.defvjp(_multiply_each_and_save, _differentiate_each)


def multiply_alone(x_I: Array, kernel_IO: Array) -> Array:
    """Return a product that XLA does not join with other products of its operands.

    Joined products are one array, whose parts are copied before cuBLAS or cuDNN can read them.
    """
    x_I, kernel_IO = jax.lax.optimization_barrier((x_I, kernel_IO))
    return x_I @ kernel_IO
