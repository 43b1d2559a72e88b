"""Self-attention by cuDNN, called through JAX: the operands that it takes, and the padding of odd lengths.

Legend: B batch, S sequence length, T heads, h head dimension, E = T h.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from vit_jax.activations import compute_capability, on_parts

FORWARD = "dot_product_attention_fwd_wrapper"  # JAX's primitive: its results are the output and the log of the sums
_MIN_CAPABILITY = (8, 0)  # of the GPU, by cuDNN's flash attention
_PROBLEMS = (NotImplementedError, RuntimeError, ValueError)  # by which JAX rejects operands


def attention(query_BSE: jax.Array, key_BSE: jax.Array, value_BSE: jax.Array, num_heads: int) -> jax.Array:
    """Return softmax(q k^T / sqrt(h)) v for every head, (B, S, E). The operands include their biases."""
    run = functools.partial(_run, head_dim=query_BSE.shape[-1] // num_heads)
    output_BSE: jax.Array = on_parts(run, ("heads_BSE",) * 3, ("heads_BSE",))(query_BSE, key_BSE, value_BSE)[0]
    return output_BSE


def find_problem(length: int, head_dim: int, dtype: Any) -> str | None:
    """Return why cuDNN cannot compute attention and its gradient on these devices, or None.

    JAX knows the rules of its version and of the installed cuDNN, so it traces one head.
    """
    capability = compute_capability()
    if capability is not None and capability < _MIN_CAPABILITY:
        found, needed = (".".join(map(str, version)) for version in (capability, _MIN_CAPABILITY))
        return f"it needs a GPU of compute capability {needed}, not {found}"
    operand = jax.ShapeDtypeStruct((1, length, head_dim), dtype)

    def sum_of_output(*operands: jax.Array) -> jax.Array:
        return _run(*operands, head_dim=head_dim)[0].astype(jnp.float32).sum()

    try:
        jax.eval_shape(jax.grad(sum_of_output, argnums=(0, 1, 2)), operand, operand, operand)
    except _PROBLEMS as error:
        return str(error).partition("\n")[0].rstrip(".")
    return None


def is_forward(primitive: Any, *_: Any, **__: Any) -> bool:
    """Rematerialisation policy that keeps what the backward pass reads of the forward pass."""
    return str(primitive) == FORWARD


def _run(*operands_BSE: jax.Array, head_dim: int) -> tuple[jax.Array]:
    """Attention on one device. JAX rejects the gradient of odd lengths, so these get one masked token more."""
    batch, length, width = operands_BSE[0].shape
    padding = length % 2
    heads_BSTh = [
        jnp.pad(x, ((0, 0), (0, padding), (0, 0))).reshape(batch, length + padding, -1, head_dim) for x in operands_BSE
    ]
    lengths_B = jnp.full(batch, length, jnp.int32) if padding else None
    output_BSTh = jax.nn.dot_product_attention(
        *heads_BSTh, query_seq_lengths=lengths_B, key_value_seq_lengths=lengths_B, implementation="cudnn"
    )
    return (output_BSTh[:, :length].reshape(batch, length, width),)
