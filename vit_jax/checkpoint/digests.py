"""Digests of arrays, which reveal damage on a disk when a checkpoint is read.

The digest of an array is the sum, modulo 2**32, of one mixed word for each element, made of the
element's bits and its index. A sum does not depend on order: an array on many devices is digested
there, and has the same digest when it is restored onto any other layout. At a given index the
mixing is a bijection, so that one changed word always changes the digest; several changes cancel
each other once in 2**32.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

GOLDEN_RATIO = 0x9E3779B9  # spreads consecutive indices over all bits
# Bytes of an element → word for its bits; eight bytes are two words.
_WORDS = {
    1: jnp.uint8,
    2: jnp.uint16,
    4: jnp.uint32,
    8: jnp.uint32,
}


def compute_digests(arrays: Mapping[str, jax.Array]) -> dict[str, int]:
    """Return the digest of each array by its name; the same in every process."""
    if not arrays:
        return {}
    values = list(arrays.values())
    digests = np.asarray(_digest_all(values))
    return dict(zip(arrays, digests.tolist(), strict=True))


@jax.jit
def _digest_all(arrays: list[jax.Array]) -> jax.Array:
    """Return the digests of several arrays by one program."""
    digests = list(map(_digest, arrays))
    return jnp.stack(digests)


@jax.jit  # one trace for all arrays of a shape
def _digest(array: jax.Array) -> jax.Array:
    """Return the digest of an array as a scalar."""
    if array.dtype == jnp.bool_:
        array = array.astype(jnp.uint8)
    word = _WORDS[array.dtype.itemsize]
    words = jax.lax.bitcast_convert_type(array, word)
    words = words.astype(jnp.uint32)

    spread_index = _number_elements(words.shape) * np.uint32(GOLDEN_RATIO)
    mixed = _mix(words ^ spread_index)
    return jnp.sum(mixed, dtype=jnp.uint32)


def _number_elements(shape: tuple[int, ...]) -> jax.Array:
    """Return the index of each element in C order, modulo 2**32."""
    index = jnp.zeros(shape, jnp.uint32)
    for axis, size in enumerate(shape):
        index_along_axis = jax.lax.broadcasted_iota(jnp.uint32, shape, axis)
        index = index * np.uint32(size) + index_along_axis
    return index


def _mix(words: jax.Array) -> jax.Array:
    """Return each word mixed by the finaliser of MurmurHash3.

    It is a bijection of 32 bits, in which every input bit changes half of the output bits.
    """
    words = words ^ (words >> np.uint32(16))
    words = words * np.uint32(0x85EBCA6B)
    words = words ^ (words >> np.uint32(13))
    words = words * np.uint32(0xC2B2AE35)
    return words ^ (words >> np.uint32(16))
