"""Products of activations with a kernel, and the same with gradients in the order that XLA for CPUs is fast in.

Legend: I O channels of a kernel's input and output; other dimensions of an activation do not matter here.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax

from vit_jax.kernels.devices import platform


def multiply(x_I: jax.Array, kernel_IO: jax.Array) -> jax.Array:
    """Return `x_I @ kernel_IO` (..., O)."""
    return _multiply_on_cpu(x_I, kernel_IO) if platform() == "cpu" else x_I @ kernel_IO


def multiply_each(x_I: jax.Array, kernels_IO: Sequence[jax.Array]) -> list[jax.Array]:
    """Return the products of one activation with several kernels."""
    if platform() == "gpu":
        return list(_multiply_each_on_gpu(x_I, tuple(kernels_IO)))
    return [multiply(x_I, kernel_IO) for kernel_IO in kernels_IO]


def dot_general(
    x_I: jax.Array, kernel_IO: jax.Array, dimension_numbers: Any, **options: Any
) -> jax.Array:
    """`multiply`, as `nnx.Linear` calls it: over the last dimension of an activation and the first of a kernel."""
    assert dimension_numbers == (((x_I.ndim - 1,), (0,)), ((), ())), dimension_numbers
    assert all(option is None for option in options.values()), options
    return multiply(x_I, kernel_IO)


@jax.custom_vjp
def _multiply_on_cpu(x_I: jax.Array, kernel_IO: jax.Array) -> jax.Array:
    """The gradient of the kernel is the input's transpose times that of the output.

    JAX transposes the product of the output's gradient and the input instead. XLA for CPUs (jaxlib 0.10.2) has to
    transpose the first operand, and computes all elementwise operations that lead to it again while it does. They
    are many for the gradient of an output, through residuals and norms, and few for an input.
    """
    return x_I @ kernel_IO


def _forward(x_I: jax.Array, kernel_IO: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return x_I @ kernel_IO, (x_I, kernel_IO)


def _backward(inputs: tuple[jax.Array, jax.Array], y_O: jax.Array) -> tuple[jax.Array, jax.Array]:
    x_I, kernel_IO = inputs
    batch = tuple(range(x_I.ndim - 1))
    return y_O @ kernel_IO.T, jax.lax.dot_general(x_I, y_O, ((batch, batch), ((), ())))


_multiply_on_cpu.defvjp(_forward, _backward)


@jax.custom_vjp
def _multiply_each_on_gpu(
    x_I: jax.Array, kernels_IO: tuple[jax.Array, ...]
) -> tuple[jax.Array, ...]:
    """The gradient of the activation adds each product to the sum of the others.

    XLA for GPUs lets cuBLAS add, if the product is the first operand of the sum. JAX makes it the second.
    """
    return tuple(x_I @ kernel_IO for kernel_IO in kernels_IO)


def _forward_each(x_I: jax.Array, kernels_IO: tuple[jax.Array, ...]) -> tuple:
    return _multiply_each_on_gpu(x_I, kernels_IO), (x_I, kernels_IO)


def _backward_each(inputs: tuple, gradients_O: tuple[jax.Array, ...]) -> tuple:
    x_I, kernels_IO = inputs
    batch = tuple(range(x_I.ndim - 1))
    products = [y_O @ kernel_IO.T for y_O, kernel_IO in zip(gradients_O, kernels_IO, strict=True)]
    total_I = functools.reduce(lambda total_I, product_I: product_I + total_I, products)
    return total_I, tuple(
        jax.lax.dot_general(x_I, y_O, ((batch, batch), ((), ()))) for y_O in gradients_O
    )


_multiply_each_on_gpu.defvjp(_forward_each, _backward_each)
