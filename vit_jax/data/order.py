"""The record that training uses at each position, and the random numbers of its augmentations.

Both are functions of the seed: an order finds the record at any position of an endless sequence
without the records before it, so that a resumed run continues in the same order.

* `UniformOrder` permutes all records, once for each epoch.
* `BalancedOrder` permutes the classes once for each turn, and the records of a class once for each
  epoch of the class.
"""

import functools
from typing import NamedTuple

import numpy as np
from grain.experimental import index_shuffle

# Do not change these four: they decide the random numbers of all runs, also of recorded ones.
_ORDER = 0  # a part of the seed of an order
_AUGMENTATION = 1  # a part of the seed of an augmentation
_SHUFFLE_ROUNDS = 4  # rounds of `index_shuffle`, as in grain's global shuffle
_MIN_SIZE_SHUFFLED = 512  # `BalancedOrder` draws permutations of fewer elements by random words

# These change only time and memory.
_MAX_SIZE_LISTED = 2**16  # `UniformOrder` lists permutations of at most this size
_NUM_CACHED_LISTS = 64  # one for each epoch, and a batch of a small dataset has many epochs
_NUM_CACHED = 4096  # seeds, orders by random words: each 30 us to compute, up to 1 KiB of memory


class UniformOrder:
    """Epochs of all records."""

    def __init__(self, seed: int, num_records: int):
        self.seed = seed
        self.num_records = num_records

    def find(self, position: int) -> tuple[int, int]:
        """Return the index of the record at a position, and its epoch."""
        epoch, offset = divmod(position, self.num_records)
        permutation = Permutation(self.seed, epoch, self.num_records)
        # Always by shuffling, also few records: recorded runs had this order.
        if self.num_records <= _MAX_SIZE_LISTED:
            return permutation.find_shuffled_in_list(offset), epoch
        return permutation.find_shuffled(offset), epoch


class BalancedOrder:
    """Turns of all classes: a turn has the next record of every class.

    For example, with the records a and b of one class and 0 to 3 of another:

        turn           0    1    2    3
        first class    a    b    b    a     two epochs, a b and b a
        second class   2    1    3    0     one epoch
        order          a 2  1 b  b 3  0 a   classes are in random order, too
    """

    def __init__(self, seed: int, labels: np.ndarray):
        self.seed = seed
        self.records_by_class = _group_by_class(labels)

    def find(self, position: int) -> tuple[int, int]:
        """Return the index of the record at a position, and its epoch within the class."""
        num_classes = len(self.records_by_class)
        turn, class_offset = divmod(position, num_classes)
        order_of_classes = Permutation(self.seed, turn, num_classes)
        class_number = order_of_classes.find_by_words_or_shuffled(class_offset)

        records = self.records_by_class[class_number]
        epoch, offset = divmod(turn, len(records))
        # The first record of a class stays the same if another class becomes empty, its number does
        # not. Plus 1, as 0 stands for no class.
        class_key = int(records[0]) + 1
        order_of_records = Permutation(self.seed, epoch, len(records), class_key)
        element = order_of_records.find_by_words_or_shuffled(offset)
        return int(records[element]), epoch


class Permutation(NamedTuple):
    """A random order of the elements 0 to size - 1, a function of these values.

    There are two ways to draw it, which give different orders: `index_shuffle`, which finds one
    element without the others, and a random word for each element, which is faster for few.

        find_shuffled                by `index_shuffle`
        find_shuffled_in_list        the same order, from a cached list of all elements
        find_by_words_or_shuffled    few elements by random words, many by `index_shuffle`

    Attributes:
      seed: random seed of the run.
      number: number of the epoch or turn.
      size: number of elements.
      class_key: key of the class whose records are the elements; 0: they are all records, or all
        classes.
    """

    seed: int
    number: int
    size: int
    class_key: int = 0

    def find_by_words_or_shuffled(self, offset: int) -> int:
        """Return the element at an offset: of few by random words, else by `find_shuffled`."""
        if self.size < _MIN_SIZE_SHUFFLED:
            return int(_list_by_random_words(self)[offset])
        return self.find_shuffled(offset)

    def find_shuffled_in_list(self, offset: int) -> int:
        """Return the result of `find_shuffled`, from a cached list of all elements."""
        return int(_list_shuffled(self)[offset])

    def find_shuffled(self, offset: int) -> int:
        """Return the element at an offset, drawn by `index_shuffle`."""
        if _is_power_of_two(self.size - 1):  # sizes for which `index_shuffle` has a fault
            return self._find_despite_fault(offset)
        return self._shuffle(offset, self.size)

    def _find_despite_fault(self, offset: int) -> int:
        """Return the element at an offset for a size of a power of two plus one.

        For these sizes `index_shuffle` of grain 0.2.18 may repeat one element and drop another
        (docs/decisions, 5). So one number too many is shuffled. With size 3:

            offset                   0  1  2  3
            0 to 3 are shuffled      2 [3] 0  1
            element                  2  1  0

        Where the surplus number `size` comes up, here 3, it is replaced by the number at the last
        offset, for which no caller asks. So each of 0 to size - 1 comes up once.
        """
        element = self._shuffle(offset, self.size + 1)
        if element == self.size:
            return self._shuffle(self.size, self.size + 1)
        return element

    def _shuffle(self, offset: int, size: int) -> int:
        """Return the element at an offset of `size` shuffled ones."""
        return index_shuffle(
            offset,
            max_index=size - 1,
            seed=_derive_seed(self),
            rounds=_SHUFFLE_ROUNDS,
        )


# The results of these functions are cached, by the values of the permutation.


@functools.lru_cache(maxsize=_NUM_CACHED_LISTS)
def _list_shuffled(permutation: Permutation) -> np.ndarray:
    """Return all elements in the order of `index_shuffle`, int32 (size,)."""
    elements = [permutation.find_shuffled(offset) for offset in range(permutation.size)]
    return np.array(elements, np.int32)


@functools.lru_cache(maxsize=_NUM_CACHED)
def _list_by_random_words(permutation: Permutation) -> np.ndarray:
    """Return all elements in the order of random words, int16 (size,).

    The words are equal in all versions of NumPy.
    """
    assert permutation.size <= np.iinfo(np.int16).max, (
        "only permutations of fewer elements than _MIN_SIZE_SHUFFLED are drawn by words"
    )
    words = np.random.PCG64(_build_seed_sequence(permutation)).random_raw(permutation.size)
    return np.argsort(words, kind="stable").astype(np.int16)


@functools.lru_cache(maxsize=_NUM_CACHED)
def _derive_seed(permutation: Permutation) -> int:
    """Return the random seed of `index_shuffle`."""
    return int(_build_seed_sequence(permutation).generate_state(1)[0])


def _build_seed_sequence(permutation: Permutation) -> np.random.SeedSequence:
    """Return the seeds of a permutation; its size has no part in them.

    They are mixed, not added: with seed + number, epoch 1 of seed 0 would repeat epoch 0 of seed 1.
    """
    # `augmentation_rng` has (seed, variant, record, 1): the same for record 0 if `class_key` is 1 and
    # `number` is its variant. This does no harm, and stays for the sake of recorded runs.
    entropy = (permutation.seed, permutation.number, _ORDER, permutation.class_key)
    return np.random.SeedSequence(entropy)


def _is_power_of_two(number: int) -> bool:
    """Return whether a number is a power of two."""
    return number > 0 and number & (number - 1) == 0


def augmentation_rng(seed: int, variant: int, record_index: int) -> np.random.Generator:
    """Return the random generator of one augmentation of a record.

    `variant` tells the augmentations of a record apart, such as the number of the epoch.
    """
    # Called for every record, so with an array, which is faster than a tuple.
    entropy = np.array((seed, variant, record_index, _AUGMENTATION), np.uint32)
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(entropy)))


def _group_by_class(labels: np.ndarray) -> list[np.ndarray]:
    """Return the indices of the records of each class that has records."""
    by_class = np.argsort(labels, kind="stable")
    starts = np.flatnonzero(np.diff(labels[by_class])) + 1  # all classes but the first
    return np.split(by_class, starts)
