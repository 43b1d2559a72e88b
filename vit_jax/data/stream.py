"""The order of examples: the record and its random numbers in each row of each step.

A stream is a random-access sequence of host batches, whose rows are filled in any order and by any
number of threads. The content depends on (seed, step, global_batch) alone: not on workers, threads,
hosts, or the step at which a run was resumed.

All numbers count from 0. A row of a training batch has its record in three steps:

* row → sample: the number in one endless sequence of samples, of which a step takes the next
  `global_batch`. The `repeats` copies of a record follow each other there, but are far apart in the
  batch;
* sample → position: the number in the same sequence without copies;
* position → record: by the order of the stream (`order`).

With two repeats and a batch of 4, the rows of the second step have the samples 4, 6, 5, 7, which
have the positions 2, 3, 2, 3.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from vit_jax.config.schema import InputConfig
from vit_jax.data.decoding.bands import name_wrong_bands
from vit_jax.data.decoding.images import UnreadableImage
from vit_jax.data.order import BalancedOrder, UniformOrder, augmentation_rng
from vit_jax.data.records import Record, Source
from vit_jax.data.transforms import EvaluationTransform, TrainTransform

T = TypeVar("T", bound=TrainTransform | EvaluationTransform)
Decode = Callable[[], np.ndarray]


class HostBatch(NamedTuple):
    """The rows of one global batch that this process supplies; R of them.

    Attributes:
      image: uint8 (R, H, W, 3), RGB, or float32 (R, H, W, C) of normalised bands; zeros where mask
        is 0.
      label: int32 (R,), or (R, K) where an image may have several.
      mask: float32 (R,), 1 for an example that counts, 0 for padding and for an image that could
        not be read.
      record_index: int64 (R,), the record in its source; -1 for padding.
    """

    image: np.ndarray
    label: np.ndarray
    mask: np.ndarray
    record_index: np.ndarray


class Example(NamedTuple):
    """The content of a row: an augmentation of a record."""

    record_index: int
    variant: int  # number of the augmentation among those of the record


@dataclasses.dataclass(frozen=True)
class Stream(Generic[T]):
    """Base of both streams; a subclass chooses the example of a row.

    Attributes:
      source: the records, at least one.
      transform: returns an image of its shape and dtype for a record.
      global_batch: number of examples of a step, over all processes.
      global_rows: rows of the global batch that this process supplies, (R,).
    """

    source: Source
    transform: T
    global_batch: int
    global_rows: np.ndarray

    def __len__(self) -> int:
        raise NotImplementedError

    def find_example(self, i: int, row: int) -> Example | None:
        """Return the example in one of the R rows of batch `i`; None for padding.

        Batches are counted from the beginning of the stream, which may be a later step of a run.
        """
        raise NotImplementedError

    def plan_decoding(
        self,
        example: Example,
        record: Record,
        memory: np.ndarray,
    ) -> Decode:
        """Return a function that decodes the record of an example.

        The array that it returns is `memory`, the place of the image in the batch, or a new one.
        """
        raise NotImplementedError

    def records(self, i: int) -> np.ndarray:
        """Return the index of the record in each row of batch `i`, int64 (R,); -1 for padding."""
        records = np.full(len(self.global_rows), -1, np.int64)
        for row in range(len(self.global_rows)):
            example = self.find_example(i, row)
            if example is not None:
                records[row] = example.record_index
        return records

    def fill(self, batch: HostBatch, i: int, part: range) -> None:
        """Fill some rows of batch `i`, which is empty; its images may hold any values."""
        # Read every record before decoding the first image. A decoder leaves little of the
        # interpreter in the caches of the processor: with reading and decoding in turns, Python
        # takes four times as long.
        decoders: dict[int, Decode] = {}
        for row in part:
            example = self.find_example(i, row)
            if example is None:
                continue
            batch.record_index[row] = example.record_index
            decode = self._read(batch, row, example)
            if decode is not None:
                decoders[row] = decode

        for row, decode in decoders.items():
            image = self._decode(decode, int(batch.record_index[row]))
            if image is not None:
                batch.image[row] = image  # copies nothing if the image is there already
                batch.mask[row] = 1.0

        filled = slice(part.start, part.stop)
        batch.image[filled][batch.mask[filled] == 0] = 0

    def _read(self, batch: HostBatch, row: int, example: Example) -> Decode | None:
        """Note the label of an example; return the function that decodes its image.

        Return None for an unreadable image, which `UnreadableLog` counts by its mask of 0.

        Raises:
          ValueError: the image has other bands than the run wants.
        """
        index = example.record_index
        try:
            with name_wrong_bands(self.source.name_of, index):
                record = self.source[index]
                batch.label[row] = record.label
                return self.plan_decoding(example, record, batch.image[row])
        except UnreadableImage:
            return None

    def _decode(self, decode: Decode, record_index: int) -> np.ndarray | None:
        """Return the image of a record; None for an unreadable one. Errors are as for `_read`."""
        try:
            with name_wrong_bands(self.source.name_of, record_index):
                return decode()
        except UnreadableImage:
            return None

    def empty_batch(
        self,
        allocate: Callable[[tuple[int, ...], np.dtype], np.ndarray] = np.empty,
    ) -> HostBatch:
        """Return a batch of padding; `allocate` returns its images for a shape and a dtype."""
        num_rows = len(self.global_rows)
        image_shape = (num_rows, *self.transform.image_shape)
        label_shape = (num_rows, *self.source.label_shape)
        return HostBatch(
            image=allocate(image_shape, self.transform.dtype),
            label=np.zeros(label_shape, np.int32),
            mask=np.zeros(num_rows, np.float32),
            record_index=np.full(num_rows, -1, np.int64),
        )

    def __getitem__(self, i: int) -> HostBatch:
        batch = self.empty_batch()
        self.fill(batch, i, range(len(self.global_rows)))
        return batch


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainStream(Stream[TrainTransform]):
    """Batches of steps `start_step` to `num_steps` - 1, shuffled anew for each epoch.

    Attributes:
      seed: random seed of order and augmentation, 0 to 2**32 - 1.
      start_step: the first step.
      num_steps: number of steps of the complete run.
      is_balanced: every class is as frequent as any other, instead of every record.
      repeats: number of augmented copies of each record, far apart in a batch. If it does not
        divide `global_batch`, the copies of the last record go on in the next batch.
      first_sample: the first sample of step `start_step`. None: `start_step * global_batch`, because
        earlier steps had the same batch. Phases with other batches need another number.
    """

    seed: int
    start_step: int
    num_steps: int
    is_balanced: bool = False
    repeats: int = 1
    first_sample: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.start_step <= self.num_steps:
            steps = self.num_steps
            raise ValueError(
                f"start_step is {self.start_step} of {steps} steps; give 0 to {steps}.",
            )

    def __len__(self) -> int:
        return self.num_steps - self.start_step

    def find_example(self, i: int, row: int) -> Example:
        first_of_batch = self._first_of_stream + i * self.global_batch
        sample = first_of_batch + int(self._sample_in_batch[row])
        position, copy = divmod(sample, self.repeats)
        record_index, epoch = self._order.find(position)
        return Example(record_index, variant=epoch * self.repeats + copy)

    def plan_decoding(
        self,
        example: Example,
        record: Record,
        memory: np.ndarray,
    ) -> Decode:
        rng = augmentation_rng(self.seed, example.variant, example.record_index)
        return self.transform.plan(record, rng, memory)

    @functools.cached_property
    def _order(self) -> UniformOrder | BalancedOrder:
        """The record and the epoch of each position."""
        if self.is_balanced:
            return BalancedOrder(self.seed, self.source.labels)
        return UniformOrder(self.seed, len(self.source))

    @functools.cached_property
    def _first_of_stream(self) -> int:
        """The first sample of step `start_step`."""
        if self.first_sample is None:
            return self.start_step * self.global_batch
        return self.first_sample

    @functools.cached_property
    def _sample_in_batch(self) -> np.ndarray:
        """The sample of each row, counted from the first sample of its batch, (R,).

        The copies of a record are far apart: with two repeats, the rows of a batch of 6 have the
        samples 0, 2, 4, 1, 3, 5.
        """
        samples = np.arange(self.global_batch)
        samples_by_copy = [samples[copy :: self.repeats] for copy in range(self.repeats)]
        return np.concatenate(samples_by_copy)[self.global_rows]


def build_train_stream(
    source: Source,
    inputs: InputConfig,
    *,
    seed: int,
    global_batch: int,
    global_rows: np.ndarray,
    start_step: int,
    num_steps: int,
    first_sample: int | None = None,
) -> TrainStream:
    """Return the stream of training batches that the options of the input describe."""
    return TrainStream(
        source=source,
        transform=TrainTransform(inputs),
        seed=seed,
        global_batch=global_batch,
        global_rows=global_rows,
        start_step=start_step,
        num_steps=num_steps,
        is_balanced=inputs.sampling == "balanced",
        repeats=inputs.repeats,
        first_sample=first_sample,
    )


class EvaluationStream(Stream[EvaluationTransform]):
    """Batches with every record once over all processes, in order.

    The last batch has padding of mask 0 and index -1.
    """

    def __len__(self) -> int:
        return -(-len(self.source) // self.global_batch)

    def find_example(self, i: int, row: int) -> Example | None:
        record_index = i * self.global_batch + int(self.global_rows[row])
        if record_index >= len(self.source):
            return None
        return Example(record_index, variant=0)

    def plan_decoding(
        self,
        example: Example,
        record: Record,
        memory: np.ndarray,
    ) -> Decode:
        return functools.partial(self.transform, record)
