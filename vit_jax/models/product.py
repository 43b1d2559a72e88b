"""Products of activations with a kernel, and the same with gradients in the order that XLA for CPUs is fast in.

Legend: I O channels of a kernel's input and output; other dimensions of an activation do not matter here.
"""

from typing import Any

import jax

from vit_jax.activations import platform


def multiply(x_I: jax.Array, kernel_IO: jax.Array) -> jax.Array:
    """Returns `x_I @ kernel_IO` (..., O)."""
    return _multiply_on_cpu(x_I, kernel_IO) if platform() == "cpu" else x_I @ kernel_IO


def dot_general(x_I: jax.Array, kernel_IO: jax.Array, dimension_numbers: Any, **options: Any) -> jax.Array:
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
