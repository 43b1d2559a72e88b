"""Vectors beside the rows of a matrix on GPUs, whose gradients are sums over all rows.

Legend: D width of a row.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import Array

from vit_jax.kernels.devices import count_devices

_NUM_PARTS = 8
"""Largest number of sums on each device. XLA does not join the sum of 16 with an update."""


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def repeat_rows_on_gpu(vector_D: Array, shape: tuple[int, ...]) -> Array:
    """Return the vector in each row of an array of this shape, (..., D), which XLA does not store.

    XLA for GPUs adds up a gradient by two kernels, of which the second takes the time of its
    launch. From sums over parts of the rows the kernel of the update computes it for all layers.
    """
    return jnp.broadcast_to(vector_D.reshape(1, -1), shape)


def _repeat_and_save(vector_D: Array, shape: tuple[int, ...]) -> tuple[Array, None]:
    """Return the array; the backward pass needs no values."""
    return repeat_rows_on_gpu(vector_D, shape), None


def _sum_rows(shape: tuple[int, ...], saved: None, gradient: Array) -> tuple[Array]:
    """Return the sum over all rows, from sums over equal parts of them."""
    del saved
    num_rows = math.prod(shape[:-1])
    num_devices = count_devices()
    num_parts = 1
    if num_rows % num_devices == 0:
        num_parts = num_devices * math.gcd(num_rows // num_devices, _NUM_PARTS)

    parts = gradient.reshape(num_parts, -1, shape[-1])
    sums = parts.sum(axis=1, dtype=jnp.float32)
    sums = jax.lax.optimization_barrier(sums)
    return (sums.sum(axis=0).astype(gradient.dtype),)


repeat_rows_on_gpu.defvjp(_repeat_and_save, _sum_rows)
