"""The order in which training uses records, as a function of the seed.

An order finds the record at any position of an endless sequence without the records before it, so
that a resumed run continues in the same order. An epoch is one use of every record. Its permutation
depends on the seed, the epoch and the number of elements only.
"""

import functools

import numpy as np
from grain.experimental import index_shuffle

_MOST_STORED = 2**16
"""Largest number of records whose permutation is stored, because a look-up is faster."""
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


class UniformOrder:
    """Epochs of all records."""

    def __init__(self, seed: int, num_records: int):
        self.seed = seed
        self.num_records = num_records

    def find(self, position: int) -> tuple[int, int]:
        """Return the index of the record at a position, and its epoch."""
        epoch, offset = divmod(position, self.num_records)
        shuffle_seed = _derive_seed(self.seed, epoch)
        if self.num_records <= _MOST_STORED:
            permutation = _list_shuffled(self.num_records, shuffle_seed)
            return int(permutation[offset]), epoch
        return _shuffle(offset, self.num_records, shuffle_seed), epoch


class BalancedOrder:
    """Turns of all classes: a turn has the next record of every class, which has its epochs."""

    def __init__(self, seed: int, labels: np.ndarray):
        self.seed = seed
        self.records_by_class = _group_by_class(labels)

    def find(self, position: int) -> tuple[int, int]:
        """Return the index of the record at a position, and its epoch within the class."""
        num_classes = len(self.records_by_class)
        turn, class_offset = divmod(position, num_classes)
        class_number = self._permute(class_offset, num_classes, turn)
        records = self.records_by_class[class_number]

        epoch, offset = divmod(turn, len(records))
        # The key of a class is one more than its first record: SeedSequence does not tell a
        # trailing 0 from none.
        class_key = int(records[0]) + 1
        element = self._permute(offset, len(records), epoch, class_key)
        return int(records[element]), epoch

    def _permute(self, offset: int, size: int, *key: int) -> int:
        """Return the element at an offset of the permutation of `size` elements with this key."""
        # `index_shuffle` takes 16 ms divided by the number of elements. There are too many
        # permutations to store where classes are large.
        if size < _FEWEST_SHUFFLED:
            return int(_sort_words(size, self.seed, *key)[offset])
        return _shuffle(offset, size, _derive_seed(self.seed, *key))


def augmentation_rng(seed: int, variant: int, record_index: int) -> np.random.Generator:
    """Return the random generator of one augmentation of a record."""
    # An array is faster than the tuple.
    entropy = np.array((seed, variant, record_index, _AUGMENTATION), np.uint32)
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(entropy)))


def _group_by_class(labels: np.ndarray) -> list[np.ndarray]:
    """Return the indices of the records of each class that has records."""
    by_class = np.argsort(labels, kind="stable")
    first_of_class = np.flatnonzero(np.diff(labels[by_class])) + 1
    return np.split(by_class, first_of_class)


def _shuffle(offset: int, size: int, shuffle_seed: int) -> int:
    """Return the element at an offset of a permutation of 0 to size - 1, which takes no memory.

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


@functools.lru_cache(maxsize=_NUM_STORED_EPOCHS)
def _list_shuffled(size: int, shuffle_seed: int) -> np.ndarray:
    """Return the elements of `_shuffle` at all offsets, int32 (size,)."""
    elements = [_shuffle(offset, size, shuffle_seed) for offset in range(size)]
    return np.array(elements, np.int32)


@functools.lru_cache(maxsize=_NUM_CACHED)
def _sort_words(size: int, seed: int, *key: int) -> np.ndarray:
    """Permute 0 to size - 1 by sorting words that are equal in all versions of NumPy."""
    generator = np.random.PCG64(_build_seed_sequence(seed, *key))
    words = generator.random_raw(size)
    return np.argsort(words, kind="stable").astype(np.int16)


@functools.lru_cache(maxsize=_NUM_CACHED)
def _derive_seed(seed: int, *key: int) -> int:
    """Return the random seed of the permutation with this key."""
    return int(_build_seed_sequence(seed, *key).generate_state(1)[0])


def _build_seed_sequence(seed: int, epoch: int, *class_key: int) -> np.random.SeedSequence:
    """Return the seed of an epoch of all records, of a turn, or of an epoch of one class."""
    # Mixed, not added: with seed + epoch, epoch 1 of seed 0 would repeat epoch 0 of seed 1.
    return np.random.SeedSequence((seed, epoch, _ORDER, *class_key))
