"""Products of activations with kernels whose gradients are fast on CPUs or on GPUs.

Legend: I O channels of a kernel's input and output, r rank of LoRA's factors; other dimensions of an
activation do not matter here.
"""

import itertools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from vit_jax.kernels import REDUCED, Factors
from vit_jax.kernels.devices import count_devices

Kernels = tuple[Array, ...]
MANY_POSITIONS = 512
"""Positions of an image from which gradients of kernels are computed by image on CPUs."""
LARGE_INPUT = 2**19
"""Values of an input, 2 MiB in float32, from which its transpose takes long on CPUs."""
_ALIGNMENT = 8
"""XLA copies operands of cuBLAS to make their dimensions a multiple of this."""
_NUM_PARTS = 32
"""Largest number of sums over positions, on each device, in the gradient of a factor."""
_MOST_TERMS = 16
"""Largest rank for which A B is a sum of elementwise products."""


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
    """Return `_differentiate_kernel` as a sum over images, if they have many positions.

    XLA reads all positions of the second operand for every few channels of the first. Those of one
    image stay in the cache of a core.
    """
    num_positions = math.prod(x_I.shape[1:-1])
    if num_positions < MANY_POSITIONS:
        return _differentiate_kernel(x_I, gradient_O)

    positions = tuple(range(1, x_I.ndim - 1))
    products_BIO = jax.lax.dot_general(
        x_I,
        gradient_O,
        ((positions, positions), ((0,), (0,))),
        preferred_element_type=jnp.float32,
    )
    return products_BIO.sum(axis=0).astype(x_I.dtype)


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
    return tuple(_multiply_alone(x_I, kernel_IO) for kernel_IO in kernels_IO)


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

    dx_I = _add_products(products_I)

    kernel_gradients_IO = []
    for gradient_O in gradients_O:
        operands = jax.lax.optimization_barrier((x_I, gradient_O))
        kernel_gradient_IO = _differentiate_kernel(*operands)
        kernel_gradients_IO.append(kernel_gradient_IO)
    return dx_I, tuple(kernel_gradients_IO)


def _add_products(products_I: Sequence[Array]) -> Array:
    """Return the sum of products, each of which is the first operand of its addition."""
    sum_I = products_I[0]
    for product_I in products_I[1:]:
        sum_I = product_I + sum_I
    return sum_I


multiply_each_on_gpu.defvjp(_multiply_each_and_save, _differentiate_each)


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
    return list(_multiply_adapted(x_I, tuple(kernels_IO), tuple(pairs)))


@jax.custom_vjp
def _multiply_adapted(
    x_I: Array,
    kernels_IO: Kernels,
    factors: tuple[Factors, ...],
) -> tuple[Array, ...]:
    """Return x W + (x A) B for each kernel, in an order that lets cuBLAS add the branch."""
    products, _ = _multiply_adapted_and_save(x_I, kernels_IO, factors)
    return products


def _multiply_adapted_and_save(
    x_I: Array,
    kernels_IO: Kernels,
    factors: tuple[Factors, ...],
) -> tuple[tuple[Array, ...], tuple]:
    """Return the products, and the operands of the backward pass; x may have x A beside it.

    The larger one of input and output is read or written once: [x, x A] is multiplied by W above B,
    or x by [W, A]. Kernels stay apart for the backward pass: joined ones would be copies.
    """
    a_Ir = _join_first_factors(factors)
    blocks_rO = _pad_second_factors(factors, a_Ir.shape[-1])
    widths = [kernel_IO.shape[-1] for kernel_IO in kernels_IO]
    inputs = x_I.shape[-1]
    products: list[Array] = []

    if inputs < sum(widths):
        reduced_r, x_I = _join_reduced(x_I, a_Ir)
        for group in _list_groups(kernels_IO):
            kernel_IO = jnp.concatenate(kernels_IO[group], axis=-1)
            b_rO = jnp.concatenate(blocks_rO[group], axis=-1)
            product_O = _multiply_alone(x_I, jnp.concatenate([kernel_IO, b_rO]))
            products += _split(product_O, widths[group])
        return tuple(products), (x_I, kernels_IO, factors, reduced_r)

    kernel_IO = jnp.concatenate(kernels_IO, axis=-1)
    b_rO = jnp.concatenate(blocks_rO, axis=-1)
    if inputs > sum(widths):
        joined_O = x_I @ jnp.concatenate([kernel_IO, a_Ir], axis=-1)
        product_O, reduced_r = jnp.split(joined_O, [sum(widths)], axis=-1)
        reduced_r = checkpoint_name(reduced_r, REDUCED)
        # The next kernel adds it; cuBLAS would need a copy of the product.
        product_O += jax.lax.optimization_barrier(reduced_r @ b_rO)
    else:
        reduced_r = checkpoint_name(_multiply_alone(x_I, a_Ir), REDUCED)
        product_O = x_I @ kernel_IO + reduced_r @ b_rO
    products = _split(product_O, widths)
    return tuple(products), (x_I, kernels_IO, factors, reduced_r)


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


def _list_groups(kernels_IO: Kernels) -> list[slice]:
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


def _join_reduced(x_I: Array, a_Ir: Array) -> tuple[Array, Array]:
    """Return x A, and [x, x A].

    The kernel that computes x writes it with room for x A, so that x is not copied.
    """
    num_reduced = a_Ir.shape[-1]
    widths = [(0, 0)] * (x_I.ndim - 1) + [(0, num_reduced)]
    padded_I = jnp.pad(x_I, widths)
    reduced_r = _multiply_alone(padded_I, jnp.pad(a_Ir, [(0, num_reduced), (0, 0)]))
    reduced_r = checkpoint_name(reduced_r, REDUCED)
    joined_I = jax.lax.dynamic_update_slice_in_dim(padded_I, reduced_r, x_I.shape[-1], axis=-1)
    return reduced_r, joined_I


def _multiply_alone(x_I: Array, kernel_IO: Array) -> Array:
    """Return a product that XLA does not join with other products of its operands.

    Joined products are one array, whose parts are copied before cuBLAS or cuDNN can read them.
    """
    x_I, kernel_IO = jax.lax.optimization_barrier((x_I, kernel_IO))
    return x_I @ kernel_IO


def _differentiate_adapted(
    saved: tuple,
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
    groups = _list_groups(kernels_IO)
    joined_gradients_O = [jnp.concatenate(gradients_O[group], axis=-1) for group in groups]
    factors = jax.tree.map(lambda factor: factor.astype(jnp.float32), factors)
    is_square = widths == [inputs]
    if len(widths) == 1 and not is_square:
        # XLA would compute W + A B of all layers first, and keep them.
        factors, joined_gradients_O = jax.lax.optimization_barrier((factors, joined_gradients_O))
    merged_IO = [_merge(*operands) for operands in zip(kernels_IO, factors, strict=True)]
    blocks_rO = _pad_second_factors(factors, reduced_r.shape[-1])

    products_I = []
    b_parts = []
    for group, gradient_O in zip(groups, joined_gradients_O, strict=True):
        b_rO = jnp.concatenate(blocks_rO[group], axis=-1).astype(gradient_O.dtype)
        kernel_IO = jnp.concatenate(merged_IO[group], axis=-1)
        if not is_square:  # the gradient of the output is read once
            kernel_IO = jnp.concatenate([kernel_IO, b_rO])
        products_I.append(gradient_O @ kernel_IO.T)
        b_parts.append(_differentiate_factor(reduced_r, gradient_O))
    joined_I = _add_products(products_I)
    if is_square:
        gradient_r = _multiply_alone(gradient_O, b_rO.T)
    else:
        gradient_r = joined_I[..., inputs:]
    a_parts = _differentiate_factor(x_I, gradient_r)

    # Without this order XLA would keep activations of all layers for the gradients of factors. The
    # gradient of a large x is the exception: the next kernel, of the GELU, computes x again.
    if inputs > sum(widths):
        joined_I, b_parts = jax.lax.optimization_barrier((joined_I, b_parts))
        a_parts = jax.lax.optimization_barrier(a_parts)
    else:
        joined_I, a_parts, b_parts = jax.lax.optimization_barrier((joined_I, a_parts, b_parts))

    kernel_gradients_IO = []
    for gradient_O in gradients_O:
        kernel_gradients_IO.append(_differentiate_kernel(x_I, gradient_O)[:inputs])
    factor_gradients = _add_parts(a_parts[:, :inputs], b_parts, factors, x_I.dtype)
    return joined_I[..., :inputs], tuple(kernel_gradients_IO), factor_gradients


def _merge(kernel_IO: Array, factors: Factors) -> Array:
    """Return W + A B, of factors in float32.

    For small ranks it is a sum that XLA computes in the kernel that joins W and B. The time of this
    sum grows with the rank, so for large ranks cuBLAS computes A B.
    """
    a_Ir, b_rO = factors
    dtype = kernel_IO.dtype
    if len(b_rO) > _MOST_TERMS:
        return kernel_IO + _multiply_alone(a_Ir.astype(dtype), b_rO.astype(dtype))

    products_IrO = a_Ir[:, :, None] * b_rO
    merged_IO = kernel_IO.astype(jnp.float32) + products_IrO.sum(axis=1)
    return merged_IO.astype(dtype)


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


def _list_rows(factors: Sequence[Factors]) -> list[slice]:
    """Return the rows of each B among those of all."""
    rows = []
    start = 0
    for _, b_rO in factors:
        rows.append(slice(start, start + len(b_rO)))
        start += len(b_rO)
    return rows


def _differentiate_factor(x_I: Array, gradient_O: Array) -> Array:
    """Return `_differentiate_kernel` for equal parts of the positions, (parts, I, O) in float32.

    A thin result keeps few cores of a GPU busy. XLA would split the positions for them, and pads,
    that is copies, activations that have no parts of its length: 2.8 of 23.7 ms of a step (DINOv3
    B/16, rank 16, 64 images on one H100).
    """
    # XLA would join products with one x, as those of `_multiply_alone`.
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


_multiply_adapted.defvjp(_multiply_adapted_and_save, _differentiate_adapted)
