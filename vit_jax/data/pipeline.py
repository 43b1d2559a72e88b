"""Host batches for training and testing, prepared ahead by grain's threads and worker processes.

A run resumes from its step alone: there is no iterator state to save.
"""

import concurrent.futures
import contextlib
import ctypes
import functools
import weakref
from collections.abc import Iterator

import grain
import numpy as np
from absl import flags

from vit_jax.data.stream import HostBatch, Stream
from vit_jax.data.workers import (
    Parallelism,
    build_segment_prefix,
    initialize_worker,
    is_lost_worker,
    start_workers,
)

_THREADS_ONLY = Parallelism(num_workers=0, num_threads=1)
_ROWS_AT_ONCE = 16
"""Smallest number of rows that a thread takes."""
_BYTES_AT_ONCE = 2**20
"""Bytes of images that a thread takes: more rows of small images, as a hand-over costs time."""
_LOST_WORKER = (
    "A data worker died with {} batches to come. Killed by the system (out of memory) or out of "
    "shared memory (start the container with a larger --shm-size)? Lower config.input.num_workers, "
    "or set it to 0."
)


class LostWorker(RuntimeError):
    """A worker process died before the end of the stream."""


@contextlib.contextmanager
def open_batches(
    stream: Stream,
    parallelism: Parallelism = _THREADS_ONLY,
) -> Iterator[Iterator[HostBatch]]:
    """Yield an iterator over the batches of a stream; threads and workers end with the context.

    Args:
      stream: a stream over at least one record.
      parallelism: changes the speed, never the content.

    Raises:
      ValueError: the source has no records; while iterating, the context has ended.
      LostWorker: while iterating, a worker died.
      Exception: while iterating, an error of reading or transforming a record.
    """
    if not len(stream.source):
        raise ValueError("The source has no records; give at least one.")
    shared = _SharedRows(stream, parallelism.num_threads)
    with (
        contextlib.closing(shared),
        contextlib.closing(_prefetch_batches(shared, parallelism)) as batches,
    ):
        yield _take_all(batches, len(stream))


def _take_all(batches: Iterator[HostBatch], count: int) -> Iterator[HostBatch]:
    """Yield exactly `count` batches, or raise the first error: later batches of grain are wrong."""
    for remaining in range(count, 0, -1):
        try:
            if remaining == count:
                start_workers(batches)
            batch = next(batches)
        except Exception as error:
            if is_lost_worker(error):
                raise LostWorker(_LOST_WORKER.format(remaining)) from error
            raise
        yield batch


class _SharedRows:
    """The batches of a stream; threads share the rows of a batch, so that few are in memory."""

    def __init__(self, stream: Stream, num_threads: int) -> None:
        self._stream = stream
        self._num_threads = num_threads
        self._threads = concurrent.futures.ThreadPoolExecutor(num_threads, "rows")
        self._free: list[np.ndarray] = []

    def __len__(self) -> int:
        return len(self._stream)

    def __getitem__(self, i: int) -> HostBatch:
        batch = self._stream.empty_batch(self._lend)
        num_rows = len(batch.label)
        even_share = -(-num_rows // self._num_threads)
        at_once = max(_ROWS_AT_ONCE, min(even_share, _BYTES_AT_ONCE // batch.image[0].nbytes))
        pending = []
        for start in range(0, num_rows, at_once):
            rows = range(start, min(start + at_once, num_rows))
            pending.append(self._threads.submit(self._stream.fill, batch, i, rows))
        for filled in pending:
            filled.result()
        return batch

    def _lend(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """Return an array, if possible in used memory: the system clears new memory."""
        try:
            memory = self._free.pop()
        except IndexError:
            memory = np.empty(shape, dtype)
        # Every view of the array refers to this, and none to `memory`.
        lent = (ctypes.c_char * memory.nbytes).from_buffer(memory.data)
        weakref.finalize(lent, self._free.append, memory)
        return np.frombuffer(memoryview(lent), dtype).reshape(shape)

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self._stream, self._num_threads)  # each worker starts its threads

    def close(self) -> None:
        """End the threads."""
        self._threads.shutdown(cancel_futures=True)


def _prefetch_batches(
    batches: _SharedRows,
    parallelism: Parallelism,
) -> "grain.DatasetIterator[HostBatch]":
    """Return grain's iterator over batches, in order; several are prepared at a time."""
    options = grain.ReadOptions(num_threads=2, prefetch_buffer_size=2)
    dataset = grain.MapDataset.source(batches).to_iter_dataset(options)
    if parallelism.num_workers:
        if not flags.FLAGS.is_parsed():
            # Grain reads its flags when workers start; a user of the library has none.
            flags.FLAGS.mark_as_parsed()
        workers = grain.MultiprocessingOptions(
            num_workers=parallelism.num_workers,
            per_worker_buffer_size=1,
        )
        initialize = functools.partial(initialize_worker, build_segment_prefix())
        dataset = dataset.mp_prefetch(workers, worker_init_fn=initialize)
    return iter(dataset)
