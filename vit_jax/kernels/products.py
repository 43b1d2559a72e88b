"""Products of activations with kernels whose gradients are fast on CPUs or on GPUs.

Legend: I O channels of a kernel's input and output; other dimensions of an activation do not matter
here.
"""

import jax
from jax import Array

Kernels = tuple[Array, ...]


@jax.custom_vjp
def multiply_on_cpu(x_I: Array, kernel_IO: Array) -> Array:
    """Return `x_I @ kernel_IO`, whose kernel gradient is the input's transpose times a gradient.

    JAX transposes the product of the output's gradient and the input instead. XLA for CPUs (jaxlib
    0.10.2) has to transpose the first operand, and meanwhile computes all elementwise operations
    that lead to it again. The gradient of an output has many, of residuals and norms, an input few.
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
    return dx_I, _differentiate_kernel(x_I, gradient_O)


def _differentiate_kernel(x_I: Array, gradient_O: Array) -> Array:
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
    return tuple(x_I @ kernel_IO for kernel_IO in kernels_IO)


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

    dx_I = products_I[0]
    for product_I in products_I[1:]:
        dx_I = product_I + dx_I

    kernel_gradients_IO = []
    for gradient_O in gradients_O:
        kernel_gradient_IO = _differentiate_kernel(x_I, gradient_O)
        kernel_gradients_IO.append(kernel_gradient_IO)
    return dx_I, tuple(kernel_gradients_IO)


multiply_each_on_gpu.defvjp(_multiply_each_and_save, _differentiate_each)
