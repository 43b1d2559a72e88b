"""Products x W + (x A) B of activations with kernels and LoRA's factors, for GPUs.

Each pass reads or writes the wider one of input and output once. Therefore a product has one of
three forms, for an output with more, with fewer, or with as many channels as the input. Barriers
keep XLA from joining, reordering or repeating products in ways that cost time or memory.

Legend: I O channels of a kernel's input and output, r rank of the factors; other dimensions of an
activation do not matter here.
"""

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from vit_jax.kernels import REDUCED, Factors
from vit_jax.kernels.devices import count_devices
from vit_jax.kernels.products import Kernels, add_products, differentiate_kernel, multiply_alone

_ALIGNMENT = 8
"""XLA copies operands of cuBLAS to make their dimensions a multiple of this."""
_NUM_PARTS = 32
"""Largest number of sums over positions, on each device, in the gradient of a factor."""
_MOST_TERMS = 16
"""Largest rank for which A B is a sum of elementwise products."""


class _Saved(NamedTuple):
    """Operands of the backward pass.

    Attributes:
      x_I: the activation, which has x A beside it if the output has more channels.
      kernels_IO: W of each product. They stay apart: joined ones would be copies.
      factors: A and B of each product.
      reduced_r: x A for all A.
    """

    x_I: Array
    kernels_IO: Kernels
    factors: tuple[Factors, ...]
    reduced_r: Array


def multiply_adapted_on_gpu(
    x_I: Array,
    kernels_IO: Sequence[Array],
    factors: Sequence[Factors | None],
) -> list[Array]:
    """Return the products x W + (x A) B of one activation with several kernels.

    All A are one kernel. A kernel without factors has factors of rank 0.
    """
    pairs = []
    for kernel_IO, pair in zip(kernels_IO, factors, strict=True):
        if pair is None:
            inputs, outputs = kernel_IO.shape
            pair = (jnp.zeros((inputs, 0), x_I.dtype), jnp.zeros((0, outputs), x_I.dtype))
        pairs.append(pair)
    return list(_multiply(x_I, tuple(kernels_IO), tuple(pairs)))


@jax.custom_vjp
def _multiply(
    x_I: Array,
    kernels_IO: Kernels,
    factors: tuple[Factors, ...],
) -> tuple[Array, ...]:
    """Return x W + (x A) B for each kernel, in an order that lets cuBLAS add the branch."""
    products, _ = _multiply_and_save(x_I, kernels_IO, factors)
    return products


# Forward pass.


def _multiply_and_save(
    x_I: Array,
    kernels_IO: Kernels,
    factors: tuple[Factors, ...],
) -> tuple[tuple[Array, ...], _Saved]:
    """Return the products, and the operands of the backward pass."""
    a_Ir = _join_first_factors(factors)
    blocks_rO = _pad_second_factors(factors, a_Ir.shape[-1])
    widths = [kernel_IO.shape[-1] for kernel_IO in kernels_IO]
    inputs = x_I.shape[-1]
    outputs = sum(widths)

    if inputs < outputs:
        reduced_r, x_I = _reduce_beside_input(x_I, a_Ir)
        products = _multiply_with_reduced(x_I, kernels_IO, blocks_rO)
        return tuple(products), _Saved(x_I, kernels_IO, factors, reduced_r)

    kernel_IO = jnp.concatenate(kernels_IO, axis=-1)
    b_rO = jnp.concatenate(blocks_rO, axis=-1)
    if inputs > outputs:
        product_O, reduced_r = _multiply_and_reduce(x_I, kernel_IO, a_Ir)
        # The next kernel adds it; cuBLAS would need a copy of the product.
        product_O += jax.lax.optimization_barrier(reduced_r @ b_rO)
    else:
        reduced_r = checkpoint_name(multiply_alone(x_I, a_Ir), REDUCED)
        product_O = x_I @ kernel_IO + reduced_r @ b_rO
    products = _split(product_O, widths)
    return tuple(products), _Saved(x_I, kernels_IO, factors, reduced_r)


def _reduce_beside_input(x_I: Array, a_Ir: Array) -> tuple[Array, Array]:
    """Return x A, and [x, x A].

    The kernel that computes x writes it with room for x A, so that x is not copied.
    """
    num_reduced = a_Ir.shape[-1]
    widths = [(0, 0)] * (x_I.ndim - 1) + [(0, num_reduced)]
    padded_I = jnp.pad(x_I, widths)
    reduced_r = multiply_alone(padded_I, jnp.pad(a_Ir, [(0, num_reduced), (0, 0)]))
    reduced_r = checkpoint_name(reduced_r, REDUCED)
    joined_I = jax.lax.dynamic_update_slice_in_dim(padded_I, reduced_r, x_I.shape[-1], axis=-1)
    return reduced_r, joined_I


def _multiply_with_reduced(
    joined_I: Array,
    kernels_IO: Kernels,
    blocks_rO: Sequence[Array],
) -> list[Array]:
    """Return [x, x A] times W above B for each kernel."""
    products: list[Array] = []
    for group in _list_groups(kernels_IO):
        kernel_IO = jnp.concatenate(kernels_IO[group], axis=-1)
        b_rO = jnp.concatenate(blocks_rO[group], axis=-1)
        product_O = multiply_alone(joined_I, jnp.concatenate([kernel_IO, b_rO]))
        widths = [block_rO.shape[-1] for block_rO in blocks_rO[group]]
        products += _split(product_O, widths)
    return products


def _multiply_and_reduce(x_I: Array, kernel_IO: Array, a_Ir: Array) -> tuple[Array, Array]:
    """Return x W and x A, which are one product x [W, A]."""
    outputs = kernel_IO.shape[-1]
    joined_O = x_I @ jnp.concatenate([kernel_IO, a_Ir], axis=-1)
    product_O, reduced_r = jnp.split(joined_O, [outputs], axis=-1)
    return product_O, checkpoint_name(reduced_r, REDUCED)


# Backward pass.


def _differentiate(
    saved: _Saved,
    gradients_O: tuple[Array, ...],
) -> tuple[Array, Kernels, tuple[Factors, ...]]:
    """Return the gradients of input, kernels and factors.

    That of the input reads W + A B, which costs less than a branch as large as the input. Rounding
    W + A B may lose small updates, which is no worse than rounding the gradient; the output of a
    layer needs the branch. XLA removes the gradient of a frozen kernel, which nothing uses.
    """
    x_I, kernels_IO, factors, reduced_r = saved
    inputs = len(kernels_IO[0])
    widths = [gradient_O.shape[-1] for gradient_O in gradients_O]
    outputs = sum(widths)
    is_square = widths == [inputs]

    groups = _list_groups(kernels_IO)
    joined_gradients_O = [jnp.concatenate(gradients_O[group], axis=-1) for group in groups]
    factors = jax.tree.map(lambda factor: factor.astype(jnp.float32), factors)
    if len(widths) == 1 and not is_square:
        # XLA would compute W + A B of all layers first, and keep them.
        factors, joined_gradients_O = jax.lax.optimization_barrier((factors, joined_gradients_O))
    merged_IO = [_merge(*operands) for operands in zip(kernels_IO, factors, strict=True)]
    blocks_rO = _pad_second_factors(factors, reduced_r.shape[-1])

    if is_square:
        (gradient_O,) = joined_gradients_O
        b_rO = blocks_rO[0].astype(gradient_O.dtype)
        joined_I = gradient_O @ merged_IO[0].T
        b_parts = [_differentiate_factor(reduced_r, gradient_O)]
        gradient_r = multiply_alone(gradient_O, b_rO.T)
    else:
        joined_I, b_parts = _differentiate_joined(
            joined_gradients_O,
            merged_IO,
            blocks_rO,
            reduced_r,
        )
        gradient_r = joined_I[..., inputs:]
    a_parts = _differentiate_factor(x_I, gradient_r)

    # Without this order XLA would keep activations of all layers for the gradients of factors. The
    # gradient of a large x is the exception: the next kernel, of the GELU, computes x again.
    if inputs > outputs:
        joined_I, b_parts = jax.lax.optimization_barrier((joined_I, b_parts))
        a_parts = jax.lax.optimization_barrier(a_parts)
    else:
        joined_I, a_parts, b_parts = jax.lax.optimization_barrier((joined_I, a_parts, b_parts))

    kernel_gradients_IO = []
    for gradient_O in gradients_O:
        kernel_gradients_IO.append(differentiate_kernel(x_I, gradient_O)[:inputs])
    factor_gradients = _add_parts(a_parts[:, :inputs], b_parts, factors, x_I.dtype)
    return joined_I[..., :inputs], tuple(kernel_gradients_IO), factor_gradients


def _differentiate_joined(
    gradients_O: Sequence[Array],
    merged_IO: Sequence[Array],
    blocks_rO: Sequence[Array],
    reduced_r: Array,
) -> tuple[Array, list[Array]]:
    """Return the gradients of x and of x A side by side, and parts of those of each B.

    The gradient of each group's output is read once, for x and for x A.
    """
    products_I = []
    b_parts = []
    groups = _list_groups(merged_IO)
    for group, gradient_O in zip(groups, gradients_O, strict=True):
        b_rO = jnp.concatenate(blocks_rO[group], axis=-1).astype(gradient_O.dtype)
        kernel_IO = jnp.concatenate(merged_IO[group], axis=-1)
        joined_IO = jnp.concatenate([kernel_IO, b_rO])
        products_I.append(gradient_O @ joined_IO.T)
        b_parts.append(_differentiate_factor(reduced_r, gradient_O))
    return add_products(products_I), b_parts


def _merge(kernel_IO: Array, factors: Factors) -> Array:
    """Return W + A B, of factors in float32.

    For small ranks it is a sum that XLA computes in the kernel that joins W and B. The time of this
    sum grows with the rank, so for large ranks cuBLAS computes A B.
    """
    a_Ir, b_rO = factors
    dtype = kernel_IO.dtype
    if len(b_rO) > _MOST_TERMS:
        return kernel_IO + multiply_alone(a_Ir.astype(dtype), b_rO.astype(dtype))

    products_IrO = a_Ir[:, :, None] * b_rO
    merged_IO = kernel_IO.astype(jnp.float32) + products_IrO.sum(axis=1)
    return merged_IO.astype(dtype)


def _differentiate_factor(x_I: Array, gradient_O: Array) -> Array:
    """Return `differentiate_kernel` for equal parts of the positions, (parts, I, O) in float32.

    A thin result keeps few cores of a GPU busy. XLA would split the positions for them, and pads,
    that is copies, activations that have no parts of its length: 2.8 of 23.7 ms of a step (DINOv3
    B/16, rank 16, 64 images on one H100).
    """
    # XLA would join products with one x, as those of `multiply_alone`.
    x_I, gradient_O = jax.lax.optimization_barrier((x_I, gradient_O))
    num_positions = math.prod(x_I.shape[:-1])
    num_devices = count_devices()
    num_parts = 1
    if num_positions % (num_devices * _ALIGNMENT) == 0:
        num_lines = num_positions // (num_devices * _ALIGNMENT)
        num_parts = num_devices * math.gcd(num_lines, _NUM_PARTS)

    parts_of_x = x_I.reshape(num_parts, -1, x_I.shape[-1])
    parts_of_gradient = gradient_O.reshape(num_parts, -1, gradient_O.shape[-1])
    return jax.lax.dot_general(
        parts_of_x,
        parts_of_gradient,
        (((1,), (1,)), ((0,), (0,))),
        preferred_element_type=jnp.float32,
    )


def _add_parts(
    a_parts: Array,
    b_parts: Sequence[Array],
    factors: Sequence[Factors],
    dtype: jnp.dtype,
) -> tuple[Factors, ...]:
    """Return the gradients of each A and B from sums over parts of the positions.

    Those of A are side by side; those of each B have gradients of zeros above and below.
    """
    a_gradient_Ir = a_parts.sum(axis=0).astype(dtype)
    b_gradients_rO = [parts.sum(axis=0).astype(dtype) for parts in b_parts]
    b_gradient_rO = jnp.concatenate(b_gradients_rO, axis=-1)
    blocks_rO = _split(b_gradient_rO, [b_rO.shape[-1] for _, b_rO in factors])

    gradients = []
    for block_rO, rows in zip(blocks_rO, _list_rows(factors), strict=True):
        gradients.append((a_gradient_Ir[:, rows], block_rO[rows]))
    return tuple(gradients)


_multiply.defvjp(_multiply_and_save, _differentiate)


# Factors of several kernels.


def _join_first_factors(factors: Sequence[Factors]) -> Array:
    """Return all A side by side, with zeros that make the rank a multiple of `_ALIGNMENT`."""
    firsts_Ir = [a_Ir for a_Ir, _ in factors]
    a_Ir = jnp.concatenate(firsts_Ir, axis=-1)
    padding = -a_Ir.shape[-1] % _ALIGNMENT
    return jnp.pad(a_Ir, ((0, 0), (0, padding)))


def _pad_second_factors(factors: Sequence[Factors], rank: int) -> list[Array]:
    """Return each B with zeros above and below, at the rows of the other factors of this rank.

    Of thin products the traffic counts, not the zeros.
    """
    blocks_rO = []
    for (_, b_rO), rows in zip(factors, _list_rows(factors), strict=True):
        blocks_rO.append(jnp.pad(b_rO, ((rows.start, rank - rows.stop), (0, 0))))
    return blocks_rO


def _list_rows(factors: Sequence[Factors]) -> list[slice]:
    """Return the rows of each B among those of all."""
    rows = []
    start = 0
    for _, b_rO in factors:
        rows.append(slice(start, start + len(b_rO)))
        start += len(b_rO)
    return rows


def _list_groups(kernels_IO: Sequence[Array]) -> list[slice]:
    """Return the kernels that are side by side in one product: all but the last of several.

    Of queries, keys and values, rotary positions turn the first two in one kernel. cuDNN reads
    values as the product writes them, which need no other kernel.
    """
    last = len(kernels_IO) - 1
    if last == 0:
        return [slice(0, 1)]
    return [slice(0, last), slice(last, last + 1)]


def _split(array: Array, widths: Sequence[int]) -> list[Array]:
    """Return the parts of an array, of these widths on the last axis."""
    ends = list(itertools.accumulate(widths))
    return jnp.split(array, ends[:-1], axis=-1)
