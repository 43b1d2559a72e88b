"""Write the checkpoints of a run through orbax: asynchronously, with a digest of every array.

A checkpoint has one item for each part of the state (`ITEMS`), so that weights can be read without
the optimiser. Leaves are stored under their names, not under the structure of Python objects, so
files outlive refactors.
"""

import contextlib
import functools
import json
import logging
import operator
import os
import pathlib
import re
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
from vit_jax.checkpoint.digests import compute_digests
from vit_jax.checkpoint.presence import build_checked_handler, require_exact_path
from vit_jax.checkpoint.reader import (
    DIGESTS,
    FOLDER,
    METADATA_DIGEST,
    CheckpointReader,
    digest_metadata,
)
from vit_jax.config.metric_names import Mode
from vit_jax.storage.files import (
    OUT_OF_FILES,
    expand_path,
    read_json,
    remove_tree,
    write_atomically,
)
from vit_jax.text.printable import first_line

METRICS = "metrics"  # orbax's name for the item of metrics
LATE_SECONDS = 1
_POLL_SECONDS = 0.05
ITEMS = ("progress", "model", "optimizer", "polyak")
# Messages of orbax that need no attention.
_EXPECTED_MESSAGES = re.compile(r"tracked_metric|already exists\. Removing")


class SaveError(RuntimeError):
    """A checkpoint could not be written; earlier checkpoints are untouched."""


class _Manager(ocp.CheckpointManager):
    """A manager that does not use JAX's preemption service.

    orbax reports the number of a step to it at every save, but a run counts its queries
    (`train.interruption`): a notice in between would belong to an earlier query, and the run would
    never stop.
    """

    def reached_preemption(self, step: int) -> bool:
        """Return whether the run itself decides to end."""
        return False


class CheckpointStore:
    """The checkpoints of one workdir.

    Args:
      workdir: the run's folder; checkpoints are in its sub-folder `checkpoints/`.
      keep_latest: number of the newest checkpoints to keep.
      keep_best: number of the best checkpoints by `best_metric` to keep besides.
      best_metric: a name among the metrics given to `save`.
      best_mode: "max" if higher is better, "min" if lower is better.
      check_workdir: raises a RuntimeError if the workdir no longer belongs to the run, such as
        `WorkdirLock.check`.

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
        self.folder = expand_path(workdir).absolute() / FOLDER
        require_exact_path(self.folder.parent)
        self._manager = _Manager(
            self.folder,
            options=_build_options(keep_latest, keep_best, best_metric, best_mode),
            item_handlers=_build_handlers(),
        )
        self._check_workdir = check_workdir
        self._last_save = -1

    def latest_step(self) -> int | None:
        """Return the newest step that is completely on disk."""
        return self._manager.latest_step()

    def save(
        self,
        step: int,
        items: Mapping[str, object],
        *,
        metadata: Mapping[str, object],
        metrics: Mapping[str, float],
    ) -> None:
        """Start to save; return once the arrays are copied off the devices, before files are ready.

        Args:
          step: number of finished steps.
          items: a tree for each of `ITEMS` that the run has.
          metadata: JSON values that belong to the checkpoint.
          metrics: metrics, one of which ranks the checkpoints; may be empty.

        Raises:
          SaveError: this save, or the one before, failed.
          RuntimeError: the error of `check_workdir`.
        """
        self._check_workdir()
        self._last_save = step
        digests = {}
        args: dict[str, ocp.args.CheckpointArgs] = {}
        for name, tree in items.items():
            leaves = pytree.name_leaves(tree)
            digests[name] = compute_digests(leaves)
            args[name] = ocp.args.PyTreeSave(unflatten_dict(leaves, sep="/"))
        described = {**metadata, DIGESTS: digests}
        described[METADATA_DIGEST] = digest_metadata(described)
        args[METADATA] = ocp.args.JsonSave(described)

        save = functools.partial(
            self._manager.save,
            step,
            args=ocp.args.Composite(**args),
            metrics=dict(metrics) or None,
            force=True,
        )
        self._guard(save)

    def complete(
        self,
        step: int,
        *,
        metadata: Mapping[str, object],
        metrics: Mapping[str, float],
    ) -> None:
        """Add late results to a checkpoint; every process calls this.

        Args:
          step: saved before, and on disk.
          metadata: JSON values, which replace values of the same names.
          metrics: metrics for `save`, if the checkpoint has none.

        Raises:
          OSError: the folder cannot be written.
        """
        if hosts.is_first():
            folder = self.folder / str(step)
            described = read_json(folder / METADATA / METADATA) | metadata
            described.pop(METADATA_DIGEST, None)
            described[METADATA_DIGEST] = digest_metadata(described)
            if metrics:
                (folder / METRICS).mkdir(exist_ok=True)
                write_atomically(folder / METRICS / METRICS, json.dumps(metrics))
            # Last, because it states that no evaluation is due any more.
            write_atomically(folder / METADATA / METADATA, json.dumps(described))
        hosts.wait_for_all("checkpoint completed")
        self._manager.reload()

    def check(self) -> None:
        """Raise `SaveError` if a save in the background has failed; do not wait."""
        self._guard(self._manager.check_for_errors)

    def wait(self) -> None:
        """Return once all saves are on disk; raise `SaveError` if one has failed."""
        self._guard(self._manager.wait_until_finished)

    def close(self) -> None:
        """Wait for saves in the background and free the manager's threads."""
        try:
            self._guard(self._manager.close)
        finally:
            self._remove_late()

    def _remove_late(self) -> None:
        """Remove the files of a save in a workdir that was removed meanwhile.

        orbax creates the folders again. After an error it may still write some arrays: return once
        there is no new file for `LATE_SECONDS`.
        """
        if self._owns_workdir():
            return
        quiet_since = time.monotonic()
        while time.monotonic() < quiet_since + LATE_SECONDS:
            if self._holds_last_save_only():
                remove_tree(self.folder)
                with contextlib.suppress(OSError):
                    self.folder.parent.rmdir()
                quiet_since = time.monotonic()
            time.sleep(_POLL_SECONDS)

    def _owns_workdir(self) -> bool:
        """Return whether the workdir still belongs to the run."""
        try:
            self._check_workdir()
        except RuntimeError:
            return False
        return True

    def _holds_last_save_only(self) -> bool:
        """Return whether the workdir has files of the last save only, and none of another run."""
        names = [path.name for path in self.folder.parent.glob("*")]
        if names != [FOLDER]:
            return False
        for path in self.folder.glob("*"):
            step, _, _ = path.name.partition(".")
            if step != str(self._last_save):
                return False
        return True

    def _guard(self, action: Callable[[], object]) -> None:
        """Call an action of orbax; raise `SaveError`, with a remedy, for its errors."""
        try:
            action()
        except Exception as error:
            self._check_workdir()
            remedy = "Make room, or repair the folder"
            if _is_out_of_files(error):
                remedy = "Raise the limit of open files (ulimit -n 65536)"
            raise SaveError(
                f"A checkpoint could not be written to {self.folder}: {first_line(error)}\n"
                f"Nothing else was touched: {self._describe_latest()}. {remedy}, "
                "and start the same command again."
            ) from error

    def _describe_latest(self) -> str:
        """Return a clause on the newest checkpoint that is complete."""
        with contextlib.suppress(Exception):  # storage that failed may fail again
            steps = CheckpointReader(self.folder.parent).all_steps()
            if steps:
                return f"the checkpoint of step {steps[-1]} is intact"
        return "there is no earlier checkpoint"


def _is_out_of_files(error: BaseException) -> bool:
    """Return True if the limit of open files is a cause, which the array writer states in words."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno in OUT_OF_FILES:
            return True
        if any(os.strerror(number) in str(cause) for number in OUT_OF_FILES):
            return True
        cause = cause.__cause__ or cause.__context__
    return False


def _build_options(
    keep_latest: int,
    keep_best: int,
    best_metric: str,
    best_mode: Mode,
) -> ocp.CheckpointManagerOptions:
    """Return the options by which orbax keeps checkpoints, from arguments of `CheckpointStore`."""
    policies: list[checkpoint_managers.PreservationPolicy] = [
        checkpoint_managers.LatestN(keep_latest)
    ]
    best_fn = None
    if keep_best:
        # Without this function orbax keeps metrics in memory only, and a resumed run does not know
        # the best.
        best_fn = operator.itemgetter(best_metric)
        best = checkpoint_managers.BestN(
            get_metric_fn=best_fn,
            reverse=best_mode == "min",
            n=keep_best,
            keep_checkpoints_without_metrics=False,
        )
        policies.append(best)
    return ocp.CheckpointManagerOptions(
        preservation_policy=checkpoint_managers.AnyPreservationPolicy(policies),
        best_fn=best_fn,
        best_mode=best_mode,
    )


def _build_handlers() -> dict[str, ocp.CheckpointHandler]:
    """Return the handlers of the items of a checkpoint, by name."""
    arrays = workarounds.build_array_handlers()
    handlers: dict[str, ocp.CheckpointHandler] = {}
    for name in ITEMS:
        handlers[name] = build_checked_handler(arrays)
    handlers[METADATA] = ocp.JsonCheckpointHandler()
    return handlers


def _is_news(record: logging.LogRecord) -> bool:
    """Return False for expected messages, and for errors that `CheckpointStore` raises."""
    if record.exc_info:
        return False
    return _EXPECTED_MESSAGES.search(record.getMessage()) is None


def write_workdir(
    folder: pathlib.Path,
    parameters: Mapping[str, np.ndarray],
    metadata: Mapping[str, object],
) -> None:
    """Write a checkpoint of step 0 with parameters and metadata, for `config.init_from`.

    Parameters without elements, such as a head without classes, are not stored. A checkpoint of
    step 0 is replaced.

    Raises:
      ValueError: it holds checkpoints of a training run, or its path cannot hold any.
      SaveError: the folder cannot be written.
    """
    require_exact_path(folder.absolute())
    taken = folder / FOLDER
    others = []
    if taken.is_dir():
        others = sorted(path.name for path in taken.iterdir() if path.name != "0")
    if others:
        raise ValueError(
            f"{taken} holds checkpoints of a run ({', '.join(others)}): choose another folder."
        )

    stored = {name: array for name, array in parameters.items() if array.size}
    # The old checkpoint stays until the new one is complete, which is written inside: the folder
    # may be a mount.
    new = folder / f".new.{secrets.token_hex(8)}"
    store = CheckpointStore(new)
    try:
        store.save(0, {"model": stored}, metadata=metadata, metrics={})
        store.wait()
        with contextlib.suppress(FileNotFoundError):
            taken.replace(new / "replaced")
        (new / FOLDER).replace(taken)
    finally:
        store.close()
        remove_tree(new)
