"""Weights alone in and out of a run's folder: the newest checkpoint's, or as a checkpoint that a run can start from."""

import logging
import math
import pathlib
import shutil
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from vit_jax.checkpoint.reader import FOLDER, CheckpointReader, DamagedCheckpoint
from vit_jax.checkpoint.store import CheckpointStore


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
    reader = CheckpointReader(folder)
    steps = reader.all_steps()
    if not steps:
        raise ValueError(f"{folder} has no checkpoint that is completely on disk.")
    problems: list[str] = []
    for step in reversed(steps):
        try:
            read = _read_step(reader, step, shapes_of, polyak=polyak)
        except DamagedCheckpoint as error:
            problems.append(str(error))
            continue
        if problems:
            logging.warning("%s The step before it is read instead.", problems[-1])
        return read
    raise ValueError("\n".join([f"No checkpoint in {reader.folder} can be used:", *problems, "Copy them again."]))


def _read_step(
    reader: CheckpointReader,
    step: int,
    shapes_of: Callable[[Mapping[str, Any]], Mapping[str, tuple[int, ...]]],
    *,
    polyak: bool,
) -> tuple[dict[str, np.ndarray], dict[str, Any], str]:
    metadata = reader.metadata(step)
    item = "polyak" if polyak and "polyak" in reader.item_names(step) else "model"
    shapes = shapes_of(metadata)
    memory = jax.sharding.SingleDeviceSharding(_cpu())
    abstract = {
        name: jax.ShapeDtypeStruct(shape, np.float32, sharding=memory)
        for name, shape in shapes.items()
        if math.prod(shape)
    }
    restored = reader.restore(step, {item: abstract})[item]
    parameters = {name: np.asarray(restored.get(name, np.zeros(shape, np.float32))) for name, shape in shapes.items()}
    return parameters, metadata, f"{'Polyak average' if item == 'polyak' else 'parameters'} of step {step}"


def _cpu() -> jax.Device:
    """The CPU, or, where JAX_PLATFORMS leaves it out, the first device there is."""
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        return jax.local_devices()[0]


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
