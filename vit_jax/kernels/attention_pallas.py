"""Self-attention for TPUs whose scores never leave the chip: a Pallas kernel and its gradient.

One program computes a few heads of one image, for one block of its queries. It adds the biases and the scale and
returns their gradients, and computes the scores again in the backward pass. Its operands and results are (B, S, E), as
flat projections write and read them. On a v5e:

* Keys lie along sublanes, since a softmax over sublanes is cheaper than over lanes.
* A complete row of scores fits on the chip at the lengths of images: no running maximum, unlike FlashAttention (Dao et
  al., 2022), from which the kept logarithm of the sums is.
* Two heads of 64 share a tile of 128 lanes: queries are zeroed outside of their head, which costs less than a shift.
* Only arrays as small as the operands are transposed, never scores.

Legend: B batch, S sequence length, T heads, h head dimension, E = T h; of one program Q queries and G heads.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from vit_jax.kernels import ATTENTION_OUTPUT, LOG_SUMS
from vit_jax.kernels.devices import on_shards

MAX_QUERIES = 640  # of one program: three (S, Q) arrays of float32 and the operands stay below a chip's 16 MiB
GOOD_BLOCK = (
    210_000  # numbers of one operand of a program, which holds ten or so; both found by compiling
)
MAX_BLOCK = 330_000
LANES = 128
Ref = Any  # an array of Pallas on the chip
LOG2_E = 1 / math.log(2)  # the unit computes powers of two

_NT = (((1,), (1,)), ((), ()))  # a @ b.T
_NN = (((1,), (0,)), ((), ()))  # a @ b


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def attention(
    query_BSE: jax.Array,
    key_BSE: jax.Array,
    value_BSE: jax.Array,
    bias_3E: jax.Array,
    head_dim: int,
    interpret: bool,
) -> jax.Array:
    """Return softmax((q + b_q) (k + b_k)^T / sqrt(h)) (v + b_v) for every head, (B, S, E).

    Args:
      query_BSE: the projection without bias; each head is h neighbours of E.
      key_BSE: likewise.
      value_BSE: likewise.
      bias_3E: of queries, keys and values, in the dtype of the projections.
      head_dim: h.
      interpret: run on any device, slowly, as the kernel would on a TPU.
    """
    return _save(query_BSE, key_BSE, value_BSE, bias_3E, head_dim, interpret)[0]


def _save(*arguments: Any) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    *operands, head_dim, interpret = arguments
    run = functools.partial(_run_forward, head_dim=head_dim, interpret=interpret)
    names = ("heads_BSE",) * 3 + ("bias_3E",)
    output_BSE, log_sums_BTGS = on_shards(run, names, ("heads_BSE", "rows_BTGS"))(*operands)
    output_BSE = checkpoint_name(output_BSE, ATTENTION_OUTPUT)
    return output_BSE, (*operands, checkpoint_name(log_sums_BTGS, LOG_SUMS))


def _differentiate(
    head_dim: int, interpret: bool, saved: tuple[jax.Array, ...], gradient_BSE: jax.Array
) -> tuple[jax.Array, ...]:
    run = functools.partial(_run_backward, head_dim=head_dim, interpret=interpret)
    names = ("heads_BSE",) * 3 + ("bias_3E", "rows_BTGS", "heads_BSE")
    results = on_shards(run, names, ("heads_BSE",) * 3 + ("bias_B3E",))(*saved, gradient_BSE)
    of_bias_3E = results[-1].sum(0).astype(saved[3].dtype)
    return (*(result.astype(gradient_BSE.dtype) for result in results[:3]), of_bias_3E)


attention.defvjp(_save, _differentiate)


def count_heads_per_program(num_heads: int, head_dim: int, length: int) -> int | None:
    """G, the heads of one program: as many as fit on the chip, whose lanes are complete tiles or all there are.

    The more, the less its fixed costs count. None where not even the fewest fit.
    """
    least = LANES // math.gcd(LANES, head_dim)
    possible = [group for group in range(least, num_heads, least) if num_heads % group == 0] + [
        num_heads
    ]
    sizes = {group: group * head_dim * length for group in possible}
    limit = MAX_BLOCK if length <= MAX_QUERIES else GOOD_BLOCK
    good = [group for group, size in sizes.items() if size <= GOOD_BLOCK]
    return max(good, default=possible[0] if sizes[possible[0]] <= limit else None)


class _Grid:
    """The blocks of a call: by image, group of heads and block of queries."""

    def __init__(self, shape: tuple[int, ...], head_dim: int):
        batch, self.length, width = shape
        num_heads = width // head_dim
        group = count_heads_per_program(num_heads, head_dim, self.length)
        if group is None:
            rule = f"cannot hold {self.length} tokens with heads of {head_dim}"
            raise ValueError(
                f"config.model.attention='pallas': the kernel {rule}. Use model.attention=xla, or auto."
            )
        self.group = group
        self.num_blocks = math.ceil(self.length / MAX_QUERIES)
        rows = (
            self.length
            if self.num_blocks == 1
            else -(-self.length // self.num_blocks // LANES) * LANES
        )
        lanes = self.group * head_dim
        groups = num_heads // self.group
        self.grid = (batch, groups, self.num_blocks)
        self.queries = pl.BlockSpec(
            (1, rows, lanes), lambda image, heads, block: (image, block, heads)
        )
        self.tokens = pl.BlockSpec(
            (1, self.length, lanes), lambda image, heads, block: (image, 0, heads)
        )
        self.bias = pl.BlockSpec((3, lanes), lambda image, heads, block: (0, heads))
        self.of_bias = pl.BlockSpec((1, 3, lanes), lambda image, heads, block: (image, 0, heads))
        self.rows = pl.BlockSpec(
            (1, 1, self.group, rows), lambda image, heads, block: (image, heads, 0, block)
        )
        self.rows_shape = (batch, groups, self.group, self.length)
        self.settings: dict[str, Any] = {
            "grid": self.grid,
            "compiler_params": pltpu.CompilerParams(
                dimension_semantics=("parallel", "parallel", "arbitrary")
            ),
            "metadata": {
                "programs": str(math.prod(self.grid))
            },  # by which `plan` counts their cycles
        }


def _run_forward(
    *operands: jax.Array, head_dim: int, interpret: bool
) -> tuple[jax.Array, jax.Array]:
    query_BSE = operands[0]
    grid = _Grid(query_BSE.shape, head_dim)
    call = pl.pallas_call(
        functools.partial(_forward, head_dim=head_dim),
        in_specs=[grid.queries, grid.tokens, grid.tokens, grid.bias],
        out_specs=(grid.queries, grid.rows),
        out_shape=(
            jax.ShapeDtypeStruct(query_BSE.shape, query_BSE.dtype),
            jax.ShapeDtypeStruct(grid.rows_shape, jnp.float32),
        ),
        interpret=interpret,
        name="attention_forward",
        **grid.settings,
    )
    return call(*operands)


def _run_backward(*operands: jax.Array, head_dim: int, interpret: bool) -> tuple[jax.Array, ...]:
    query_BSE = operands[0]
    grid = _Grid(query_BSE.shape, head_dim)
    shape = jax.ShapeDtypeStruct(query_BSE.shape, query_BSE.dtype)
    # A sum over blocks of queries is collected in float32.
    collected = shape if grid.num_blocks == 1 else jax.ShapeDtypeStruct(shape.shape, jnp.float32)
    call = pl.pallas_call(
        functools.partial(
            _backward, head_dim=head_dim, length=grid.length, num_blocks=grid.num_blocks
        ),
        in_specs=[grid.queries, grid.tokens, grid.tokens, grid.bias, grid.rows, grid.queries],
        out_specs=(grid.queries, grid.tokens, grid.tokens, grid.of_bias),
        out_shape=(
            shape,
            collected,
            collected,
            jax.ShapeDtypeStruct((shape.shape[0], 3, shape.shape[2]), jnp.float32),
        ),
        interpret=interpret,
        name="attention_backward",
        **grid.settings,
    )
    return call(*operands)


def _forward(
    query: Ref, key: Ref, value: Ref, bias: Ref, out: Ref, log_sums: Ref, *, head_dim: int
) -> None:
    """Queries past the end of the sequence, in its last block, give rows that are not written."""
    q_QE, k_SE, v_SE = _with_biases(query, key, value, bias, head_dim)
    v_ES = v_SE.T
    dtype = v_SE.dtype
    outputs_hQ = []
    for head, rows in enumerate(_heads(key.shape[-1], head_dim)):
        q_Qh, tiles = _only(q_QE, rows, dtype)
        scores_SQ = _dot(k_SE[:, tiles], q_Qh, _NT)
        highest_1Q = scores_SQ.max(0, keepdims=True)
        weights_SQ = jnp.exp2(scores_SQ - highest_1Q)
        sums_1Q = weights_SQ.sum(0, keepdims=True)
        log_sums[0, 0, head : head + 1, :] = highest_1Q + jnp.log2(sums_1Q)
        outputs_hQ.append(_dot(v_ES[rows], weights_SQ.astype(dtype), _NN) * (1.0 / sums_1Q))
    out[0] = jnp.concatenate(outputs_hQ).T.astype(out.dtype)


def _backward(
    query: Ref, key: Ref, value: Ref, bias: Ref, log_sums: Ref, gradient: Ref,
    of_query: Ref, of_key: Ref, of_value: Ref, of_bias: Ref, *, head_dim: int, length: int, num_blocks: int,
) -> None:  # fmt: skip
    block = pl.program_id(2)
    q_QE, k_SE, v_SE = _with_biases(query, key, value, bias, head_dim)
    gradient_QE = gradient[0].astype(jnp.float32)
    if num_blocks > 1:  # what lies past the last query may be anything
        is_query = (
            jax.lax.broadcasted_iota(jnp.int32, q_QE.shape, 0) < length - block * q_QE.shape[0]
        )
        q_QE, gradient_QE = (jnp.where(is_query, x, 0.0) for x in (q_QE, gradient_QE))
        shape = (1, q_QE.shape[0])
        is_query_1Q = jax.lax.broadcasted_iota(jnp.int32, shape, 1) < length - block * shape[1]
    else:
        is_query_1Q = None
    k_ES = k_SE.T
    dtype = k_SE.dtype
    width = key.shape[-1]
    of_queries_hQ = []
    of_keys = dict[int, jax.Array]()
    of_values = dict[int, jax.Array]()  # by first lane
    for head, rows in enumerate(_heads(width, head_dim)):
        q_Qh, tiles = _only(q_QE, rows, dtype)
        gradient_Qh, _ = _only(gradient_QE, rows, dtype)
        log_sums_1Q = log_sums[0, 0, head : head + 1, :]
        if is_query_1Q is not None:
            log_sums_1Q = jnp.where(is_query_1Q, log_sums_1Q, 0.0)
        weights_SQ = jnp.exp2(_dot(k_SE[:, tiles], q_Qh, _NT) - log_sums_1Q)
        of_weights_SQ = _dot(v_SE[:, tiles], gradient_Qh, _NT)
        of_scores_SQ = weights_SQ * (
            of_weights_SQ - (weights_SQ * of_weights_SQ).sum(0, keepdims=True)
        )
        of_scores_SQ = of_scores_SQ.astype(dtype)
        _add(of_values, tiles, _dot(weights_SQ.astype(dtype), gradient_Qh, _NN))
        of_queries_hQ.append(_dot(k_ES[rows], of_scores_SQ, _NN))
        _add(of_keys, tiles, _dot(of_scores_SQ, q_Qh, _NN))

    of_q = jnp.concatenate(of_queries_hQ).T * head_dim**-0.5
    of_k, of_v = (jnp.concatenate(list(sums.values()), 1) for sums in (of_keys, of_values))
    of_k = of_k * (1 / LOG2_E)
    of_query[0] = of_q.astype(of_query.dtype)
    is_first = block == 0
    for place, (sums, x) in enumerate(((None, of_q), (of_key, of_k), (of_value, of_v))):
        of_bias[0, place : place + 1, :] = _collected(
            x.sum(0, keepdims=True), of_bias, (0, slice(place, place + 1)), is_first, num_blocks
        )
        if sums is not None:
            sums[0] = _collected(x, sums, 0, is_first, num_blocks).astype(sums.dtype)


def _collected(
    x: jax.Array, out: Ref, place: Any, is_first: jax.Array, num_blocks: int
) -> jax.Array:
    """A value with those of earlier blocks of queries."""
    return x if num_blocks == 1 else x + jnp.where(is_first, 0.0, out[place])


def _with_biases(
    query: Ref, key: Ref, value: Ref, bias: Ref, head_dim: int
) -> tuple[jax.Array, ...]:
    """Queries in float32, scaled for powers of two; keys and values in their dtype."""
    dtype = key.dtype
    q_QE, k_SE, v_SE = (
        x[0].astype(jnp.float32) + bias[place : place + 1].astype(jnp.float32)
        for place, x in enumerate((query, key, value))
    )
    return q_QE * (head_dim**-0.5 * LOG2_E), k_SE.astype(dtype), v_SE.astype(dtype)


def _heads(width: int, head_dim: int) -> list[slice]:
    """The lanes of each head of a program."""
    return [slice(start, start + head_dim) for start in range(0, width, head_dim)]


def _only(x_QE: jax.Array, lanes: slice, dtype: jnp.dtype) -> tuple[jax.Array, slice]:
    """The lanes of a head, or the tile that it shares with others, zeroed outside of it; and which lanes they are."""
    head_dim = lanes.stop - lanes.start
    if LANES % head_dim:  # it would need two tiles, each as dear as moving it
        return x_QE[:, lanes].astype(dtype), lanes
    tile = slice(
        lanes.start // LANES * LANES, min(lanes.start // LANES * LANES + LANES, x_QE.shape[-1])
    )
    x_Qh = x_QE[:, tile]
    place = jax.lax.broadcasted_iota(jnp.int32, x_Qh.shape, 1) + tile.start
    return jnp.where((place >= lanes.start) & (place < lanes.stop), x_Qh, 0.0).astype(dtype), tile


def _add(sums: dict[int, jax.Array], lanes: slice, x: jax.Array) -> None:
    sums[lanes.start] = sums.get(lanes.start, 0.0) + x


def _dot(a: jax.Array, b: jax.Array, dims: tuple) -> jax.Array:
    return jax.lax.dot_general(a, b, dims, preferred_element_type=jnp.float32)
