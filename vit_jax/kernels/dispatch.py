"""Choice of the form that a computation has on the devices that a program is traced for.

The reference of a computation is plain JAX, which XLA compiles for every device. Where another form
is faster, a function here takes it instead, from a module that is imported when a program uses it.
Nothing else in the package asks for the platform.

Legend: B batch, S sequence length, D width, T heads, h head dimension, E = T h, H W height and
width of a map, I O channels of a kernel's input and output; other dimensions of an activation do
not matter in a product.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from vit_jax.kernels import REDUCED, Factors
from vit_jax.kernels.devices import count_devices, has_target_devices, platform

if TYPE_CHECKING:
    from vit_jax.kernels.unit_parameters import UnitParameters

A = TypeVar("A")
Padding = str | tuple[tuple[int, int], ...]
"""SAME, or the number of zeros before and after the lines, and the columns."""
WIDEST_TURNED = 2048
"""Largest width of which products turn the pairs of rotary positions."""


# Products and activations.


def multiply(x_I: Array, kernel_IO: Array) -> Array:
    """Return `x_I @ kernel_IO` (..., O)."""
    if platform() == "cpu":
        from vit_jax.kernels.products import multiply_on_cpu

        return multiply_on_cpu(x_I, kernel_IO)
    return x_I @ kernel_IO


def multiply_each(x_I: Array, kernels_IO: Sequence[Array]) -> list[Array]:
    """Return the products of one activation with several kernels."""
    if platform() == "gpu":
        from vit_jax.kernels.products import multiply_each_on_gpu

        return list(multiply_each_on_gpu(x_I, tuple(kernels_IO)))
    return [multiply(x_I, kernel_IO) for kernel_IO in kernels_IO]


def multiply_adapted(
    x_I: Array,
    kernels_IO: Sequence[Array],
    factors: Sequence[Factors | None],
) -> list[Array]:
    """Return the products x W + (x A) B of one activation with several kernels.

    All A are one kernel.

    Args:
      x_I: the activation.
      kernels_IO: W of each product.
      factors: A and B of each product; None for a kernel without factors.
    """
    if platform() == "gpu":
        from vit_jax.kernels.adapted_products import multiply_adapted_on_gpu

        return multiply_adapted_on_gpu(x_I, kernels_IO, factors)

    firsts_Ir = [pair[0] for pair in factors if pair is not None]
    reduced_r = multiply(x_I, jnp.concatenate(firsts_Ir, axis=-1))
    reduced_r = checkpoint_name(reduced_r, REDUCED)
    products = []
    start = 0
    for product_O, pair in zip(multiply_each(x_I, kernels_IO), factors, strict=True):
        if pair is not None:
            _, b_rO = pair
            end = start + len(b_rO)
            product_O = product_O + multiply(reduced_r[..., start:end], b_rO)
            start = end
        products.append(product_O)
    return products


def repeat_rows(vector_D: Array, shape: tuple[int, ...]) -> Array:
    """Return a vector that broadcasts against the rows of an array of this shape.

    On GPUs it has that shape, and its gradient is a sum in two stages.
    """
    if platform() == "gpu":
        from vit_jax.kernels.row_sums import repeat_rows_on_gpu

        return repeat_rows_on_gpu(vector_D, shape)
    return vector_D


def dot_general(x_I: Array, kernel_IO: Array, dimension_numbers: Any, **options: Any) -> Array:
    """Return `multiply`, as `nnx.Linear` calls it: over the dimension I."""
    assert dimension_numbers == (((x_I.ndim - 1,), (0,)), ((), ())), dimension_numbers
    assert all(option is None for option in options.values()), options
    return multiply(x_I, kernel_IO)


def gelu(x: Array, approximate: bool, is_recomputed: bool = False) -> Array:
    """Return the GELU, which the backward pass computes again if it `is_recomputed`.

    On TPUs JAX's exact form, whose erfc evaluates two functions for each value, takes 5 % of a
    fine-tuning step of B/16 longer.
    """
    is_exact_on_tpu = platform() == "tpu" and not approximate
    if platform() == "gpu" or is_exact_on_tpu:
        from vit_jax.kernels.gelu import gelu_of_kept_input

        return gelu_of_kept_input(x, approximate, is_recomputed)
    return jax.nn.gelu(x, approximate)


def recompute(
    function: Callable[..., Array],
    policy: Callable[..., bool],
    is_nested: bool,
) -> Callable[..., Array]:
    """Return a function of activations, whose backward pass computes again what `policy` drops.

    On GPUs the barrier before that has the activations alone, since it would copy the kernels of
    layers. JAX 0.10.2 rejects this inside of another recomputation (`is_nested`).
    """
    if platform() != "gpu" or is_nested:
        return jax.checkpoint(function, policy=policy)

    def run(*activations: Array | None) -> Array:
        barriers = (True,) * len(activations)
        return jax.checkpoint(function, policy=policy, prevent_cse=barriers)(*activations)

    return run


def convolve(
    x_BHWI: Array,
    kernel_HWIO: Array,
    stride: int,
    padding: Padding,
) -> Array:
    """Return the convolution (B, H / stride, W / stride, O), rounded up if the padding is SAME."""
    from vit_jax.kernels import convolution

    if platform() == "cpu":
        return convolution.convolve_on_cpu(x_BHWI, kernel_HWIO, stride, padding)
    return convolution.convolve(x_BHWI, kernel_HWIO, stride, padding)


def max_pool(x_BHWC: Array, padding: Padding) -> Array:
    """Return the maxima of windows of 3x3, two apart, (B, H / 2, W / 2, C), rounded up."""
    from vit_jax.kernels import pooling

    if platform() == "cpu":
        return pooling.max_pool_on_cpu(x_BHWC, padding)
    return pooling.max_pool(x_BHWC, padding)


def choose_group_norm(dtype: jnp.dtype) -> Callable[..., Array] | None:
    """Return a faster form of the group norm of maps with this dtype, or None.

    It is called with a map, scale, bias and epsilon.
    """
    if platform() != "cpu" or dtype != jnp.float32:
        return None
    from vit_jax.kernels.group_norm import normalize_on_cpu

    return normalize_on_cpu


# Updates.


def stop_fusion(arrays: A) -> A:
    """Return a tree of arrays whose use XLA does not fuse with their computation on GPUs.

    A kernel that updates parameters and also adds up their squares cannot write them in the place
    of the earlier ones. XLA for GPUs then copies parameters and moments in each step.
    """
    if platform() == "gpu":
        return jax.lax.optimization_barrier(arrays)
    return arrays


# Attention.


def choose_attention(
    form: str,
    *,
    length: int,
    num_heads: int,
    head_dim: int,
    dtype: jnp.dtype,
) -> str:
    """Return the form of self-attention, "xla", "pallas" or "cudnn", that a config's `form` means.

    "auto" takes a kernel that keeps scores on the chip where there is one: Pallas on TPUs in
    bfloat16, cuDNN on GPUs. Outside of `trace_for` the program may run on any device, so "auto" is
    "xla" there.

    Raises:
      ValueError: the form is "cudnn", and cuDNN does not compute this attention.
    """
    if form == "cudnn":
        problem = _find_cudnn_problem(head_dim, dtype)
        if problem is not None:
            rule = f"cuDNN rejects this attention: {problem}"
            raise ValueError(f"config.model.attention='cudnn': {rule}. Use auto or xla.")
    if form != "auto":
        return form
    if not has_target_devices():
        return "xla"

    if platform() == "tpu" and dtype == jnp.bfloat16:
        from vit_jax.kernels.attention_pallas import count_heads_per_program

        if count_heads_per_program(num_heads, head_dim, length) is not None:
            return "pallas"
    if platform() == "gpu" and _find_cudnn_problem(head_dim, dtype) is None:
        return "cudnn"
    return "xla"


def _find_cudnn_problem(head_dim: int, dtype: jnp.dtype) -> str | None:
    """Return why cuDNN cannot compute attention with these sizes, or None."""
    from vit_jax.kernels.attention_cudnn import find_problem

    return find_problem(head_dim, dtype)


def compute_attention(
    form: str,
    query_BSE: Array,
    key_BSE: Array,
    value_BSE: Array,
    biases_E: Sequence[Array],
    num_heads: int,
) -> Array:
    """Return softmax(q k^T / sqrt(h)) v of every head, (B, S, E), by the kernel of a form.

    Args:
      form: "pallas", which is interpreted off TPUs, or "cudnn".
      query_BSE: the projection without bias; each head has h adjacent channels of E.
      key_BSE: the same of keys.
      value_BSE: the same of values.
      biases_E: biases of queries, keys and values.
      num_heads: T.
    """
    if form == "pallas":
        from vit_jax.kernels import attention_pallas

        head_dim = query_BSE.shape[-1] // num_heads
        is_interpreted = platform() != "tpu"
        return attention_pallas.attention(
            query_BSE,
            key_BSE,
            value_BSE,
            jnp.stack(biases_E),
            head_dim,
            is_interpreted,
        )

    from vit_jax.kernels import attention_cudnn

    assert form == "cudnn", form
    projections = (query_BSE, key_BSE, value_BSE)
    operands = [x_BSE + bias_E for x_BSE, bias_E in zip(projections, biases_E, strict=True)]
    query_BSE, key_BSE, value_BSE = operands
    return attention_cudnn.attention(query_BSE, key_BSE, value_BSE, num_heads)


# Residual units of a ResNet.


def has_unit_kernel(
    shape_HWI: tuple[int, ...],
    inner: int,
    outputs: int,
    stride: int,
    dtype: jnp.dtype,
) -> bool:
    """Return whether a kernel computes a residual unit faster than XLA on these devices.

    Args:
      shape_HWI: shape of the input of one image.
      inner: channels between the convolutions.
      outputs: channels of the output.
      stride: stride of the 3x3 convolution.
      dtype: dtype of the maps.
    """
    if platform() != "tpu":
        return False

    from vit_jax.kernels.unit_pallas import can_compute

    return can_compute(shape_HWI, inner, outputs, stride, dtype)


def compute_unit(
    x_BHWI: Array,
    parameters: "UnitParameters",
    *,
    stride: int,
    first_offset: int,
    epsilon: float,
    is_preactivated: bool,
) -> Array:
    """Return the output (B, H / s, W / s, O) of a residual unit by the kernel for TPUs.

    Elsewhere the kernel is interpreted.

    Args:
      x_BHWI: maps; for a stride s of 2, with even lines and columns.
      parameters: parameters of the unit, in float32.
      stride: stride of the 3x3 convolution and the shortcut.
      first_offset: line and column where a window of the 3x3 convolution begins, from the output's
        position in the input.
      epsilon: guard of the division in group norms.
      is_preactivated: norms come before convolutions, not after.
    """
    from vit_jax.kernels import unit_pallas
    from vit_jax.kernels.unit_parameters import Form

    batch, height, width, inputs = x_BHWI.shape
    is_interpreted = platform() != "tpu"
    form = Form(width, stride, first_offset, epsilon, is_preactivated, is_interpreted)
    x_BRI = x_BHWI.reshape(batch, height * width, inputs)
    out_BRO = unit_pallas.compute_bottleneck(x_BRI, parameters, form)
    return out_BRO.reshape(batch, height // stride, width // stride, -1)


# Layouts.


def merge_inputs(kernel_HWIO: Array) -> Array:
    """Return the kernel as (H W I, O) on CPUs, elsewhere as it is.

    XLA for CPUs (jaxlib 0.10.2) takes 13 times as long for the gradients of sums over (1, 1, I) as
    for those of sums over one dimension.
    """
    if platform() != "cpu":
        return kernel_HWIO
    return kernel_HWIO.reshape(-1, kernel_HWIO.shape[-1])


def flatten_tokens(x_BSD: Array) -> Array:
    """Return tokens for layers that treat all alike: (B S, D) on GPUs, (B, S, D) elsewhere.

    Gradients of norms and biases are sums over B and S, which XLA for GPUs computes from transposed
    copies in float32, but not if they are one dimension. XLA for TPUs is faster with two.
    """
    if platform() != "gpu":
        return x_BSD
    return x_BSD.reshape(-1, x_BSD.shape[-1])


def turns_pairs_by_products(width: int, dtype: jnp.dtype) -> bool:
    """Return whether products turn the pairs of rotary positions.

    XLA for TPUs copies arrays with an axis for the pairs to other layouts. Of a block of B/16 this
    takes 1.4 ms, the products 0.3 ms (64 images, v5e). They are exact in bfloat16, and their time
    grows with the square of the width.
    """
    return platform() == "tpu" and dtype == jnp.bfloat16 and width <= WIDEST_TURNED


def choose_block_unroll(on_cpu: int, on_accelerators: int) -> int:
    """Return the number of blocks that one iteration of the loop over an encoder's blocks runs."""
    return on_cpu if platform() == "cpu" else on_accelerators


def scan_layers(
    run_layer: Callable[[Any, Any], tuple[Any, Any]],
    carry: Any,
    layers: Any,
    unroll: int,
) -> tuple[Any, Any]:
    """Return the results of `jax.lax.scan` over layers, with `unroll` of them in one iteration."""
    num_layers = len(jax.tree.leaves(layers)[0])
    is_one_tpu = platform() == "tpu" and has_target_devices() and count_devices() == 1
    if is_one_tpu and unroll >= num_layers > 1:
        from vit_jax.kernels.layers import run_layers

        return run_layers(run_layer, carry, layers)
    return jax.lax.scan(run_layer, carry, layers, unroll=unroll)


def unrolls_units(keeps_activations: bool) -> bool:
    """Return whether the units of a stage run one by one and not in a loop.

    A loop copies the activations that the backward pass reads. This takes a seventh more time on a
    CPU, a quarter more on a TPU if the activations of all units are kept.
    """
    if platform() == "tpu":
        return keeps_activations
    return platform() == "cpu"
