"""Self-attention for TPUs whose scores never leave the chip: a Pallas kernel and its gradient.

One program computes a few heads of one image, for one block of its queries. It adds the biases and
the scale and returns their gradients, and computes the scores again in the backward pass. Its
operands and results are (B, S, E), as flat projections write and read them. On a v5e:

* Keys lie along sublanes, since a softmax over sublanes is cheaper than over lanes.
* A complete row of scores fits on the chip at the lengths of images: no running maximum, unlike
  FlashAttention (Dao et al., 2022), from which the kept logarithm of the sums is.
* Two heads of 64 share a tile of 128 lanes: queries are zeroed outside of their head, which costs
  less than a shift.
* Only arrays as small as the operands are transposed, never scores.

Legend: B batch, S sequence length, T heads, h head dimension, E = T h; of one program Q queries and
G heads.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.typing import ArrayLike

from vit_jax.kernels import ATTENTION_OUTPUT, LOG_SUMS
from vit_jax.kernels.devices import map_shards

# Queries of one program: three (S, Q) arrays of float32 and the operands stay below 16 MiB.
MAX_QUERIES = 640
# Values in one operand of a program, which holds about ten. Both limits were found by compiling.
GOOD_BLOCK = 210_000
MAX_BLOCK = 330_000
LANES = 128
LOG2_E = 1 / math.log(2)  # the hardware computes powers of two

Ref = Any  # an array of Pallas on the chip
_SECOND_TRANSPOSED = (((1,), (1,)), ((), ()))  # a @ b.T
_PLAIN = (((1,), (0,)), ((), ()))  # a @ b
_OPERANDS = ("heads_BSE", "heads_BSE", "heads_BSE", "bias_3E")  # names of their layouts


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def attention(
    query_BSE: Array,
    key_BSE: Array,
    value_BSE: Array,
    bias_3E: Array,
    head_dim: int,
    interpret: bool,
) -> Array:
    """Return softmax((q + b_q) (k + b_k)^T / sqrt(h)) (v + b_v) for every head, (B, S, E).

    Args:
      query_BSE: the projection without bias; each head has h adjacent channels of E.
      key_BSE: the same of keys.
      value_BSE: the same of values.
      bias_3E: biases of queries, keys and values, in the dtype of the projections.
      head_dim: h.
      interpret: run on any device, slowly, as the kernel would on a TPU.
    """
    output_BSE, _ = _save(query_BSE, key_BSE, value_BSE, bias_3E, head_dim, interpret)
    return output_BSE


def _save(*arguments: Any) -> tuple[Array, tuple[Array, ...]]:
    """Name output and log-sums for rematerialisation."""
    *operands, head_dim, interpret = arguments
    run = functools.partial(_run_forward, head_dim=head_dim, interpret=interpret)
    run = map_shards(run, _OPERANDS, ("heads_BSE", "rows_BTGS"))

    output_BSE, log_sums_BTGS = run(*operands)
    output_BSE = checkpoint_name(output_BSE, ATTENTION_OUTPUT)
    log_sums_BTGS = checkpoint_name(log_sums_BTGS, LOG_SUMS)
    return output_BSE, (*operands, log_sums_BTGS)


def _differentiate(
    head_dim: int,
    interpret: bool,
    saved: tuple[Array, ...],
    gradient_BSE: Array,
) -> tuple[Array, ...]:
    """Return the gradients of queries, keys, values (B, S, E) and biases (3, E)."""
    run = functools.partial(_run_backward, head_dim=head_dim, interpret=interpret)
    names = (*_OPERANDS, "rows_BTGS", "heads_BSE")
    run = map_shards(run, names, ("heads_BSE", "heads_BSE", "heads_BSE", "bias_B3E"))
    *sums_BSE, dbias_B3E = run(*saved, gradient_BSE)

    bias_3E = saved[3]
    dbias_3E = dbias_B3E.sum(0)
    dbias_3E = dbias_3E.astype(bias_3E.dtype)
    gradients = [sum_BSE.astype(gradient_BSE.dtype) for sum_BSE in sums_BSE]
    return (*gradients, dbias_3E)


attention.defvjp(_save, _differentiate)


# The blocks of a call.


def count_heads_per_program(
    num_heads: int,
    head_dim: int,
    length: int,
) -> int | None:
    """Return G, the heads of one program: as many as fit on the chip.

    The lanes of G heads are complete tiles, or G is the number of all heads. More heads share the
    fixed costs of a program. None if no number of heads fits.
    """
    fewest = LANES // math.gcd(LANES, head_dim)
    multiples = range(fewest, num_heads, fewest)
    groups = [group for group in multiples if num_heads % group == 0]
    groups.append(num_heads)

    values_per_head = head_dim * length
    good = [group for group in groups if group * values_per_head <= GOOD_BLOCK]
    if good:
        return max(good)

    smallest = groups[0]
    if length <= MAX_QUERIES and smallest * values_per_head <= MAX_BLOCK:
        return smallest
    return None


# Index maps: the block that a program (image, group of heads, block of queries) reads or writes.


def _find_queries(image: ArrayLike, heads: ArrayLike, block: ArrayLike) -> tuple:
    return image, block, heads


def _find_tokens(image: ArrayLike, heads: ArrayLike, block: ArrayLike) -> tuple:
    return image, 0, heads


def _find_bias(image: ArrayLike, heads: ArrayLike, block: ArrayLike) -> tuple:
    return 0, heads


def _find_statistics(image: ArrayLike, heads: ArrayLike, block: ArrayLike) -> tuple:
    return image, heads, 0, block


class _Grid:
    """The blocks of a call: by image, group of heads and block of queries."""

    def __init__(
        self,
        shape_BSE: tuple[int, ...],
        head_dim: int,
    ):
        batch, self.length, width = shape_BSE
        num_heads = width // head_dim
        group = count_heads_per_program(num_heads, head_dim, self.length)
        if group is None:
            rule = f"the kernel cannot hold {self.length} tokens with heads of {head_dim}"
            raise ValueError(
                f"config.model.attention='pallas': {rule}. Use model.attention=xla, or auto."
            )

        num_groups = num_heads // group
        self.num_blocks = math.ceil(self.length / MAX_QUERIES)
        self.statistics_BTGS = (batch, num_groups, group, self.length)

        num_queries = self.length
        if self.num_blocks > 1:  # complete tiles, enough for all queries
            num_tiles = math.ceil(self.length / (self.num_blocks * LANES))
            num_queries = num_tiles * LANES
        lanes = group * head_dim

        self.queries = pl.BlockSpec((1, num_queries, lanes), _find_queries)
        self.tokens = pl.BlockSpec((1, self.length, lanes), _find_tokens)
        self.bias = pl.BlockSpec((3, lanes), _find_bias)
        self.dbias = pl.BlockSpec((1, 3, lanes), _find_tokens)
        self.statistics = pl.BlockSpec((1, 1, group, num_queries), _find_statistics)

        grid = (batch, num_groups, self.num_blocks)
        num_programs = math.prod(grid)
        compiler_params = pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"),
        )
        self.settings: dict[str, Any] = {
            "grid": grid,
            "compiler_params": compiler_params,
            "metadata": {"programs": str(num_programs)},  # `plan` counts their cycles by it
        }


def _run_forward(
    *operands: Array,
    head_dim: int,
    interpret: bool,
) -> tuple[Array, Array]:
    """Return the attention output (B, S, E) and the logarithm of its sums, on one device."""
    query_BSE = operands[0]
    grid = _Grid(query_BSE.shape, head_dim)
    output_shape = jax.ShapeDtypeStruct(query_BSE.shape, query_BSE.dtype)
    log_sums_shape = jax.ShapeDtypeStruct(grid.statistics_BTGS, jnp.float32)

    call = pl.pallas_call(
        functools.partial(_forward, head_dim=head_dim),
        in_specs=[grid.queries, grid.tokens, grid.tokens, grid.bias],
        out_specs=(grid.queries, grid.statistics),
        out_shape=(output_shape, log_sums_shape),
        interpret=interpret,
        name="attention_forward",
        **grid.settings,
    )
    return call(*operands)


def _run_backward(
    *operands: Array,
    head_dim: int,
    interpret: bool,
) -> tuple[Array, ...]:
    """Return the gradients of the operands, on one device; of the biases (B, 3, E)."""
    query_BSE = operands[0]
    grid = _Grid(query_BSE.shape, head_dim)
    batch, _, width = query_BSE.shape

    query_shape = jax.ShapeDtypeStruct(query_BSE.shape, query_BSE.dtype)
    token_shape = query_shape
    if grid.num_blocks > 1:  # a sum over blocks of queries is collected in float32
        token_shape = jax.ShapeDtypeStruct(query_BSE.shape, jnp.float32)
    dbias_shape = jax.ShapeDtypeStruct((batch, 3, width), jnp.float32)

    program = functools.partial(
        _backward,
        head_dim=head_dim,
        length=grid.length,
        num_blocks=grid.num_blocks,
    )
    in_specs = [
        grid.queries,
        grid.tokens,
        grid.tokens,
        grid.bias,
        grid.statistics,
        grid.queries,
    ]
    call = pl.pallas_call(
        program,
        in_specs=in_specs,
        out_specs=(grid.queries, grid.tokens, grid.tokens, grid.dbias),
        out_shape=(query_shape, token_shape, token_shape, dbias_shape),
        interpret=interpret,
        name="attention_backward",
        **grid.settings,
    )
    return call(*operands)


# One program.


def _forward(
    query: Ref,
    key: Ref,
    value: Ref,
    bias: Ref,
    out: Ref,
    log_sums: Ref,
    *,
    head_dim: int,
) -> None:
    """Compute some heads, for one block of queries.

    Queries past the end of the sequence, in its last block, give rows that are not written.
    """
    q_QE, k_SE, v_SE = _add_biases(
        query,
        key,
        value,
        bias,
        head_dim,
    )
    v_ES = v_SE.T
    dtype = v_SE.dtype
    width = key.shape[-1]

    outputs_hQ = []
    for head, lanes in enumerate(_slice_heads(width, head_dim)):
        tile = _find_tile(lanes, width)
        q_Qh = _select_head(q_QE, lanes, tile, dtype)

        scores_SQ = _multiply(k_SE[:, tile], q_Qh, _SECOND_TRANSPOSED)
        highest_1Q = scores_SQ.max(0, keepdims=True)
        weights_SQ = jnp.exp2(scores_SQ - highest_1Q)
        sums_1Q = weights_SQ.sum(0, keepdims=True)
        log_sums[0, 0, head : head + 1, :] = highest_1Q + jnp.log2(sums_1Q)

        weighted_hQ = _multiply(v_ES[lanes], weights_SQ.astype(dtype))
        output_hQ = weighted_hQ * (1.0 / sums_1Q)
        outputs_hQ.append(output_hQ)

    output_QE = jnp.concatenate(outputs_hQ).T
    out[0] = output_QE.astype(out.dtype)


def _backward(
    query: Ref,
    key: Ref,
    value: Ref,
    bias: Ref,
    log_sums: Ref,
    gradient: Ref,
    dquery: Ref,
    dkey: Ref,
    dvalue: Ref,
    dbias: Ref,
    *,
    head_dim: int,
    length: int,
    num_blocks: int,
) -> None:
    """Compute the gradients of some heads, for one block of queries."""
    block = pl.program_id(2)
    q_QE, k_SE, v_SE = _add_biases(
        query,
        key,
        value,
        bias,
        head_dim,
    )
    gradient_QE = gradient[0].astype(jnp.float32)
    is_query_1Q = None
    if num_blocks > 1:  # values past the last query are undefined
        q_QE, gradient_QE = _mask_queries(q_QE, gradient_QE, block, length)
        num_queries = q_QE.shape[0]
        is_query_1Q = _is_query((1, num_queries), 1, block, length)

    dq_QE, dk_SE, dv_SE = _differentiate_heads(
        q_QE,
        k_SE,
        v_SE,
        gradient_QE,
        log_sums,
        is_query_1Q,
        head_dim,
    )
    dquery[0] = dq_QE.astype(dquery.dtype)

    collect = functools.partial(
        _collect,
        is_first=block == 0,
        num_blocks=num_blocks,
    )
    _store_bias_gradient(dbias, 0, dq_QE, collect)
    _store_bias_gradient(dbias, 1, dk_SE, collect)
    _store_gradient(dkey, dk_SE, collect)
    _store_bias_gradient(dbias, 2, dv_SE, collect)
    _store_gradient(dvalue, dv_SE, collect)


def _differentiate_heads(
    q_QE: Array,
    k_SE: Array,
    v_SE: Array,
    gradient_QE: Array,
    log_sums: Ref,
    is_query_1Q: Array | None,
    head_dim: int,
) -> tuple[Array, Array, Array]:
    """Return the gradients of queries, (Q, E), keys and values, (S, E), in float32."""
    k_ES = k_SE.T
    dtype = k_SE.dtype
    width = k_SE.shape[-1]
    dqueries_hQ = []
    dkeys = _TileSums()
    dvalues = _TileSums()
    for head, lanes in enumerate(_slice_heads(width, head_dim)):
        tile = _find_tile(lanes, width)
        q_Qh = _select_head(q_QE, lanes, tile, dtype)
        gradient_Qh = _select_head(gradient_QE, lanes, tile, dtype)
        log_sums_1Q = _load_log_sums(log_sums, head, is_query_1Q)

        scores_SQ = _multiply(k_SE[:, tile], q_Qh, _SECOND_TRANSPOSED)
        weights_SQ = jnp.exp2(scores_SQ - log_sums_1Q)
        dweights_SQ = _multiply(v_SE[:, tile], gradient_Qh, _SECOND_TRANSPOSED)
        dscores_SQ = _differentiate_softmax(weights_SQ, dweights_SQ)
        dscores_SQ = dscores_SQ.astype(dtype)

        dv_Sh = _multiply(weights_SQ.astype(dtype), gradient_Qh)
        dvalues.add(tile, dv_Sh)
        dq_hQ = _multiply(k_ES[lanes], dscores_SQ)
        dqueries_hQ.append(dq_hQ)
        dk_Sh = _multiply(dscores_SQ, q_Qh)
        dkeys.add(tile, dk_Sh)

    dq_QE = jnp.concatenate(dqueries_hQ).T
    dq_QE = dq_QE * head_dim**-0.5
    dk_SE = dkeys.join()
    dv_SE = dvalues.join()
    dk_SE = dk_SE * (1 / LOG2_E)
    return dq_QE, dk_SE, dv_SE


def _mask_queries(
    q_QE: Array,
    gradient_QE: Array,
    block: Array,
    length: int,
) -> tuple[Array, Array]:
    """Return queries and the gradient of their output, with zeros past the last query."""
    is_query_QE = _is_query(q_QE.shape, 0, block, length)
    q_QE = jnp.where(is_query_QE, q_QE, 0.0)
    gradient_QE = jnp.where(is_query_QE, gradient_QE, 0.0)
    return q_QE, gradient_QE


def _load_log_sums(
    log_sums: Ref,
    head: int,
    is_query_1Q: Array | None,
) -> Array:
    """Return the logarithm of a head's sums, (1, Q); 0 where a mask says there is no query."""
    log_sums_1Q = log_sums[0, 0, head : head + 1, :]
    if is_query_1Q is None:
        return log_sums_1Q
    return jnp.where(is_query_1Q, log_sums_1Q, 0.0)


def _differentiate_softmax(weights_SQ: Array, dweights_SQ: Array) -> Array:
    """Return the gradient of the scores, (S, Q), from the softmax and its gradient."""
    weighted_SQ = weights_SQ * dweights_SQ
    mean_1Q = weighted_SQ.sum(0, keepdims=True)
    return weights_SQ * (dweights_SQ - mean_1Q)


def _store_gradient(
    out: Ref,
    x_SE: Array,
    collect: Callable[..., Array],
) -> None:
    """Store the gradient of keys or values."""
    total_SE = collect(x_SE, out, 0)
    out[0] = total_SE.astype(out.dtype)


def _store_bias_gradient(
    dbias: Ref,
    row: int,
    x_NE: Array,
    collect: Callable[..., Array],
) -> None:
    """Store the sum of a projection's gradient over tokens as the gradient of its bias."""
    rows = slice(row, row + 1)
    sum_1E = x_NE.sum(0, keepdims=True)
    dbias[0, rows, :] = collect(sum_1E, dbias, (0, rows))


def _is_query(
    shape: tuple[int, ...],
    axis: int,
    block: Array,
    length: int,
) -> Array:
    """Return for each query of a block, along an axis, whether the sequence has it."""
    query = jax.lax.broadcasted_iota(jnp.int32, shape, axis)
    return query < length - block * shape[axis]


def _collect(
    x: Array,
    out: Ref,
    index: Any,
    *,
    is_first: Array,
    num_blocks: int,
) -> Array:
    """Return a value added to the sum of earlier blocks of queries."""
    if num_blocks == 1:
        return x
    earlier = jnp.where(is_first, 0.0, out[index])
    return x + earlier


def _add_biases(
    query: Ref,
    key: Ref,
    value: Ref,
    bias: Ref,
    head_dim: int,
) -> tuple[Array, Array, Array]:
    """Return queries in float32, scaled for powers of two; keys and values in their dtype."""
    dtype = key.dtype
    q_QE = _add_bias(query, bias, 0)
    k_SE = _add_bias(key, bias, 1)
    v_SE = _add_bias(value, bias, 2)

    scale = head_dim**-0.5 * LOG2_E
    return q_QE * scale, k_SE.astype(dtype), v_SE.astype(dtype)


def _add_bias(
    projection: Ref,
    bias: Ref,
    row: int,
) -> Array:
    """Return a projection with its bias in float32."""
    x_NE = projection[0].astype(jnp.float32)
    bias_1E = bias[row : row + 1].astype(jnp.float32)
    return x_NE + bias_1E


def _slice_heads(width: int, head_dim: int) -> list[slice]:
    """Return the lanes of each head of a program."""
    starts = range(0, width, head_dim)
    return [slice(start, start + head_dim) for start in starts]


def _find_tile(lanes: slice, num_lanes: int) -> slice:
    """Return the lanes of the tile that a head shares, or of the head if it spans two tiles."""
    head_dim = lanes.stop - lanes.start
    if LANES % head_dim:  # two tiles cost as much as moving the head
        return lanes

    start = lanes.start // LANES * LANES
    end = min(start + LANES, num_lanes)
    return slice(start, end)


def _select_head(
    x_QE: Array,
    lanes: slice,
    tile: slice,
    dtype: jnp.dtype,
) -> Array:
    """Return the tile of a head, zeroed outside of the head."""
    x_Qh = x_QE[:, tile]
    head_dim = lanes.stop - lanes.start
    if tile == lanes and LANES % head_dim:
        return x_Qh.astype(dtype)

    lane = jax.lax.broadcasted_iota(jnp.int32, x_Qh.shape, 1) + tile.start
    is_head = (lane >= lanes.start) & (lane < lanes.stop)
    head_Qh = jnp.where(is_head, x_Qh, 0.0)
    return head_Qh.astype(dtype)


class _TileSums:
    """Sums of the heads that share a tile."""

    def __init__(self) -> None:
        self.sums: dict[int, Array] = {}  # by first lane

    def add(
        self,
        tile: slice,
        x: Array,
    ) -> None:
        """Add a value to the sum of a tile."""
        total = self.sums.get(tile.start, 0.0)
        self.sums[tile.start] = total + x

    def join(self) -> Array:
        """Return all tiles beside each other."""
        return jnp.concatenate(list(self.sums.values()), 1)


def _multiply(
    a: Array,
    b: Array,
    dimensions: tuple = _PLAIN,
) -> Array:
    """Return a product in float32."""
    return jax.lax.dot_general(
        a,
        b,
        dimensions,
        preferred_element_type=jnp.float32,
    )
