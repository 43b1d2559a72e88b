"""Permutations of records and classes: the element at an offset, as a function of the seed.

A permutation of n elements maps offsets, 0 to n - 1, to elements, 0 to n - 1. An epoch is one use of
all elements. Each epoch has a permutation that depends on the seed, the epoch and n only, so that a
resumed run continues in the same order. Two algorithms permute:

* `_find_element` computes one element without the others, by `index_shuffle` of grain. A
  permutation of any length needs no memory.
* `_sort_words` permutes all elements at once, by sorting random words.

The records of a source are permuted by `_find_element`. All elements of a short permutation are
stored, because a look-up is faster; the order is the same.

Balanced sampling has a permutation of the classes and one of the records of each class, in every
epoch of each: too many to store where classes are large. Short ones are permuted by `_sort_words`:
`index_shuffle` takes 16 ms divided by the number of elements for each call.
"""

import functools

import numpy as np
from grain.experimental import index_shuffle

_MOST_STORED = 2**16
"""Largest number of records whose order is stored."""
_FEWEST_SHUFFLED = 512
"""Smallest number of elements that balanced sampling permutes by `index_shuffle`."""

_ORDER = 0
_AUGMENTATION = 1
"""The purpose of a random number is a part of its seed."""
_SHUFFLE_ROUNDS = 4
"""Rounds of `index_shuffle`, as in grain's global shuffle."""
_NUM_CACHED = 4096
"""Number of seeds and of sorted permutations (up to 8 MiB) in caches; computing one takes 30 us."""
_NUM_STORED_EPOCHS = 64
"""Number of stored epochs: batches that are prepared together may be of many short epochs."""


def pick_record(seed: int, epoch: int, offset: int, num_records: int) -> int:
    """Return the index of the record at an offset of an epoch."""
    shuffle_seed = _derive_seed(seed, epoch)
    if num_records <= _MOST_STORED:
        return int(_list_elements(shuffle_seed, num_records)[offset])
    return _find_element(offset, shuffle_seed, num_records)


def pick_balanced(seed: int, epoch: int, offset: int, size: int, *class_key: int) -> int:
    """Return the element at an offset of an epoch of the classes, or of one class's records.

    `class_key` is the number of the class, for its records.
    """
    if size < _FEWEST_SHUFFLED:
        return int(_sort_words(size, seed, epoch, *class_key)[offset])
    return _find_element(offset, _derive_seed(seed, epoch, *class_key), size)


def augmentation_rng(seed: int, variant: int, record_index: int) -> np.random.Generator:
    """Return the random generator of one augmentation of a record."""
    # An array is faster than the tuple.
    entropy = np.array((seed, variant, record_index, _AUGMENTATION), np.uint32)
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(entropy)))


@functools.lru_cache(maxsize=_NUM_STORED_EPOCHS)
def _list_elements(shuffle_seed: int, size: int) -> np.ndarray:
    """Return the elements of a permutation by `_find_element` at all offsets, int32 (size,)."""
    elements = [_find_element(offset, shuffle_seed, size) for offset in range(size)]
    return np.array(elements, np.int32)


def _find_element(offset: int, shuffle_seed: int, size: int) -> int:
    """Return the element at an offset of a permutation of 0 to size - 1.

    If size - 1 is a power of two, `index_shuffle` of grain 0.2.18 may repeat one element and drop
    another. A permutation with one element more is right. The element at the additional offset
    takes the place of the additional element.
    """
    shuffle = functools.partial(index_shuffle, seed=shuffle_seed, rounds=_SHUFFLE_ROUNDS)
    last = size - 1
    is_power_of_two = last & (last - 1) == 0
    if not is_power_of_two:
        return shuffle(offset, max_index=last)

    additional = size
    element = shuffle(offset, max_index=additional)
    if element == additional:
        return shuffle(additional, max_index=additional)
    return element


@functools.lru_cache(maxsize=_NUM_CACHED)
def _sort_words(size: int, seed: int, epoch: int, *class_key: int) -> np.ndarray:
    """Permute 0 to size - 1 by sorting words that are equal in all versions of NumPy."""
    generator = np.random.PCG64(np.random.SeedSequence((seed, epoch, _ORDER, *class_key)))
    words = generator.random_raw(size)
    return np.argsort(words, kind="stable").astype(np.int16)


@functools.lru_cache(maxsize=_NUM_CACHED)
def _derive_seed(seed: int, epoch: int, *class_key: int) -> int:
    """Return the random seed of an epoch of all records, of the classes, or of one class."""
    # Mixed, not added: with seed + epoch, epoch 1 of seed 0 would repeat epoch 0 of seed 1.
    return int(np.random.SeedSequence((seed, epoch, _ORDER, *class_key)).generate_state(1)[0])
