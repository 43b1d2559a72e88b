"""Digests of arrays, by which damage on a disk is found when a checkpoint is read.

An array's digest is the sum, modulo 2**32, of one mixed word for each of its elements, made of the element's bits and
its index. A sum does not depend on order: an array that lies on many devices is digested where it lies, and restored
onto any other layout it has the same digest. At a given index the mixing is a bijection, so one changed word always
changes the digest; several changes cancel each other once in 2**32.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

GOLDEN_RATIO = 0x9E3779B9  # spreads consecutive indices over all bits
_WORDS = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint32}


def array_digests(arrays: Mapping[str, jax.Array]) -> dict[str, int]:
    """The digest of each array, under its name; the same in every process."""
    return {
        name: int(digest)
        for name, digest in zip(arrays, np.asarray(_digest_all(list(arrays.values()))), strict=True)
    }


@jax.jit
def _digest_all(arrays: list[jax.Array]) -> jax.Array:
    return jnp.stack([_digest(array) for array in arrays]) if arrays else jnp.zeros(0, jnp.uint32)


def _digest(array: jax.Array) -> jax.Array:
    if array.dtype == jnp.bool_:
        array = array.astype(jnp.uint8)
    words = jax.lax.bitcast_convert_type(array, _WORDS[array.dtype.itemsize]).astype(jnp.uint32)
    index = jnp.zeros(words.shape, jnp.uint32)
    for axis, size in enumerate(words.shape):
        index = index * np.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, words.shape, axis)
    return jnp.sum(_mix(words ^ (index * np.uint32(GOLDEN_RATIO))), dtype=jnp.uint32)


def _mix(words: jax.Array) -> jax.Array:
    """The finaliser of MurmurHash3, a bijection of 32 bits in which every input bit changes half of the output bits."""
    words = (words ^ (words >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    words = (words ^ (words >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return words ^ (words >> np.uint32(16))
