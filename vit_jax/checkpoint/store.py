"""Checkpoints of a run through orbax: asynchronous, some kept, restored onto any layout of devices.

A checkpoint has one item for each part of the state (`ITEMS`), so that weights can be read without the optimiser.
Leaves are stored under their names, not under the structure of Python objects, so files outlive refactors.
"""

import contextlib
import logging
import math
import operator
import pathlib
import shutil
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import numpy as np
import orbax.checkpoint as ocp
from flax.traverse_util import unflatten_dict
from orbax.checkpoint import checkpoint_managers

from vit_jax import pytree

T = TypeVar("T")

ITEMS = ("progress", "model", "optimizer", "polyak")
METADATA = "metadata"
FOLDER = "checkpoints"


class SaveError(RuntimeError):
    """A checkpoint could not be written; those written before are untouched."""


class _Manager(ocp.CheckpointManager):
    """Leaves JAX's preemption service alone.

    orbax reports the number of a step to it at every save, where a run counts its own queries (`train.interruption`):
    a notice that came in between would belong to an earlier query, and the run would never stop.
    """

    def reached_preemption(self, step: int) -> bool:
        """Whether to end is the run's decision."""
        return False


class CheckpointStore:
    """The checkpoints of one workdir.

    Args:
      workdir: the run's folder; checkpoints are in its sub-folder `checkpoints/`.
      keep_latest: how many of the newest to keep.
      keep_best: how many of the best by `best_metric` to keep besides.
      best_metric: a name among the metrics given to `save`; more is better, unless it ends in "loss".
      read_only: never create or delete anything.
    """

    def __init__(
        self,
        workdir: str | pathlib.Path,
        *,
        keep_latest: int = 1,
        keep_best: int = 0,
        best_metric: str = "",
        read_only: bool = False,
    ):
        orbax_log = logging.getLogger("absl")
        orbax_log.setLevel(logging.ERROR if read_only else logging.WARNING)  # it logs every step of its work otherwise
        orbax_log.addFilter(_is_news)
        self.folder = pathlib.Path(workdir).absolute() / FOLDER
        is_loss = best_metric.endswith("loss")
        policies: list[checkpoint_managers.PreservationPolicy] = [checkpoint_managers.LatestN(keep_latest)]
        if keep_best:
            best = checkpoint_managers.BestN(
                get_metric_fn=operator.itemgetter(best_metric),
                reverse=is_loss,
                n=keep_best,
                keep_checkpoints_without_metrics=False,
            )
            policies.append(best)
        options = ocp.CheckpointManagerOptions(
            create=not read_only,
            read_only=read_only,
            preservation_policy=checkpoint_managers.AnyPreservationPolicy(policies),
            # Without it orbax keeps metrics in memory only, and a restarted run would forget which was the best.
            best_fn=operator.itemgetter(best_metric) if keep_best else None,
            best_mode="min" if is_loss else "max",
        )
        handlers: dict[str, ocp.CheckpointHandler] = {name: ocp.PyTreeCheckpointHandler() for name in ITEMS}
        handlers[METADATA] = ocp.JsonCheckpointHandler()
        self._manager = _Manager(self.folder, options=options, item_handlers=handlers)

    def latest_step(self) -> int | None:
        """The newest step that is completely on disk."""
        return self._manager.latest_step()

    def all_steps(self) -> list[int]:
        """Every step that is completely on disk, ascending."""
        return sorted(self._manager.all_steps())

    def save(
        self, step: int, items: Mapping[str, Any], *, metadata: Mapping[str, Any], metrics: Mapping[str, float]
    ) -> None:
        """Starts to save; returns once the arrays are copied off the devices, while files are still being written.

        Args:
          step: steps done.
          items: a tree for each of `ITEMS` that the run has.
          metadata: JSON values that belong to the checkpoint.
          metrics: by which the best is chosen; may be empty.

        Raises:
          SaveError: this save, or the one before, failed.
        """
        args = {
            name: ocp.args.PyTreeSave(unflatten_dict(pytree.named_leaves(tree), sep="/"))
            for name, tree in items.items()
        }
        args[METADATA] = ocp.args.JsonSave(dict(metadata))
        self._guard(
            lambda: self._manager.save(step, args=ocp.args.Composite(**args), metrics=dict(metrics) or None, force=True)
        )

    def check(self) -> None:
        """Raises `SaveError` if what is being written in the background has failed; does not wait."""
        self._guard(self._manager.check_for_errors)

    def wait(self) -> None:
        """Returns once everything is on disk; raises `SaveError` if something is not."""
        self._guard(self._manager.wait_until_finished)

    def restore(self, step: int, abstract: Mapping[str, T]) -> dict[str, T]:
        """Reads items into the structure, dtypes and shardings of `abstract`: for each a tree of `ShapeDtypeStruct`.

        Raises:
          ValueError: names or shapes differ from what is stored; every difference is listed.
        """
        stored = self._manager.item_metadata(step)
        args = {}
        for name, tree in abstract.items():
            expected = pytree.named_leaves(tree)
            if name not in stored or stored[name] is None:
                raise ValueError(f"{self.folder / str(step)} has no item {name!r}.")
            if lines := pytree.differences(expected, pytree.named_leaves(dict(stored[name]))):
                detail = "\n  ".join(lines)
                raise ValueError(f"{self.folder / str(step)}, item {name!r}, is not of this model:\n  {detail}")
            nested = unflatten_dict(expected, sep="/")
            restore_args = ocp.checkpoint_utils.construct_restore_args(nested)
            args[name] = ocp.args.PyTreeRestore(nested, restore_args=restore_args)
        restored = self._manager.restore(step, args=ocp.args.Composite(**args))
        return {
            name: pytree.from_named_leaves(tree, pytree.named_leaves(restored[name])) for name, tree in abstract.items()
        }

    def metadata(self, step: int) -> dict[str, Any]:
        """What `save` was given as metadata."""
        args = ocp.args.Composite(**{METADATA: ocp.args.JsonRestore()})
        return dict(self._manager.restore(step, args=args)[METADATA])

    def item_names(self, step: int) -> set[str]:
        """Items that the checkpoint of `step` holds."""
        return {path.name for path in (self.folder / str(step)).iterdir() if path.is_dir()}

    def close(self) -> None:
        """Waits for what is being written and frees the manager's threads."""
        self._guard(self._manager.close)

    def _guard(self, action: Callable[[], Any]) -> None:
        try:
            action()
        except Exception as error:
            step = self.latest_step()
            kept = f"the checkpoint of step {step} is intact" if step is not None else "there is no earlier checkpoint"
            reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
            raise SaveError(
                f"A checkpoint could not be written to {self.folder}: {reason}\n"
                f"Nothing else was touched: {kept}. Make room, or repair the folder, and start the same command again."
            ) from error


def _is_news(record: logging.LogRecord) -> bool:
    """False for the line that a checkpoint has no metrics, as is normal between evaluations."""
    return "tracked_metric" not in record.getMessage()


def has_checkpoints(workdir: str | pathlib.Path) -> bool:
    """Whether a folder looks like a workdir with at least one checkpoint."""
    folder = pathlib.Path(workdir) / FOLDER
    return folder.is_dir() and any(child.name.isdigit() for child in folder.iterdir())


# Weights alone: the newest checkpoint's, or as a checkpoint that a run can start from.


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
