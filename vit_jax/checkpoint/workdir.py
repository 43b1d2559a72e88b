"""Weights alone in and out of a run's folder: the newest checkpoint's, or as a checkpoint that a run can start from."""

import contextlib
import math
import pathlib
import shutil
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from vit_jax.checkpoint.store import FOLDER, CheckpointStore


def read_workdir(
    folder: pathlib.Path,
    shapes_of: Callable[[Mapping[str, Any]], Mapping[str, tuple[int, ...]]],
    *,
    polyak: bool = True,
) -> tuple[dict[str, np.ndarray], dict[str, Any], str]:
    """Reads the parameters of the newest checkpoint into this machine's memory, whatever devices they were saved from.

    Args:
      folder: a workdir that has checkpoints.
      shapes_of: from the checkpoint's metadata, name and shape of every parameter.
      polyak: take the Polyak average where the checkpoint has one, for it is what was evaluated.

    Returns:
      Parameters by name, the metadata, and what they are: "Polyak average of step 5".

    Raises:
      ValueError: no checkpoint is complete, or names or shapes differ from what is stored; every difference is listed.
    """
    store = CheckpointStore(folder, read_only=True)
    try:
        step = store.latest_step()
        if step is None:
            raise ValueError(f"{folder} has no checkpoint that is completely on disk.")
        item = "polyak" if polyak and "polyak" in store.item_names(step) else "model"
        with _readable(store, step):
            metadata = store.metadata(step)
        shapes = shapes_of(metadata)
        # NumPy's arrays, whose place is the memory; these take none.
        abstract = {name: np.broadcast_to(np.float32(0), shape) for name, shape in shapes.items() if math.prod(shape)}
        with _readable(store, step):
            restored = store.restore(step, {item: abstract})[item]
    finally:
        store.close()
    parameters = {name: restored.get(name, np.zeros(shape, np.float32)) for name, shape in shapes.items()}
    return parameters, metadata, f"{'Polyak average' if item == 'polyak' else 'parameters'} of step {step}"


@contextlib.contextmanager
def _readable(store: CheckpointStore, step: int) -> Iterator[None]:
    """One clear error for any failure to read an incomplete checkpoint."""
    try:
        yield
    except Exception as error:
        if isinstance(error, ValueError) and str(error).startswith(str(store.folder)):
            raise
        reason = next(iter(str(error).splitlines()), type(error).__name__).partition(" [tensorstore_spec")[0]
        raise ValueError(
            f"{store.folder / str(step)} cannot be read: {reason[:200]}. Is it half written, or copied in part? "
            "Copy it again, or remove it so that the step before it is taken."
        ) from error


def write_workdir(folder: pathlib.Path, parameters: Mapping[str, np.ndarray], metadata: Mapping[str, Any]) -> None:
    """Writes a checkpoint of step 0 with parameters and metadata alone: a folder for `config.init_from`.

    Parameters without elements, of a head without classes, are not stored; a checkpoint of step 0 is replaced.

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
