"""Dropout whose mask is a hash of a key and of the place of each element, computed again rather than kept.

With JAX's generator (threefry) a TPU spends more on dropout than on attention. Here a word for every row and one for
every column, each a hash of its index, are mixed by eight operations, within whatever reads the mask. The mask depends
on neither backend nor mesh. One key serves several sites, each with its number: splitting keys takes long to compile.
"""

import functools
import math

import jax
import jax.numpy as jnp

_MULTIPLIERS = (
    0x7FEB352D,
    0x846CA68B,
)  # of a hash of 32 bits with little bias (Wellons, "lowbias32")


@jax.named_scope("dropout")
def dropout(x: jax.Array, fraction: float, key: jax.Array | None, site: int = 0) -> jax.Array:
    """Zero a fraction of `x` and scale the rest up; the identity outside training, where there is no key.

    Args:
      x: (..., C); elements of all its rows are dropped independently.
      fraction: in [0, 1), kept to within 2**-32.
      key: of `jax.random`.
      site: number of this use of the key.
    """
    if key is None or not fraction:
        return x
    return _dropped(x, *_row_and_column_words(key, site, x.shape), fraction)


@jax.named_scope("dropout")
def drop_examples(
    x: jax.Array, fraction: jax.Array | float, key: jax.Array | None, site: int = 0
) -> jax.Array:
    """Zero a fraction of the examples of `x` (B, ...) and scale the rest up (stochastic depth), as `dropout`."""
    if key is None:
        return x
    rows, columns = _row_and_column_words(key, site, (x.shape[0], 1))
    uniform = _hash(rows ^ columns).astype(jnp.float32) * jnp.float32(2.0**-32)
    keep = (uniform >= fraction).reshape(-1, *(1,) * (x.ndim - 1))
    return jnp.where(keep, x * jnp.asarray(1.0 / (1.0 - fraction), x.dtype), jnp.zeros_like(x))


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _dropped(x: jax.Array, rows: jax.Array, columns: jax.Array, fraction: float) -> jax.Array:
    keep = _hash(rows ^ columns) >= jnp.uint32(min(math.ceil(fraction * 2**32), 2**32 - 1))
    return jnp.where(keep, x * jnp.asarray(1.0 / (1.0 - fraction), x.dtype), jnp.zeros_like(x))


def _save(x: jax.Array, rows: jax.Array, columns: jax.Array, fraction: float) -> tuple:
    return _dropped(x, rows, columns, fraction), (rows, columns)


def _differentiate(
    fraction: float, words: tuple[jax.Array, jax.Array], gradient: jax.Array
) -> tuple:
    return _dropped(gradient, *words, fraction), None, None


_dropped.defvjp(_save, _differentiate)


def _row_and_column_words(
    key: jax.Array, site: int, shape: tuple[int, ...]
) -> tuple[jax.Array, jax.Array]:
    """Words of 32 bits for all rows (..., 1) and all columns (C,) of an array."""
    first, second = jax.random.key_data(key).reshape(-1)[:2]
    of_site = jnp.uint32(site * 0x9E3779B9 & 0xFFFFFFFF)
    rows = jnp.zeros((*shape[:-1], 1), jnp.uint32)
    for axis, size in enumerate(shape[:-1]):
        rows = rows * jnp.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, rows.shape, axis)
    columns = jax.lax.iota(jnp.uint32, shape[-1])
    return (
        _hash(_hash(rows + _hash(first ^ of_site)) ^ second),
        _hash(_hash(columns + _hash(second + of_site)) ^ first),
    )


def _hash(words: jax.Array) -> jax.Array:
    """A bijection of 32 bits in which every bit of the input changes about half of those of the output."""
    for multiplier, shift in zip(_MULTIPLIERS, (16, 15), strict=True):
        words = (words ^ (words >> shift)) * jnp.uint32(multiplier)
    return words ^ (words >> 16)
