"""From the rows that each process has prepared to global arrays on the devices, a few batches ahead.

The sharding comes from the caller, so nothing here knows meshes; it shards the batch dimension only.
"""

import collections
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import numpy as np

from vit_jax.arrays import Batch
from vit_jax.data.stream import HostBatch


def local_rows(sharding: jax.sharding.Sharding, global_batch: int) -> np.ndarray:
    """Rows of the global batch on devices of this process, (R,), sorted, each once."""
    parts = sharding.addressable_devices_indices_map((global_batch,)).values()
    return np.unique(np.concatenate([np.arange(global_batch)[index] for index in parts]))


def place(batch: HostBatch, sharding: jax.sharding.Sharding, global_batch: int) -> Batch:
    """Makes the global batch of which this process supplies the rows that `local_rows` gives; images stay uint8.

    Args:
      batch: R rows.
      sharding: of the batch dimension, for every array.
      global_batch: rows over all processes.
    """

    def globalize(local: np.ndarray) -> jax.Array:
        return jax.make_array_from_process_local_data(sharding, local, (global_batch, *local.shape[1:]))

    with jax.transfer_guard_host_to_device("allow"):  # with several processes JAX takes it for an implicit transfer
        return Batch(image_BHWC=globalize(batch.image), label_B=globalize(batch.label), mask_B=globalize(batch.mask))


def prefetch(batches: Iterable[HostBatch], place: Callable[[HostBatch], Any], size: int = 2) -> Iterator[Any]:
    """Yields placed batches in order, with `size` of them in transfer to the devices.

    Args:
      batches: host batches.
      place: starts the transfer of one and does not wait for it.
      size: batches placed before the first is yielded, at least 1.
    """
    placed: collections.deque[Any] = collections.deque()
    for batch in batches:
        placed.append(place(batch))
        if len(placed) >= size:
            yield placed.popleft()
    yield from placed
