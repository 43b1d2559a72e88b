"""Host batches for training and testing, prepared ahead by grain's threads and worker processes.

Only the step is needed to continue a run: there is no iterator state to save. An error, also a worker that
is gone, ends the iteration for good, because what grain yields after it is no longer the promised stream.
"""

from collections.abc import Iterator
from types import TracebackType
from typing import Any, Protocol, Self

import grain
import numpy as np
from absl import flags

from vit_jax.data.sources import Source
from vit_jax.data.stream import EvaluationStream, HostBatch, TrainStream
from vit_jax.data.transforms import EvaluationTransform, TrainTransform
from vit_jax.data.workers import Parallelism, initialize_worker

_THREADS_ONLY = Parallelism(num_workers=0, num_threads=1)


class Stream(Protocol):
    """Host batches by their place; can be pickled to worker processes."""

    def __len__(self) -> int: ...

    def __getitem__(self, i: int) -> HostBatch: ...


class LostWorker(RuntimeError):
    """A worker process is gone, and with it the promised stream."""


class HostBatches(Iterator[HostBatch]):
    """Iterates over a stream once. Use as a context manager, or call `close`, so that workers end with it.

    Iterating raises:
      LostWorker: a worker died.
      RuntimeError: the iteration goes on after an error, or after `close`.
      Exception: whatever reading or transforming a record raised.
    """

    def __init__(self, stream: Stream, parallelism: Parallelism) -> None:
        self._remaining = len(stream)
        self._failed = False
        self._iterator = _prefetching(stream, parallelism) if self._remaining else None

    def __len__(self) -> int:
        """Batches still to come."""
        return self._remaining

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
        except StopIteration as error:
            self._fail()
            raise LostWorker(_LOST_WORKER.format(self._remaining)) from error
        except BaseException as error:
            self._fail()
            if "terminated unexpectedly" in str(error):
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _fail(self) -> None:
        self._failed = True
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
      num_steps: of the whole run.
      parallelism: changes the speed, never the content.

    Raises:
      ValueError: an argument lies outside its range.
    """
    if not 0 <= seed < 2**32:
        raise ValueError(f"seed is {seed}; give 0 to 2**32 - 1.")
    if not 0 <= start_step <= num_steps:
        raise ValueError(f"start_step is {start_step} of {num_steps} steps; give 0 to {num_steps}.")
    rows = _checked_rows(source, global_batch, rows)
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
    return HostBatches(
        EvaluationStream(source, transform, global_batch, _checked_rows(source, global_batch, rows)), parallelism
    )


_LOST_WORKER = (
    "A data worker died with {} batches to come. Killed by the system (out of memory) or out of shared memory "
    "(start the container with a larger --shm-size)? Lower config.input.num_workers, or set it to 0."
)


def _prefetching(stream: Stream, parallelism: Parallelism) -> Any:
    """Grain's iterator over a stream, each thread preparing whole batches, in order."""
    options = grain.ReadOptions(parallelism.num_threads, prefetch_buffer_size=parallelism.num_threads + 1)
    dataset = grain.MapDataset.source(stream).to_iter_dataset(options)
    if parallelism.num_workers:
        if not flags.FLAGS.is_parsed():
            flags.FLAGS.mark_as_parsed()  # grain reads its flags when workers start; a library user has none
        workers = grain.MultiprocessingOptions(num_workers=parallelism.num_workers, per_worker_buffer_size=1)
        dataset = dataset.mp_prefetch(workers, worker_init_fn=initialize_worker)
    return iter(dataset)


def _checked_rows(source: Source, global_batch: int, rows: np.ndarray) -> np.ndarray:
    rows = np.asarray(rows, np.int64)
    if len(source) == 0:
        raise ValueError("The source has no records; give at least one.")
    if rows.ndim != 1 or len(rows) == 0 or not 0 <= rows.min() <= rows.max() < global_batch:
        raise ValueError(f"rows is {rows}; give positions from 0 to {global_batch - 1} in a batch of {global_batch}.")
    return rows
