"""Reject outputs that would change a run: its workdir, its checkpoints, and files of its names."""

import os
import pathlib

from vit_jax.checkpoint.reader import FOLDER
from vit_jax.storage.files import is_in_bucket
from vit_jax.text.printable import printable

RUN_FILES = (
    "config.json",
    "start.json",
    "metrics.jsonl",
    "summary.json",
    "pause.json",
    "error.json",
    "divergence.json",
    "run.lock",
)
_RUN_MARKS = ("start.json", "metrics.jsonl")  # other folders may have files of the other names


def is_run(folder: pathlib.Path) -> bool:
    """Return whether a folder is the workdir of a run.

    A folder that `convert` wrote has a checkpoint of step 0 only.
    """
    for name in _RUN_MARKS:
        if (folder / name).is_file():
            return True
    checkpoints = folder / FOLDER
    if not checkpoints.is_dir():
        return False
    return any(child.name.isdecimal() and int(child.name) > 0 for child in checkpoints.iterdir())


def require_outside_runs(path: pathlib.Path, subject: str) -> None:
    """Raise ValueError, which begins with `subject`, if writing a path would change a run.

    New files and folders within a workdir, with names that runs do not have, are allowed. Links are
    followed.
    """
    if is_in_bucket(path):
        return
    target = pathlib.Path(os.path.realpath(path))
    workdir = _find_changed_run(target)
    if workdir is not None:
        raise ValueError(
            f"{subject}: {printable(str(workdir))!r} is the workdir of a run, whose files must "
            "stay. Choose another folder or name."
        )


def _find_changed_run(target: pathlib.Path) -> pathlib.Path | None:
    """Return the workdir of the run that a write to the target would change; None without any."""
    if is_run(target):
        return target
    if target.name in RUN_FILES and is_run(target.parent):
        return target.parent
    for folder in (target, *target.parents):
        if folder.name == FOLDER and is_run(folder.parent):
            return folder.parent
    return None
