"""Weights alone in and out of a run's folder: the newest checkpoint's, or as a checkpoint that a run can start from."""

import contextlib
import math
import pathlib
import shutil
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from vit_jax.checkpoint.store import FOLDER, CheckpointStore


class StoredWeights(NamedTuple):
    """A checkpoint's weights, not read yet.

    Attributes:
      store: close it.
      step: of the checkpoint.
      item: "polyak" or "model".
      metadata: of the checkpoint.
    """

    store: CheckpointStore
    step: int
    item: str
    metadata: dict[str, Any]

    def read(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
        """Parameters by name, in this machine's memory whatever devices they were saved from.

        Raises:
          ValueError: names or shapes differ from what is stored; every difference is listed.
        """
        memory = jax.sharding.SingleDeviceSharding(_cpu())
        abstract = {
            name: jax.ShapeDtypeStruct(shape, np.float32, sharding=memory)
            for name, shape in shapes.items()
            if math.prod(shape)
        }
        with _readable(self.store, self.step):
            restored = self.store.restore(self.step, {self.item: abstract})[self.item]
        return {name: np.asarray(restored.get(name, np.zeros(shape, np.float32))) for name, shape in shapes.items()}


def _cpu() -> jax.Device:
    """The CPU, or, where JAX_PLATFORMS leaves it out, the first device there is."""
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        return jax.local_devices()[0]


@contextlib.contextmanager
def _readable(store: CheckpointStore, step: int) -> Iterator[None]:
    """One clear error for any failure to read an incomplete checkpoint."""
    try:
        yield
    except Exception as error:
        if isinstance(error, ValueError) and str(error).startswith(str(store.folder)):
            raise
        store.close()
        reason = next(iter(str(error).splitlines()), type(error).__name__).partition(" [tensorstore_spec")[0]
        raise ValueError(
            f"{store.folder / str(step)} cannot be read: {reason[:200]}. Is it half written, or copied in part? "
            "Copy it again, or remove it so that the step before it is taken."
        ) from error


def open_workdir(folder: pathlib.Path, *, polyak: bool = True) -> StoredWeights:
    """The newest checkpoint of a folder that has some.

    Args:
      folder: a workdir.
      polyak: take the Polyak average where the checkpoint has one, for it is what was evaluated.

    Raises:
      ValueError: no checkpoint is complete.
    """
    store = CheckpointStore(folder, read_only=True)
    step = store.latest_step()
    if step is None:
        store.close()
        raise ValueError(f"{folder} has no checkpoint that is completely on disk.")
    item = "polyak" if polyak and "polyak" in store.item_names(step) else "model"
    with _readable(store, step):
        return StoredWeights(store, step, item, store.metadata(step))


def write_workdir(folder: pathlib.Path, parameters: Mapping[str, np.ndarray], metadata: Mapping[str, Any]) -> None:
    """Writes a checkpoint of step 0 with parameters and metadata alone: a folder for `config.init_from`.

    Args:
      folder: made if need be; a checkpoint of step 0 in it is replaced.
      parameters: by name; those without elements, of a head without classes, are not stored.
      metadata: JSON values.

    Raises:
      ValueError: it holds checkpoints of a training run.
      SaveError: the system refuses to write.
    """
    taken = folder / FOLDER
    others = [path.name for path in taken.iterdir() if path.name != "0"] if taken.is_dir() else []
    if others:
        raise ValueError(f"{taken} holds checkpoints of a run ({', '.join(sorted(others))}): choose another folder.")
    beside = folder / ".new"  # what is there stays until the new one is complete; inside, as the folder may be a mount
    shutil.rmtree(beside, ignore_errors=True)
    store = CheckpointStore(beside)
    try:
        items = {"model": {name: array for name, array in parameters.items() if array.size}}
        store.save(0, items, metadata=metadata, metrics={})
        store.wait()
        shutil.rmtree(taken, ignore_errors=True)
        (beside / FOLDER).replace(taken)
    finally:
        store.close()
        shutil.rmtree(beside, ignore_errors=True)
