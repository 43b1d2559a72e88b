"""Dropout whose mask is a hash of a key and of each position, computed again rather than kept.

With JAX's generator (threefry) a TPU spends more on dropout than on attention. Here a word for
every row and one for every column, each a hash of its index, are mixed by eight operations, within
whatever reads the mask. The mask depends on neither backend nor mesh. One key serves several sites,
each with its number: splitting keys takes long to compile.
"""

import enum
import functools
import math

import jax
import jax.numpy as jnp
from jax import Array

Words = tuple[Array, Array]  # words of rows and of columns

# A hash of 32 bits with little bias (Wellons, "lowbias32"): shifts and multipliers in turn.
_ROUNDS = ((16, 0x7FEB352D), (15, 0x846CA68B))
_LAST_SHIFT = 16
_GOLDEN_RATIO = 0x9E3779B9  # fraction of 2**32, whose multiples spread the numbers of sites
_LARGEST_WORD = 2**32 - 1


class Site(enum.IntEnum):
    """Uses of one key in a network. Numbers are fixed: another one changes the mask."""

    ONLY = 0  # the key serves no other site
    MLP_HIDDEN = 0
    MLP_OUTPUT = 1
    ATTENTION_OUTPUT = 2
    ATTENTION_BRANCH = 3  # stochastic depth
    MLP_BRANCH = 4


@jax.named_scope("dropout")
def dropout(
    x: Array,
    fraction: float,
    key: Array | None,
    site: int = Site.ONLY,
) -> Array:
    """Zero a fraction of `x` and scale the rest up; without a key, outside training, return `x`.

    Args:
      x: (..., C); elements of all its rows are dropped independently.
      fraction: in [0, 1), kept to within 2**-32.
      key: random key of `jax.random`.
      site: number of this use of the key.
    """
    if key is None or not fraction:
        return x

    row_words, column_words = _hash_rows_and_columns(key, site, x.shape)
    return _drop_elements(x, row_words, column_words, fraction)


@jax.named_scope("dropout")
def drop_examples(
    x: Array,
    fraction: Array | float,
    key: Array | None,
    site: int,
    batch: int,
) -> Array:
    """Zero a fraction of the examples of `x`, as `dropout` (stochastic depth).

    Args:
      x: (B, S, D), or the tokens of B examples one after the other, (B S, D).
      fraction: scalar, share of the examples.
      key: random key of `jax.random`.
      site: number of this use of the key.
      batch: B.
    """
    if key is None:
        return x

    examples = x.reshape(batch, -1, x.shape[-1])
    row_words, column_words = _hash_rows_and_columns(key, site, (batch, 1))
    words = _hash(row_words ^ column_words)
    uniform = words.astype(jnp.float32) * jnp.float32(2.0**-32)
    is_kept = uniform >= fraction

    is_kept = is_kept.reshape(batch, 1, 1)
    dropped = _scale_kept(examples, is_kept, fraction)
    return dropped.reshape(x.shape)


def split_key(key: Array | None) -> tuple[Array | None, Array | None]:
    """Return two keys, or twice None for no key."""
    if key is None:
        return None, None
    first, second = jax.random.split(key)
    return first, second


def _scale_kept(
    x: Array,
    is_kept: Array,
    fraction: Array | float,
) -> Array:
    """Return `x` scaled up where it is kept, and 0 elsewhere."""
    scale = jnp.asarray(1.0 / (1.0 - fraction), x.dtype)
    scaled = x * scale
    return jnp.where(is_kept, scaled, jnp.zeros_like(x))


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _drop_elements(
    x: Array,
    row_words: Array,
    column_words: Array,
    fraction: float,
) -> Array:
    """Zero a fraction of the elements of `x`, and scale the rest up."""
    threshold = math.ceil(fraction * 2**32)
    threshold = min(threshold, _LARGEST_WORD)
    words = _hash(row_words ^ column_words)
    is_kept = words >= jnp.uint32(threshold)
    return _scale_kept(x, is_kept, fraction)


def _save_words(
    x: Array,
    row_words: Array,
    column_words: Array,
    fraction: float,
) -> tuple[Array, Words]:
    """Return the result of `_drop_elements`, and the words for the backward pass."""
    dropped = _drop_elements(x, row_words, column_words, fraction)
    return dropped, (row_words, column_words)


def _differentiate(
    fraction: float,
    words: Words,
    gradient: Array,
) -> tuple[Array, None, None]:
    """Return the gradient of `x`; words have none."""
    dx = _drop_elements(gradient, *words, fraction)
    return dx, None, None


_drop_elements.defvjp(_save_words, _differentiate)


def _hash_rows_and_columns(key: Array, site: int, shape: tuple[int, ...]) -> Words:
    """Return words of 32 bits for all rows (..., 1) and all columns (C,) of an array."""
    key_words = jax.random.key_data(key).reshape(-1)
    first, second = key_words[:2]
    site_word = jnp.uint32(site * _GOLDEN_RATIO & _LARGEST_WORD)

    *row_sizes, num_columns = shape
    rows = jnp.zeros((*row_sizes, 1), jnp.uint32)
    for axis, size in enumerate(row_sizes):
        first_of_axis = rows * jnp.uint32(size)
        rows = first_of_axis + jax.lax.broadcasted_iota(jnp.uint32, rows.shape, axis)
    columns = jax.lax.iota(jnp.uint32, num_columns)

    row_seed = _hash(first ^ site_word)
    row_words = _hash(rows + row_seed)
    row_words = _hash(row_words ^ second)

    column_seed = _hash(second + site_word)
    column_words = _hash(columns + column_seed)
    column_words = _hash(column_words ^ first)
    return row_words, column_words


def _hash(words: Array) -> Array:
    """Return a bijection of 32 bits: each input bit changes about half of the output bits."""
    for shift, multiplier in _ROUNDS:
        mixed = words ^ (words >> shift)
        words = mixed * jnp.uint32(multiplier)
    return words ^ (words >> _LAST_SHIFT)
