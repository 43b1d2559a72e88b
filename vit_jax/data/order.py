"""Permutations: the record at a place of an epoch, and the seeds that they are made from.

`index_shuffle` of grain returns one element of a permutation without making the others, so that an
epoch of any length needs no memory. Three additions make it fast. Each depends on the number of
elements alone, so that a resumed run has the same order.

| elements | records of an epoch | classes, or records of a class (balanced) |
|---|---|---|
| fewer than 512 | all elements of `index_shuffle`, stored | random words, sorted and stored |
| 512 to 65,536 | all elements of `index_shuffle`, stored | one element of `index_shuffle` |
| more | one element of `index_shuffle` | one element of `index_shuffle` |

* An epoch of few records is stored, because looking up an element is faster than computing it.
* Balanced sampling has a permutation for each class and pass, too many to store where they are
  long. Below 512 elements `index_shuffle` is slow (16 ms divided by the number of elements, for
  each call), and sorting is not.
* For some powers of two `index_shuffle` is no permutation; `_shuffle_index` describes the way
  around it.
"""

import functools

import numpy as np
from grain.experimental import index_shuffle

_ORDER = 0
_AUGMENTATION = 1  # the purpose of random numbers, which keeps their seeds apart
_SHUFFLE_ROUNDS = 4  # as in grain's global shuffle
_MOST_STORED = 2**16
_FEWEST_TO_SHUFFLE = 512
_NUM_CACHED = 4096
"""Number of keys, and of short orders (up to 8 MiB), in caches. An order that is no longer there
takes about 30 us."""


def pick_record(seed: int, epoch: int, offset: int, num_records: int) -> int:
    """Return the record at a place of an epoch's permutation."""
    key = _make_key(seed, epoch)
    if num_records > _MOST_STORED:
        return _shuffle_index(offset, key, num_records)
    return int(_store_order(key, num_records)[offset])


def pick_balanced(seed: int, epoch: int, offset: int, size: int, *class_key: int) -> int:
    """Return an element of a permutation of the classes or of the records of one class."""
    if size < _FEWEST_TO_SHUFFLE:
        return int(_sort_words(size, seed, epoch, *class_key)[offset])
    return _shuffle_index(offset, _make_key(seed, epoch, *class_key), size)


def augmentation_rng(seed: int, epoch: int, index: int) -> np.random.Generator:
    """Return the random generator of one record in one epoch."""
    entropy = np.array((seed, epoch, index, _AUGMENTATION), np.uint32)  # faster than the same tuple
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(entropy)))


@functools.lru_cache(maxsize=64)  # batches that are prepared together may be of many short epochs
def _store_order(key: int, num_records: int) -> np.ndarray:
    """Return all elements of a permutation."""
    order = [_shuffle_index(offset, key, num_records) for offset in range(num_records)]
    return np.array(order, np.int32)


@functools.lru_cache(maxsize=_NUM_CACHED)
def _sort_words(size: int, seed: int, epoch: int, *class_key: int) -> np.ndarray:
    """Permute 0 to size - 1 by sorting words that are equal in all versions of NumPy."""
    generator = np.random.PCG64(np.random.SeedSequence((seed, epoch, _ORDER, *class_key)))
    words = generator.random_raw(size)
    return np.argsort(words, kind="stable").astype(np.int16)


def _shuffle_index(offset: int, key: int, num_records: int) -> int:
    """Return one element of a permutation of 0 to num_records - 1.

    For a last element that is a power of two, grain 0.2.18 may repeat one record and drop another.
    A permutation of one number more is right. Where it gives that number, which is no record, the
    element at its place is taken instead.
    """
    last = num_records - 1
    is_power_of_two = last & (last - 1) == 0
    shuffle = functools.partial(index_shuffle, seed=key, rounds=_SHUFFLE_ROUNDS)
    if not is_power_of_two:
        return shuffle(offset, max_index=last)
    place = shuffle(offset, max_index=num_records)
    if place < num_records:
        return place
    return shuffle(place, max_index=num_records)


@functools.lru_cache(maxsize=_NUM_CACHED)
def _make_key(seed: int, epoch: int, *class_key: int) -> int:
    """Return the random seed of the order of all records, of the classes, or of one class's records."""
    # Mixed, not added: with seed + epoch, epoch 1 of seed 0 would repeat epoch 0 of seed 1.
    return int(np.random.SeedSequence((seed, epoch, _ORDER, *class_key)).generate_state(1)[0])
