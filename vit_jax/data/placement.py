"""Place the rows that each process prepares as global arrays on the devices, a few batches ahead.

The sharding comes from the caller, so nothing here knows meshes; it shards the batch dimension
only.
"""

import collections
import contextlib
import math
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import jax
import numpy as np

from vit_jax.arrays import Batch
from vit_jax.data.pipeline import open_batches
from vit_jax.data.records import Source
from vit_jax.data.stream import EvaluationStream, HostBatch, Stream
from vit_jax.data.transforms import EvaluationTransform
from vit_jax.data.unreadable import UnreadableLog
from vit_jax.data.workers import choose_parallelism

T = TypeVar("T")
H = TypeVar("H")  # a batch on the host


def find_local_rows(sharding: jax.sharding.Sharding, global_batch: int) -> np.ndarray:
    """Return the rows of the global batch on devices of this process, (R,), sorted, each once."""
    slices = sharding.addressable_devices_indices_map((global_batch,)).values()
    return np.unique(np.concatenate([np.arange(global_batch)[index] for index in slices]))


def place(batch: HostBatch, sharding: jax.sharding.Sharding, global_batch: int) -> Batch:
    """Return the global batch; this process supplies the rows of `find_local_rows`."""

    def globalize(local: np.ndarray) -> jax.Array:
        return jax.make_array_from_process_local_data(
            sharding,
            local,
            (global_batch, *local.shape[1:]),
        )

    # With several processes JAX takes this for an implicit transfer.
    with jax.transfer_guard_host_to_device("allow"):
        return Batch(
            image_BHWC=globalize(batch.image),
            label_B=globalize(batch.label),
            mask_B=globalize(batch.mask),
        )


def prefetch(
    batches: Iterable[H],
    place: Callable[[H], T],
    size: int = 2,
) -> Iterator[T]:
    """Yield placed batches in order, `size` of them in transfer; `place` does not wait."""
    placed = collections.deque[T]()
    for batch in batches:
        placed.append(place(batch))
        if len(placed) >= size:
            yield placed.popleft()
    yield from placed


@contextlib.contextmanager
def open_placed(
    stream: Stream,
    sharding: jax.sharding.Sharding,
    log: UnreadableLog,
    num_workers: int | None = None,
    num_threads: int | None = None,
) -> Iterator[Iterator[Batch]]:
    """Yield the global batches of a stream; threads and workers end with the context.

    `choose_parallelism` gives their numbers. The rows of the stream are the `find_local_rows` of
    this sharding of the batch dimension; the log counts unreadable images.

    Raises:
      ValueError: see `open_batches`, `choose_parallelism` and, while iterating, the log.
    """
    transform = stream.transform
    image_bytes = math.prod(transform.image_shape) * transform.dtype.itemsize
    batch_bytes = len(stream.global_rows) * image_bytes
    parallelism = choose_parallelism(num_workers, num_threads, batch_bytes=batch_bytes)

    def place_batch(batch: HostBatch) -> Batch:
        return place(batch, sharding, stream.global_batch)

    with open_batches(stream, parallelism) as batches:
        yield prefetch(log.watch(batches), place_batch)


def open_whole(
    source: Source,
    transform: EvaluationTransform,
    sharding: jax.sharding.Sharding,
    global_batch: int,
    log: UnreadableLog,
    num_workers: int | None = None,
    num_threads: int | None = None,
) -> contextlib.AbstractContextManager[Iterator[Batch]]:
    """Return a context of placed batches that hold every record of a source once.

    Arguments are as for `open_placed`.
    """
    stream = EvaluationStream(
        source,
        transform,
        global_batch,
        find_local_rows(sharding, global_batch),
    )
    return open_placed(stream, sharding, log, num_workers, num_threads)
