"""The order of examples: the record and its random numbers in each row of each step.

A stream is a random-access sequence of host batches, whose rows are filled in any order and by any number of threads.
Row r of step t is position t x global_batch + r of one endless sequence, a fresh permutation of the records for each
epoch; or, balanced, of the classes, each with the next record of its permutation. So the content depends on
(seed, step, global_batch) alone: not on workers, threads, hosts, or the step at which a run was resumed.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from grain.experimental import index_shuffle

from vit_jax.data.decoding.images import UnreadableImage
from vit_jax.data.records import Record, Source
from vit_jax.data.transforms import EvaluationTransform, TrainTransform

_ORDER = 0
_AUGMENTATION = 1  # the purpose of random numbers; keeps their seeds apart
_SHUFFLE_ROUNDS = 4  # grain's own choice for its global shuffle
_FEW_RECORDS = (
    2**16
)  # up to here an epoch's order is stored: looking it up is faster than computing it
_FEW_TO_SHUFFLE = 512  # below, grain's `index_shuffle` is slow: 16 ms divided by the number of elements, for each call
_NUM_CACHED = (
    4096  # orders, up to 8 MiB, and keys; where classes are more, an order is made in about 30 us
)


class HostBatch(NamedTuple):
    """The rows of one global batch that this process supplies; R of them.

    Attributes:
      image: uint8 (R, H, W, 3), RGB; zeros where mask is 0.
      label: int32 (R,), or (R, K) where an image may have several.
      mask: float32 (R,), 1 for an example that counts, 0 for padding and for an image that could not be read.
      record_index: int64 (R,), the record in its source; -1 for padding.
    """

    image: np.ndarray
    label: np.ndarray
    mask: np.ndarray
    record_index: np.ndarray


Plan = Callable[[Record, np.ndarray], Callable[[], np.ndarray]]
"""Takes a record and memory for its image; returns a function that decodes it to uint8 (H, W, 3)."""


class Stream:
    """Base of both streams; a subclass has the fields below and chooses the record of a row.

    Attributes:
      source: at least one record.
      transform: from a record to uint8 (H, W, 3).
      global_batch: examples in a step, over all processes.
      rows: (R,) positions in the global batch that this process supplies.
    """

    source: Source
    transform: TrainTransform | EvaluationTransform
    global_batch: int
    rows: np.ndarray

    def __len__(self) -> int:
        raise NotImplementedError

    def _example(self, i: int, row: int) -> tuple[int, Plan] | None:
        """Return the number and the plan of the record in a row of batch `i`; None for padding."""
        raise NotImplementedError

    def records(self, i: int) -> np.ndarray:
        """Return the record in each row of batch `i`, int64 (R,), without reading any; -1 for padding."""
        examples = (self._example(i, row) for row in range(len(self.rows)))
        return np.array([-1 if example is None else example[0] for example in examples], np.int64)

    def fill(self, batch: HostBatch, i: int, part: range) -> None:
        """Fill some rows of batch `i`, which is empty; its images may hold any values."""
        # All is read and chosen before the first is decoded: a decoder leaves little of the interpreter in the caches
        # of the processor, and in turns Python takes four times as long.
        planned = []
        for row in part:
            if (example := self._example(i, row)) is None:
                continue
            batch.record_index[row], plan = example
            with contextlib.suppress(
                UnreadableImage
            ):  # zeros with mask 0: the run goes on, and `UnreadableLog` counts
                record = self.source[example[0]]
                batch.label[row] = record.label
                planned.append((row, plan(record, batch.image[row])))
        for row, decode in planned:
            with contextlib.suppress(UnreadableImage):
                batch.image[row] = decode()
                batch.mask[row] = 1.0
        filled = slice(part.start, part.stop)
        batch.image[filled][batch.mask[filled] == 0] = 0

    def empty_batch(
        self, allocate: Callable[[tuple[int, ...], type[np.uint8]], np.ndarray] = np.empty
    ) -> HostBatch:
        """Return a batch of padding, with images that `allocate` returns for a shape and a dtype."""
        return HostBatch(
            image=allocate((len(self.rows), *self.transform.image_size, 3), np.uint8),
            label=np.zeros((len(self.rows), *self.source.label_shape), np.int32),
            mask=np.zeros(len(self.rows), np.float32),
            record_index=np.full(len(self.rows), -1, np.int64),
        )

    def __getitem__(self, i: int) -> HostBatch:
        batch = self.empty_batch()
        self.fill(batch, i, range(len(self.rows)))
        return batch


@dataclasses.dataclass(frozen=True)
class TrainStream(Stream):
    """Batches of steps `start_step` to `num_steps` - 1, shuffled anew for each epoch, for any length of training.

    Attributes:
      seed: 0 to 2**32 - 1, of order and augmentation.
      start_step: the step that is due.
      num_steps: of the complete run.
      is_balanced: every class as often as any other, not every record.
      repeats: augmented copies of each chosen record, as far apart in a batch as they can be. Where it does not divide
        `global_batch`, the copies of the last record go on in the next batch.
      first_image: images, copies included, that came before step `start_step`. None: as many as of steps like these.
    """

    source: Source
    transform: TrainTransform
    seed: int
    global_batch: int
    rows: np.ndarray
    start_step: int
    num_steps: int
    is_balanced: bool = False
    repeats: int = 1
    first_image: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.start_step <= self.num_steps:
            raise ValueError(
                f"start_step is {self.start_step} of {self.num_steps} steps; give 0 to {self.num_steps}."
            )

    def __len__(self) -> int:
        return self.num_steps - self.start_step

    def _example(self, i: int, row: int) -> tuple[int, Plan]:
        first = (
            self.start_step * self.global_batch if self.first_image is None else self.first_image
        )
        position, copy = divmod(
            first + i * self.global_batch + int(self._places[row]), self.repeats
        )
        epoch, index = self._record_of(position)
        rng = augmentation_rng(self.seed, epoch * self.repeats + copy, index)
        return index, lambda record, out: self.transform.plan(record, rng, out)

    def _record_of(self, position: int) -> tuple[int, int]:
        """Return the number of earlier epochs of a record, and its number."""
        if not self.is_balanced:
            epoch, offset = divmod(position, len(self.source))
            return epoch, record_at(self.seed, epoch, offset, len(self.source))
        turn, place = divmod(position, len(self._members))
        members = self._members[_balanced_at(self.seed, turn, place, len(self._members))]
        epoch, offset = divmod(turn, len(members))
        # One more than its first record identifies the class: SeedSequence does not tell a trailing 0 from none.
        return epoch, int(
            members[_balanced_at(self.seed, epoch, offset, len(members), int(members[0]) + 1)]
        )

    @functools.cached_property
    def _places(self) -> np.ndarray:
        """The place of each row among the images of a batch, where copies of one record are neighbours."""
        places = np.arange(self.global_batch)
        return np.concatenate([places[copy :: self.repeats] for copy in range(self.repeats)])[
            self.rows
        ]

    @functools.cached_property
    def _members(self) -> list[np.ndarray]:
        """The records of each class that has any."""
        labels = self.source.labels
        by_class = np.argsort(labels, kind="stable")
        return np.split(by_class, np.flatnonzero(np.diff(labels[by_class])) + 1)


@dataclasses.dataclass(frozen=True)
class EvaluationStream(Stream):
    """Batches that hold every record once over all processes, in order; the last has padding of mask 0 and index -1."""

    source: Source
    transform: EvaluationTransform
    global_batch: int
    rows: np.ndarray

    def __len__(self) -> int:
        return -(-len(self.source) // self.global_batch)

    def _example(self, i: int, row: int) -> tuple[int, Plan] | None:
        index = i * self.global_batch + int(self.rows[row])
        return (index, self._plan) if index < len(self.source) else None

    def _plan(self, record: Record, out: np.ndarray) -> Callable[[], np.ndarray]:
        return functools.partial(self.transform, record)


def record_at(seed: int, epoch: int, offset: int, num_records: int) -> int:
    """Return the record at a place of an epoch's permutation; for many records the permutation is not stored."""
    key = _epoch_key(seed, epoch)
    if num_records <= _FEW_RECORDS:
        return int(_stored_order(key, num_records)[offset])
    return _shuffled(offset, key, num_records)


def augmentation_rng(seed: int, epoch: int, index: int) -> np.random.Generator:
    """Return the random generator of one record in one epoch."""
    entropy = np.array(
        (seed, epoch, index, _AUGMENTATION), np.uint32
    )  # the same as the tuple, and faster
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(entropy)))


def _balanced_at(seed: int, epoch: int, offset: int, size: int, *class_key: int) -> int:
    """Return an element of a permutation of the classes or, with `class_key`, of the records of one class."""
    if size < _FEW_TO_SHUFFLE:
        return int(_short_order(size, seed, epoch, *class_key)[offset])
    return _shuffled(offset, _epoch_key(seed, epoch, *class_key), size)


@functools.lru_cache(maxsize=_NUM_CACHED)
def _short_order(size: int, seed: int, epoch: int, *class_key: int) -> np.ndarray:
    """Permute 0 to size - 1 by sorting random words, whose values NumPy guarantees for all versions."""
    words = np.random.PCG64(np.random.SeedSequence((seed, epoch, _ORDER, *class_key))).random_raw(
        size
    )
    return np.argsort(words, kind="stable").astype(np.int16)


@functools.lru_cache(
    maxsize=64
)  # the batches that are prepared at a time may be of many epochs of few records
def _stored_order(key: int, num_records: int) -> np.ndarray:
    return np.array(
        [_shuffled(offset, key, num_records) for offset in range(num_records)], np.int32
    )


def _shuffled(offset: int, key: int, num_records: int) -> int:
    """Return one element of a permutation of 0 to num_records - 1."""
    last = num_records - 1
    shuffle = functools.partial(index_shuffle, seed=key, rounds=_SHUFFLE_ROUNDS)
    if last & (last - 1):
        return shuffle(offset, max_index=last)
    # For some powers of two grain 0.2.18 repeats one record and drops another. So permute one number more, and
    # replace that number, where it comes out, by its own image.
    place = shuffle(offset, max_index=num_records)
    return place if place < num_records else shuffle(place, max_index=num_records)


@functools.lru_cache(maxsize=_NUM_CACHED)
def _epoch_key(seed: int, epoch: int, *class_key: int) -> int:
    """Return the random seed of the order of all records, of the classes, or of the records of one class."""
    # Mixed, not added: with seed + epoch, epoch 1 of seed 0 would repeat epoch 0 of seed 1.
    return int(np.random.SeedSequence((seed, epoch, _ORDER, *class_key)).generate_state(1)[0])
