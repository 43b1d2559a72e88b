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

    dx_I = products_I[0]
    for product_I in products_I[1:]:
        dx_I = product_I + dx_I

    kernel_gradients_IO = []
    for gradient_O in gradients_O:
        operands = jax.lax.optimization_barrier((x_I, gradient_O))
        kernel_gradient_IO = _differentiate_kernel(*operands)
        kernel_gradients_IO.append(kernel_gradient_IO)
    return dx_I, tuple(kernel_gradients_IO)


multiply_each_on_gpu.defvjp(_multiply_each_and_save, _differentiate_each)


def multiply_adapted_on_gpu(
    x_I: Array,
    kernels_IO: Sequence[Array],
    factors: Sequence[Factors | None],
) -> list[Array]:
    """Return the products x W + (x A) B of one activation with several kernels.

    They are one product with all kernels side by side, and a branch with all factors: B has the
    factors as blocks on its diagonal, and zeros elsewhere. Of thin products the traffic counts, not
    the zeros. More zeros make the rank a multiple of `_ALIGNMENT`.
    """
    firsts_Ir = [pair[0] for pair in factors if pair is not None]
    ranks = [a_Ir.shape[-1] for a_Ir in firsts_Ir]
    widths = [kernel_IO.shape[-1] for kernel_IO in kernels_IO]
    padding = -sum(ranks) % _ALIGNMENT
    if padding:
        firsts_Ir.append(jnp.zeros((x_I.shape[-1], padding), x_I.dtype))
        ranks.append(padding)

    blocks_rO = []
    start = 0
    for pair, width in zip(factors, widths, strict=True):
        if pair is None:
            blocks_rO.append(jnp.zeros((sum(ranks), width), x_I.dtype))
            continue
        _, b_rO = pair
        end = start + len(b_rO)
        rows = (start, sum(ranks) - end)
        blocks_rO.append(jnp.pad(b_rO, (rows, (0, 0))))
        start = end

    product_O = _multiply_adapted(
        x_I,
        jnp.concatenate(kernels_IO, axis=-1),
        jnp.concatenate(firsts_Ir, axis=-1),
        jnp.concatenate(blocks_rO, axis=-1),
    )
    ends = list(itertools.accumulate(widths))
    return jnp.split(product_O, ends[:-1], axis=-1)


@jax.custom_vjp
def _multiply_adapted(
    x_I: Array,
    kernel_IO: Array,
    a_Ir: Array,
    b_rO: Array,
) -> Array:
    """Return x W + (x A) B, in an order that lets cuBLAS add the branch to the product."""
    product_O, _ = _multiply_adapted_and_save(x_I, kernel_IO, a_Ir, b_rO)
    return product_O


def _multiply_adapted_and_save(
    x_I: Array,
    kernel_IO: Array,
    a_Ir: Array,
    b_rO: Array,
) -> tuple[Array, tuple[Array, ...]]:
    """Return the product, and the operands of the backward pass; x may have x A beside it.

    The larger one of input and output is read or written once: [x, x A] is multiplied by W above B,
    or x by [W, A].
    """
    inputs, outputs = kernel_IO.shape
    if inputs > outputs:
        joined_O = x_I @ jnp.concatenate([kernel_IO, a_Ir], axis=-1)
        product_O, reduced_r = jnp.split(joined_O, [outputs], axis=-1)
        reduced_r = checkpoint_name(reduced_r, REDUCED)
        # The next kernel adds it; cuBLAS would need a copy of the product.
        product_O += jax.lax.optimization_barrier(reduced_r @ b_rO)
    elif inputs < outputs:
        reduced_r, x_I = _join_reduced(x_I, a_Ir)
        product_O = x_I @ jnp.concatenate([kernel_IO, b_rO])
    else:
        reduced_r = checkpoint_name(_multiply_alone(x_I, a_Ir), REDUCED)
        product_O = x_I @ kernel_IO + reduced_r @ b_rO
    return product_O, (x_I, kernel_IO, a_Ir, b_rO, reduced_r)


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
    saved: tuple[Array, ...],
    gradient_O: Array,
) -> tuple[Array, ...]:
    """Return the gradients of input, kernel and factors.

    That of the input reads W + A B, which costs less than a branch as large as the input. Rounding
    W + A B may lose small updates, which is no worse than rounding the gradient; the output of a
    layer needs the branch. XLA removes the gradient of a frozen kernel, which nothing uses.
    """
    x_I, kernel_IO, a_Ir, b_rO, reduced_r = saved
    merged_IO = _multiply_alone(a_Ir, b_rO) + kernel_IO
    inputs, outputs = kernel_IO.shape
    if inputs < outputs:  # the gradient of the output is read once
        joined_IO = jnp.concatenate([merged_IO, b_rO])
        joined_I = gradient_O @ joined_IO.T
        dx_I, gradient_r = jnp.split(joined_I, [inputs], axis=-1)
    else:
        gradient_r = _multiply_alone(gradient_O, b_rO.T)
        dx_I = gradient_O @ merged_IO.T
    return (
        dx_I,
        _differentiate_kernel(x_I, gradient_O)[:inputs],  # without the rows of x A
        _differentiate_factor(x_I, gradient_r)[:inputs],
        _differentiate_factor(reduced_r, gradient_O),
    )


def _differentiate_factor(x_I: Array, gradient_O: Array) -> Array:
    """Return `_differentiate_kernel` as a sum over equal parts of the positions.

    A thin result keeps few cores of a GPU busy. XLA would split the positions for them, and pads,
    that is copies, activations that have no parts of its length: 2.8 of 23.7 ms of a step (DINOv3
    B/16, rank 16, 64 images on one H100).
    """
    num_positions = math.prod(x_I.shape[:-1])
    num_devices = count_devices()
    if num_positions % (num_devices * _ALIGNMENT):
        return _differentiate_kernel(x_I, gradient_O)

    num_lines = num_positions // (num_devices * _ALIGNMENT)
    num_parts = num_devices * math.gcd(num_lines, _NUM_PARTS)
    parts_of_x = x_I.reshape(num_parts, -1, x_I.shape[-1])
    parts_of_gradient = gradient_O.reshape(num_parts, -1, gradient_O.shape[-1])
    products = jax.lax.dot_general(
        parts_of_x,
        parts_of_gradient,
        (((1,), (1,)), ((0,), (0,))),
        preferred_element_type=jnp.float32,
    )
    products = jax.lax.optimization_barrier(products)  # else XLA contracts all positions at once
    return products.sum(axis=0).astype(x_I.dtype)


_multiply_adapted.defvjp(_multiply_adapted_and_save, _differentiate_adapted)
