"""Self-attention by cuDNN's flash attention and its gradient, as calls that XLA for GPUs knows.

Not by `jax.nn.dot_product_attention`, whose gradient rejects odd lengths (JAX 0.10 to 0.12): it
takes an absent bias for a bias, and only with a bias must lengths be even. Every class token makes
a length odd.

Legend: B batch, S sequence length, T heads, h head dimension, E = T h.
"""

import functools
import json
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from vit_jax.kernels import ATTENTION_OUTPUT, LOG_SUMS
from vit_jax.kernels.devices import compute_capability, map_shards

_MIN_CAPABILITY = (8, 0)  # least compute capability of a GPU for cuDNN's flash attention
_HOPPER = (9, 0)
_FORWARD = "__cudnn$fmhaSoftmax"
_BACKWARD = "__cudnn$fmhaSoftmaxBackward"
_TYPES = {"bfloat16": "BF16", "float16": "F16"}


class Product(NamedTuple):
    """Dimensions of the two operands of a product.

    Scores and weights are (B, T, S, S), all other operands (B, S, T, h).
    """

    summed: tuple[int, int]  # one of the left and one of the right operand
    left_shared: tuple[int, int]
    right_shared: tuple[int, int]


Products = dict[str, Product]
_FORWARD_PRODUCTS: Products = {
    # Scores: queries by keys, over h.
    "bmm1": Product(summed=(3, 3), left_shared=(0, 2), right_shared=(0, 2)),
    # Output: weights by values, over tokens.
    "bmm2": Product(summed=(3, 1), left_shared=(0, 1), right_shared=(0, 2)),
}
_BACKWARD_PRODUCTS: Products = {
    # Gradient of keys: gradient of scores by queries, over queries.
    "bmm1_grad_gemm1": Product(summed=(2, 1), left_shared=(0, 1), right_shared=(0, 2)),
    # Gradient of queries: gradient of scores by keys, over tokens.
    "bmm1_grad_gemm2": Product(summed=(3, 1), left_shared=(0, 1), right_shared=(0, 2)),
    # Gradient of values: weights by the gradient of the output, over queries.
    "bmm2_grad_gemm1": Product(summed=(2, 1), left_shared=(0, 1), right_shared=(0, 2)),
    # Gradient of weights: gradient of the output by values, over h.
    "bmm2_grad_gemm2": Product(summed=(3, 3), left_shared=(0, 2), right_shared=(0, 2)),
}


def attention(
    query_BSE: Array,
    key_BSE: Array,
    value_BSE: Array,
    num_heads: int,
) -> Array:
    """Return softmax(q k^T / sqrt(h)) v for every head, (B, S, E); operands include biases."""
    head_dim = query_BSE.shape[-1] // num_heads
    run = functools.partial(_run, head_dim=head_dim)
    run = map_shards(run, ("heads_BSE", "heads_BSE", "heads_BSE"), ("heads_BSE",))

    output_BSE: Array
    (output_BSE,) = run(query_BSE, key_BSE, value_BSE)
    return output_BSE


def find_problem(head_dim: int, dtype: jax.typing.DTypeLike) -> str | None:
    """Return why cuDNN cannot compute attention and its gradient on these devices, or None."""
    capability = compute_capability()
    if capability is not None and capability < _MIN_CAPABILITY:
        given = ".".join(map(str, capability))
        needed = ".".join(map(str, _MIN_CAPABILITY))
        return f"it needs an NVIDIA GPU of compute capability {needed}, not {given}"

    name = str(jnp.dtype(dtype))
    if name not in _TYPES:
        return f"it needs {' or '.join(_TYPES)}, not {name}"

    largest = 128
    if capability is not None and capability >= _HOPPER:
        largest = 256
    if head_dim % 8 or head_dim > largest:
        return f"the dimension of a head must be a multiple of 8 up to {largest}, not {head_dim}"
    return None


def _run(*operands_BSE: Array, head_dim: int) -> tuple[Array]:
    """Compute attention on one device, (B, S, E)."""
    batch, length, width = operands_BSE[0].shape
    num_heads = width // head_dim
    shape_BSTh = (batch, length, num_heads, head_dim)

    operands_BSTh = [x_BSE.reshape(shape_BSTh) for x_BSE in operands_BSE]
    output_BSTh = _attend(*operands_BSTh)
    output_BSE = output_BSTh.reshape(batch, length, width)
    return (output_BSE,)


@jax.custom_vjp
def _attend(
    query_BSTh: Array,
    key_BSTh: Array,
    value_BSTh: Array,
) -> Array:
    """Return the attention output (B, S, T, h), without the log-sums that a gradient needs."""
    (output_BSTh,) = _call(
        _FORWARD,
        _FORWARD_PRODUCTS,
        query_BSTh,
        key_BSTh,
        value_BSTh,
        num_outputs=1,
    )
    return output_BSTh


def _save(*operands_BSTh: Array) -> tuple[Array, tuple[Array, ...]]:
    """Name output and log-sums for rematerialisation, as the kernel for TPUs does."""
    output_BSTh, log_sums_BTS = _call(
        _FORWARD,
        _FORWARD_PRODUCTS,
        *operands_BSTh,
        num_outputs=1,
        has_log_sums=True,
    )
    output_BSTh = checkpoint_name(output_BSTh, ATTENTION_OUTPUT)
    log_sums_BTS = checkpoint_name(log_sums_BTS, LOG_SUMS)
    return output_BSTh, (*operands_BSTh, log_sums_BTS, output_BSTh)


def _differentiate(
    kept: tuple[Array, ...],
    gradient_BSTh: Array,
) -> tuple[Array, ...]:
    """Return the gradients of queries, keys and values."""
    *operands, output_BSTh = kept
    return _call(
        _BACKWARD,
        _BACKWARD_PRODUCTS,
        *operands,
        gradient_BSTh,
        output_BSTh,
        num_outputs=3,
    )


_attend.defvjp(_save, _differentiate)


def _call(
    target: str,
    products: Products,
    *operands: Array,
    num_outputs: int,
    has_log_sums: bool = False,
) -> tuple[Array, ...]:
    """Return the outputs (B, S, T, h) of a call of cuDNN, then the log-sums (B, T, S) if any."""
    query_BSTh = operands[0]
    batch, length, heads, head_dim = query_BSTh.shape
    output_shape = (batch, heads, length, head_dim)
    output = jax.ShapeDtypeStruct(output_shape, query_BSTh.dtype)
    workspace = jax.ShapeDtypeStruct((0,), jnp.uint8)  # XLA finds its size

    in_order_BSTh = (0, 2, 1, 3)
    results = [output] * num_outputs
    layouts: list[tuple[int, ...] | None] = [in_order_BSTh] * num_outputs
    if has_log_sums:
        log_sums_shape = (batch, heads, length)
        results.append(jax.ShapeDtypeStruct(log_sums_shape, jnp.float32))
        layouts.append(None)
    results.append(workspace)
    layouts.append(None)

    configuration = _describe_call(query_BSTh, products)
    call = jax.ffi.ffi_call(
        target,
        results,
        output_layouts=layouts,
        vmap_method="sequential",
        custom_call_api_version=2,
        legacy_backend_config=json.dumps(configuration),
    )
    *arrays, _ = call(*operands)

    outputs = []
    for output_BTSh in arrays[:num_outputs]:
        output_BSTh = output_BTSh.transpose(in_order_BSTh)
        outputs.append(output_BSTh)
    log_sums = arrays[num_outputs:]
    return (*outputs, *log_sums)


def _describe_call(query_BSTh: Array, products: Products) -> dict[str, Any]:
    """Return XLA's description of the call (`CudnnfMHABackendConfig`)."""
    batch, length, heads, head_dim = query_BSTh.shape
    scores = {
        "element_type": _TYPES[str(query_BSTh.dtype)],
        "dimensions": _format_integers((batch, heads, length, length)),
        "layout": {"minor_to_major": ["3", "2", "1", "0"]},
        "is_dynamic_dimension": [False] * 4,
    }
    algorithm = {
        "algo_id": "0",
        "math_type": "TENSOR_OP_MATH",
        "is_cudnn_frontend": True,
        "workspace_size": "0",
    }
    call = {
        "algorithm": algorithm,
        "fmha_scale": 1 / np.sqrt(head_dim),
        "intermediate_tensor_shape": scores,
        "is_flash_attention": True,
        "mask_type": "NO_MASK",
        "max_seg_per_batch": 1,
    }
    for name, product in products.items():
        call[f"{name}_dot_dimension_numbers"] = _describe_product(product)
    return {
        "operation_queue_id": "0",
        "cudnn_fmha_backend_config": call,
    }


def _describe_product(product: Product) -> dict[str, list[str]]:
    """Return XLA's description of a product of two operands."""
    left, right = product.summed
    return {
        "lhs_contracting_dimensions": _format_integers((left,)),
        "rhs_contracting_dimensions": _format_integers((right,)),
        "lhs_batch_dimensions": _format_integers(product.left_shared),
        "rhs_batch_dimensions": _format_integers(product.right_shared),
    }


def _format_integers(numbers: Iterable[int]) -> list[str]:
    """Return integers as text, their form in the JSON of protocol buffers for 64 bits."""
    return [str(number) for number in numbers]
