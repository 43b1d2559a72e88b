"""The order in which training uses records, as a function of the seed.

An order finds the record at any position of an endless sequence without the records before it, so
that a resumed run continues in the same order. It is made of permutations: an epoch is one use of
every record, in the order of the permutation with the number of the epoch.
"""

import functools
from typing import NamedTuple

import numpy as np
from grain.experimental import index_shuffle

# The purpose of a random number is a part of its seed.
_ORDER = 0
_AUGMENTATION = 1

# Another value of one of these two changes the order of records, and with it recorded runs.
_SHUFFLE_ROUNDS = 4
"""Rounds of `index_shuffle`, as in grain's global shuffle."""
_FEWEST_SHUFFLED = 512
"""Elements from which balanced sampling uses `index_shuffle`; fewer are sorted, which is faster."""

# These change only time and memory.
_MOST_STORED = 2**16
"""Records of an epoch up to which its shuffled order is stored, because a look-up is faster."""
_NUM_STORED_EPOCHS = 64
"""Stored orders: a batch of a small dataset spans many epochs."""
_NUM_CACHED = 4096
"""Cached seeds and sorted permutations (up to 8 MiB), each of which takes 30 us to compute."""


class UniformOrder:
    """Epochs of all records."""

    def __init__(self, seed: int, num_records: int):
        self.seed = seed
        self.num_records = num_records

    def find(self, position: int) -> tuple[int, int]:
        """Return the index of the record at a position, and its epoch."""
        epoch, offset = divmod(position, self.num_records)
        permutation = Permutation(self.seed, epoch, self.num_records)
        if self.num_records <= _MOST_STORED:
            return int(_list_shuffled(permutation)[offset]), epoch
        return permutation.find_shuffled(offset), epoch


class BalancedOrder:
    """Turns of all classes: a turn has the next record of every class.

    With two records a, b of one class and four of another, 0 to 3, turns may be a 2, 1 b, b 3, 0 a:
    two epochs of the first class and one of the second.
    """

    def __init__(self, seed: int, labels: np.ndarray):
        self.seed = seed
        self.records_by_class = _group_by_class(labels)

    def find(self, position: int) -> tuple[int, int]:
        """Return the index of the record at a position, and its epoch within the class."""
        num_classes = len(self.records_by_class)
        turn, class_offset = divmod(position, num_classes)
        order_of_classes = Permutation(self.seed, turn, num_classes)
        class_number = self._find_element(order_of_classes, class_offset)

        records = self.records_by_class[class_number]
        epoch, offset = divmod(turn, len(records))
        class_key = int(records[0]) + 1
        order_of_records = Permutation(self.seed, epoch, len(records), class_key)
        element = self._find_element(order_of_records, offset)
        return int(records[element]), epoch

    def _find_element(self, permutation: "Permutation", offset: int) -> int:
        """Return the element at an offset, in the form for the size.

        Shuffled permutations are not stored: there is one for each class and epoch.
        """
        if permutation.size < _FEWEST_SHUFFLED:
            return permutation.find_sorted(offset)
        return permutation.find_shuffled(offset)


class Permutation(NamedTuple):
    """One of the orders of the elements 0 to size - 1, a function of these values.

    It has two forms, which are different orders: `find_shuffled` and `find_sorted`.

    Attributes:
      seed: random seed of the run.
      number: number of the epoch or turn.
      size: number of elements.
      class_key: tells the classes of balanced sampling apart: one more than the first record of a
        class. 0: the elements are all records, or all classes.
    """

    seed: int
    number: int
    size: int
    class_key: int = 0

    def find_sorted(self, offset: int) -> int:
        """Return the element at an offset of the sorted form, which is for small sizes."""
        return int(_list_sorted(self)[offset])

    def find_shuffled(self, offset: int) -> int:
        """Return the element at an offset of the shuffled form, which takes no memory.

        `index_shuffle` of grain 0.2.18 is wrong for a size of a power of two plus one: it may
        repeat one element and drop another (docs/decisions, 5). Such a size shuffles one element
        more, `size` itself, and replaces it by the element at the last offset. With size 3:

            offset    0  1  2  3
            shuffle   2  3  0  1
            element   2  1  0
        """
        shuffle = functools.partial(
            index_shuffle,
            seed=_derive_seed(self),
            rounds=_SHUFFLE_ROUNDS,
        )
        if not _is_power_of_two(self.size - 1):
            return shuffle(offset, max_index=self.size - 1)

        element = shuffle(offset, max_index=self.size)
        if element == self.size:
            return shuffle(self.size, max_index=self.size)
        return element


@functools.lru_cache(maxsize=_NUM_STORED_EPOCHS)
def _list_shuffled(permutation: Permutation) -> np.ndarray:
    """Return the elements of the shuffled form, int32 (size,)."""
    elements = [permutation.find_shuffled(offset) for offset in range(permutation.size)]
    return np.array(elements, np.int32)


@functools.lru_cache(maxsize=_NUM_CACHED)
def _list_sorted(permutation: Permutation) -> np.ndarray:
    """Return the elements of the sorted form, int16 (size,).

    They are in the order of random words, which are equal in all versions of NumPy.
    """
    assert permutation.size <= np.iinfo(np.int16).max
    words = np.random.PCG64(_build_seed_sequence(permutation)).random_raw(permutation.size)
    return np.argsort(words, kind="stable").astype(np.int16)


@functools.lru_cache(maxsize=_NUM_CACHED)
def _derive_seed(permutation: Permutation) -> int:
    """Return the random seed of the shuffled form."""
    return int(_build_seed_sequence(permutation).generate_state(1)[0])


def _build_seed_sequence(permutation: Permutation) -> np.random.SeedSequence:
    """Return the seeds of a permutation.

    They are mixed, not added: with seed + number, epoch 1 of seed 0 would repeat epoch 0 of seed 1.
    """
    seed, number, _, class_key = permutation
    return np.random.SeedSequence((seed, number, _ORDER, class_key))


def _is_power_of_two(number: int) -> bool:
    """Return whether a number is a power of two."""
    return number > 0 and number & (number - 1) == 0


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
