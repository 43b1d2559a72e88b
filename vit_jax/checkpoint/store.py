"""Writes the checkpoints of a run through orbax: asynchronous, with a digest of every array, some kept.

A checkpoint has one item for each part of the state (`ITEMS`), so that weights can be read without the optimiser.
Leaves are stored under their names, not under the structure of Python objects, so files outlive refactors.
"""

import contextlib
import json
import logging
import operator
import os
import pathlib
import secrets
import time
from collections.abc import Callable, Mapping

import numpy as np
import orbax.checkpoint as ocp
from flax.traverse_util import unflatten_dict
from orbax.checkpoint import checkpoint_managers

from vit_jax import hosts, pytree
from vit_jax.checkpoint import workarounds
from vit_jax.checkpoint.damage import METADATA
from vit_jax.checkpoint.digests import array_digests
from vit_jax.checkpoint.presence import build_checked_handler, require_exact_path
from vit_jax.checkpoint.reader import (
    DIGESTS,
    FOLDER,
    METADATA_DIGEST,
    CheckpointReader,
    metadata_digest,
)
from vit_jax.config.metric_names import Mode
from vit_jax.storage.files import OUT_OF_FILES, expanded, read_json, remove_tree, write_atomically
from vit_jax.text.printable import first_line

METRICS = "metrics"  # orbax's name for the item of what is measured
LATE_SECONDS = 1
ITEMS = ("progress", "model", "optimizer", "polyak")


class SaveError(RuntimeError):
    """A checkpoint could not be written; those written before are untouched."""


class _Manager(ocp.CheckpointManager):
    """Leaves JAX's preemption service alone.

    orbax reports the number of a step to it at every save, where a run counts its own queries (`train.interruption`):
    a notice that came in between would belong to an earlier query, and the run would never stop.
    """

    def reached_preemption(self, step: int) -> bool:
        """Return whether the run itself decides to end."""
        return False


class CheckpointStore:
    """The checkpoints of one workdir.

    Args:
      workdir: the run's folder; checkpoints are in its sub-folder `checkpoints/`.
      keep_latest: how many of the newest to keep.
      keep_best: how many of the best by `best_metric` to keep besides.
      best_metric: a name among the metrics given to `save`.
      best_mode: "max" if higher is better, "min" if lower is better.
      check_workdir: raises a RuntimeError where the workdir is not the run's any more, such as `WorkdirLock.check`.

    Raises:
      ValueError: checkpoints could not be found again under this path.
    """

    def __init__(
        self,
        workdir: str | pathlib.Path,
        *,
        keep_latest: int = 1,
        keep_best: int = 0,
        best_metric: str = "",
        best_mode: Mode = "max",
        check_workdir: Callable[[], object] = lambda: None,
    ):
        workarounds.apply()
        orbax_log = logging.getLogger("absl")
        orbax_log.setLevel(logging.WARNING)  # it logs every step of its work otherwise
        orbax_log.addFilter(_is_news)
        self.folder = expanded(workdir).absolute() / FOLDER
        require_exact_path(self.folder.parent)
        policies: list[checkpoint_managers.PreservationPolicy] = [
            checkpoint_managers.LatestN(keep_latest)
        ]
        if keep_best:
            best = checkpoint_managers.BestN(
                get_metric_fn=operator.itemgetter(best_metric),
                reverse=best_mode == "min",
                n=keep_best,
                keep_checkpoints_without_metrics=False,
            )
            policies.append(best)
        options = ocp.CheckpointManagerOptions(
            preservation_policy=checkpoint_managers.AnyPreservationPolicy(policies),
            # Without it orbax keeps metrics in memory only, and a restarted run would forget which was the best.
            best_fn=operator.itemgetter(best_metric) if keep_best else None,
            best_mode=best_mode,
        )
        arrays = workarounds.handlers_of_arrays()
        handlers: dict[str, ocp.CheckpointHandler] = {
            name: build_checked_handler(arrays) for name in ITEMS
        }
        handlers[METADATA] = ocp.JsonCheckpointHandler()
        self._manager = _Manager(self.folder, options=options, item_handlers=handlers)
        self._check_workdir = check_workdir
        self._last_save = -1

    def latest_step(self) -> int | None:
        """The newest step that is completely on disk."""
        return self._manager.latest_step()

    def save(
        self,
        step: int,
        items: Mapping[str, object],
        *,
        metadata: Mapping[str, object],
        metrics: Mapping[str, float],
    ) -> None:
        """Start to save; return once the arrays are copied off the devices, while files are still being written.

        Args:
          step: steps done.
          items: a tree for each of `ITEMS` that the run has.
          metadata: JSON values that belong to the checkpoint.
          metrics: by which the best is chosen; may be empty.

        Raises:
          SaveError: this save, or the one before, failed.
          RuntimeError: of `check_workdir`.
        """
        self._check_workdir()
        self._last_save = step
        named = {name: pytree.named_leaves(tree) for name, tree in items.items()}
        described = {
            **metadata,
            DIGESTS: {name: array_digests(leaves) for name, leaves in named.items()},
        }
        args = {
            name: ocp.args.PyTreeSave(unflatten_dict(leaves, sep="/"))
            for name, leaves in named.items()
        }
        args[METADATA] = ocp.args.JsonSave(
            {**described, METADATA_DIGEST: metadata_digest(described)}
        )
        self._guard(
            lambda: self._manager.save(
                step, args=ocp.args.Composite(**args), metrics=dict(metrics) or None, force=True
            )
        )

    def complete(
        self, step: int, *, metadata: Mapping[str, object], metrics: Mapping[str, float]
    ) -> None:
        """Add to a checkpoint what was found after it was saved; every process calls this.

        Args:
          step: saved before, and on disk.
          metadata: JSON values, in the place of those of the same names.
          metrics: as for `save`, where there were none.

        Raises:
          OSError: the folder cannot be written.
        """
        if hosts.is_first():
            folder = self.folder / str(step)
            described = read_json(folder / METADATA / METADATA) | metadata
            described[METADATA_DIGEST] = metadata_digest(
                {k: v for k, v in described.items() if k != METADATA_DIGEST}
            )
            if metrics:
                (folder / METRICS).mkdir(exist_ok=True)
                write_atomically(folder / METRICS / METRICS, json.dumps(metrics))
            write_atomically(
                folder / METADATA / METADATA, json.dumps(described)
            )  # last: nothing is owed any more
        hosts.wait_for_all("checkpoint completed")
        self._manager.reload()

    def check(self) -> None:
        """Raise `SaveError` if what is being written in the background has failed; do not wait."""
        self._guard(self._manager.check_for_errors)

    def wait(self) -> None:
        """Return once everything is on disk; raise `SaveError` if something is not."""
        self._guard(self._manager.wait_until_finished)

    def close(self) -> None:
        """Wait for what is being written and free the manager's threads."""
        try:
            self._guard(self._manager.close)
        finally:
            self._remove_late()

    def _remove_late(self) -> None:
        """Remove what a save wrote into a workdir that was removed meanwhile, for which orbax makes the folders again.

        After an error some arrays may still be being written: return once nothing has come for `LATE_SECONDS`.
        """
        try:
            self._check_workdir()
        except RuntimeError:
            quiet_since = time.monotonic()
            while time.monotonic() < quiet_since + LATE_SECONDS:
                beside = {path.name for path in self.folder.parent.glob("*")}
                steps = {path.name.partition(".")[0] for path in self.folder.glob("*")}
                if beside == {FOLDER} and steps <= {
                    str(self._last_save)
                }:  # nothing of another run, or of a copy
                    remove_tree(self.folder)
                    with contextlib.suppress(OSError):
                        self.folder.parent.rmdir()
                    quiet_since = time.monotonic()
                time.sleep(0.05)

    def _guard(self, action: Callable[[], object]) -> None:
        try:
            action()
        except Exception as error:
            self._check_workdir()
            kept = "there is no earlier checkpoint"
            with contextlib.suppress(Exception):  # storage that failed may fail again
                if steps := CheckpointReader(self.folder.parent).all_steps():
                    kept = f"the checkpoint of step {steps[-1]} is intact"
            cure = "Make room, or repair the folder"
            if _is_out_of_files(error):
                cure = "Raise the limit of open files (ulimit -n 65536)"
            raise SaveError(
                f"A checkpoint could not be written to {self.folder}: {first_line(error)}\n"
                f"Nothing else was touched: {kept}. {cure}, and start the same command again."
            ) from error


def _is_out_of_files(error: BaseException) -> bool:
    """Return True if the limit of open files is a cause; the array writer states it in words only."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno in OUT_OF_FILES:
            return True
        if any(os.strerror(number) in str(cause) for number in OUT_OF_FILES):
            return True
        cause = cause.__cause__ or cause.__context__
    return False


def _is_news(record: logging.LogRecord) -> bool:
    """False for what is normal, and for what `CheckpointStore` raises: a message with a traceback."""
    message = record.getMessage()
    return not record.exc_info and not any(
        known in message for known in ("tracked_metric", "already exists. Removing")
    )


def write_workdir(
    folder: pathlib.Path, parameters: Mapping[str, np.ndarray], metadata: Mapping[str, object]
) -> None:
    """Write a checkpoint of step 0 with parameters and metadata alone: a folder for `config.init_from`.

    Parameters without elements, of a head without classes, are not stored; a checkpoint of step 0 is replaced.

    Raises:
      ValueError: it holds checkpoints of a training run, or its path cannot hold any.
      SaveError: the system refuses to write.
    """
    require_exact_path(folder.absolute())
    taken = folder / FOLDER
    others = [path.name for path in taken.iterdir() if path.name != "0"] if taken.is_dir() else []
    if others:
        raise ValueError(
            f"{taken} holds checkpoints of a run ({', '.join(sorted(others))}): choose another folder."
        )
    # The old one stays until the new one is complete. It is written inside, since the folder may be a mount.
    beside = folder / f".new.{secrets.token_hex(8)}"
    store = CheckpointStore(beside)
    try:
        items = {"model": {name: array for name, array in parameters.items() if array.size}}
        store.save(0, items, metadata=metadata, metrics={})
        store.wait()
        with contextlib.suppress(FileNotFoundError):
            taken.replace(beside / "replaced")
        (beside / FOLDER).replace(taken)
    finally:
        store.close()
        remove_tree(beside)
