"""Host batches for training and testing, prepared ahead by grain's threads and worker processes.

A run resumes from its step alone: there is no iterator state to save.
"""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import grain
from absl import flags

from vit_jax.data.stream import EvaluationStream, HostBatch, TrainStream
from vit_jax.data.workers import Parallelism, initialize_worker, segment_prefix, start_workers

_THREADS_ONLY = Parallelism(num_workers=0, num_threads=1)
_LOST_WORKER = (
    "A data worker died with {} batches to come. Killed by the system (out of memory) or out of shared memory "
    "(start the container with a larger --shm-size)? Lower config.input.num_workers, or set it to 0."
)


class LostWorker(RuntimeError):
    """A worker process died, and the promised stream ended with it."""


@contextlib.contextmanager
def open_batches(
    stream: TrainStream | EvaluationStream, parallelism: Parallelism = _THREADS_ONLY
) -> Iterator[Iterator[HostBatch]]:
    """The batches of a stream, once; threads and workers end with the context.

    Args:
      stream: of a source with at least one record.
      parallelism: changes the speed, never the content.

    Raises:
      ValueError: the source has no records; while iterating, the context has ended.
      LostWorker: while iterating, a worker died.
      Exception: while iterating, whatever reading or transforming a record raised.
    """
    if not len(stream.source):
        raise ValueError("The source has no records; give at least one.")
    with contextlib.closing(_prefetching(stream, parallelism)) as batches:
        yield _promised(batches, len(stream))


def _promised(batches: Iterator[HostBatch], count: int) -> Iterator[HostBatch]:
    """So many batches and no fewer. It ends with the first error: what grain yields after it is another stream."""
    for remaining in range(count, 0, -1):
        try:
            if remaining == count:
                start_workers(batches)
            batch = next(batches)
        except Exception as error:
            if isinstance(error, StopIteration) or "terminated unexpectedly" in str(error):
                raise LostWorker(_LOST_WORKER.format(remaining)) from error
            raise
        yield batch


def _prefetching(stream: TrainStream | EvaluationStream, parallelism: Parallelism) -> Any:
    """Grain's iterator over a stream, each thread preparing complete batches, in order."""
    options = grain.ReadOptions(parallelism.num_threads, prefetch_buffer_size=parallelism.num_threads + 1)
    dataset = grain.MapDataset.source(stream).to_iter_dataset(options)
    if parallelism.num_workers:
        if not flags.FLAGS.is_parsed():
            flags.FLAGS.mark_as_parsed()  # grain reads its flags when workers start; a library user has none
        workers = grain.MultiprocessingOptions(num_workers=parallelism.num_workers, per_worker_buffer_size=1)
        initialize = functools.partial(initialize_worker, segment_prefix())
        dataset = dataset.mp_prefetch(workers, worker_init_fn=initialize)
    return iter(dataset)
