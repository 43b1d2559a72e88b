"""Host batches for training and testing, prepared ahead by grain's threads and worker processes.

A run resumes from its step alone: there is no iterator state to save. An error, also a dead worker, ends the
iteration for good, because what grain yields after it is no longer the promised stream.
"""

from collections.abc import Iterator
from typing import Any, Self

import grain
import numpy as np
from absl import flags

from vit_jax.data.records import Source
from vit_jax.data.stream import EvaluationStream, HostBatch, TrainStream
from vit_jax.data.transforms import EvaluationTransform, TrainTransform
from vit_jax.data.workers import Parallelism, initialize_worker

_THREADS_ONLY = Parallelism(num_workers=0, num_threads=1)
_LOST_WORKER = (
    "A data worker died with {} batches to come. Killed by the system (out of memory) or out of shared memory "
    "(start the container with a larger --shm-size)? Lower config.input.num_workers, or set it to 0."
)


class LostWorker(RuntimeError):
    """A worker process died, and the promised stream ended with it."""


class HostBatches(Iterator[HostBatch]):
    """Iterates over a stream once. Use as a context manager, or call `close`, so that workers end with it.

    Iterating raises:
      LostWorker: a worker died.
      RuntimeError: the iteration continues after an error, or after `close`.
      Exception: whatever reading or transforming a record raised.
    """

    def __init__(self, stream: TrainStream | EvaluationStream, parallelism: Parallelism) -> None:
        if not len(stream.source):
            raise ValueError("The source has no records; give at least one.")
        self._remaining, self._failed = len(stream), False
        self._iterator = _prefetching(stream, parallelism) if self._remaining else None

    def __next__(self) -> HostBatch:
        if self._failed:
            raise RuntimeError("The input pipeline failed before; start it again at the step that is due.")
        if self._remaining == 0:
            self.close()
            raise StopIteration
        if self._iterator is None:
            raise RuntimeError(f"The input pipeline is closed with {self._remaining} batches to come.")
        try:
            batch = next(self._iterator)
        except BaseException as error:
            self._failed = True
            self.close()
            if isinstance(error, StopIteration) or "terminated unexpectedly" in str(error):
                raise LostWorker(_LOST_WORKER.format(self._remaining)) from error
            raise
        self._remaining -= 1
        return batch

    def close(self) -> None:
        """Ends threads and workers; calling it again does nothing."""
        iterator, self._iterator = self._iterator, None
        if iterator is not None:
            iterator.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def train_batches(
    source: Source,
    transform: TrainTransform,
    *,
    seed: int,
    global_batch: int,
    rows: np.ndarray,
    start_step: int,
    num_steps: int,
    parallelism: Parallelism = _THREADS_ONLY,
) -> HostBatches:
    """Batches of steps `start_step` to `num_steps` - 1, for any length of training.

    Args:
      source: at least one record.
      transform: from a record to uint8 (H, W, 3).
      seed: 0 to 2**32 - 1, of order and augmentation.
      global_batch: examples in a step, over all processes.
      rows: (R,) positions in the global batch that this process supplies.
      start_step: the step that is due.
      num_steps: of the complete run.
      parallelism: changes the speed, never the content.

    Raises:
      ValueError: the source has no records, or `start_step` is out of range.
    """
    if not 0 <= start_step <= num_steps:
        raise ValueError(f"start_step is {start_step} of {num_steps} steps; give 0 to {num_steps}.")
    stream = TrainStream(source, transform, seed, global_batch, rows, start_step, num_steps)
    return HostBatches(stream, parallelism)


def evaluation_batches(
    source: Source,
    transform: EvaluationTransform,
    *,
    global_batch: int,
    rows: np.ndarray,
    parallelism: Parallelism = _THREADS_ONLY,
) -> HostBatches:
    """Batches that hold every record exactly once over all processes: ceil(records / global_batch) for each.

    Arguments and errors as for `train_batches`.
    """
    return HostBatches(EvaluationStream(source, transform, global_batch, rows), parallelism)


def _prefetching(stream: TrainStream | EvaluationStream, parallelism: Parallelism) -> Any:
    """Grain's iterator over a stream, each thread preparing complete batches, in order."""
    options = grain.ReadOptions(parallelism.num_threads, prefetch_buffer_size=parallelism.num_threads + 1)
    dataset = grain.MapDataset.source(stream).to_iter_dataset(options)
    if parallelism.num_workers:
        if not flags.FLAGS.is_parsed():
            flags.FLAGS.mark_as_parsed()  # grain reads its flags when workers start; a library user has none
        workers = grain.MultiprocessingOptions(num_workers=parallelism.num_workers, per_worker_buffer_size=1)
        dataset = dataset.mp_prefetch(workers, worker_init_fn=initialize_worker)
    return iter(dataset)
