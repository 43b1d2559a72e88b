"""The folder of a run: it can be written, belongs to this run, and is shared by all processes."""

import contextlib
import errno
import json
import pathlib
import uuid
from collections.abc import Callable, Iterator, Mapping

from vit_jax import hosts
from vit_jax.checkpoint.presence import require_exact_path
from vit_jax.checkpoint.reader import has_checkpoints
from vit_jax.config import RunConfig, to_dict
from vit_jax.config.parsing import flatten, from_dict, is_within
from vit_jax.config.schema import RUNTIME_FIELDS
from vit_jax.config.specification import load_recipe, store_config
from vit_jax.pytree import list_lines
from vit_jax.storage.files import (
    OUT_OF_FILES,
    JsonObject,
    expand_path,
    resolve_path,
    write_atomically,
)
from vit_jax.text.printable import shorten
from vit_jax.train.lifecycle.lock import FILE as LOCK_FILE
from vit_jax.train.lifecycle.lock import WorkdirLock, WorkdirLost, lock_of
from vit_jax.train.run_files import (
    CONFIG_FILE,
    DIVERGENCE_FILE,
    ERROR_FILE,
    METRICS_FILE,
    PAUSE_FILE,
    START_FILE,
    SUMMARY_FILE,
    read_config,
    read_metrics,
    read_start,
    write_error,
)

PASSING = {errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE}
"""Errors that may be over when the command is started again."""
MAX_SHOWN = 200  # letters of a value in an error
TRIALS = "search"  # sub-folder of a fine-tuning run, with a workdir for each learning rate
FILES = (
    CONFIG_FILE,
    START_FILE,
    METRICS_FILE,
    SUMMARY_FILE,
    PAUSE_FILE,
    DIVERGENCE_FILE,
    ERROR_FILE,
)
"""Files that a run writes into its workdir."""


@contextlib.contextmanager
def claim(
    workdir: str, config: RunConfig, requested: RunConfig | None = None
) -> Iterator[WorkdirLock]:
    """Create and lock the folder, require the same config, write `config.json`; yield the lock.

    Args:
      workdir: the folder.
      config: the config with which the run computes.
      requested: the config before the run chose its layout; None: the same.

    Raises:
      ValueError: the folder cannot be written or cannot hold checkpoints, is used by another run,
        belongs to a run of another config (the fields are named), or is not shared by all
        processes.
    """
    path = expand_path(workdir).absolute()
    require_exact_path(path)
    lock = lock_of(path, enabled=hosts.is_first())
    with contextlib.ExitStack() as stack:
        stack.enter_context(undo_after_rejection(path, CONFIG_FILE, START_FILE))
        prepare_shared(path)
        error = None
        if hosts.is_first():
            error = _take(lock, config, requested or config, stack)
        _raise_together(path, error)
        with _record_error(path):
            yield lock


@contextlib.contextmanager
def _record_error(path: pathlib.Path) -> Iterator[None]:
    """Open a context that writes the error which ends the run into the folder.

    Errors of the config or the data are not recorded; of a loss that is not finite
    `divergence.json` says more.
    """
    if not hosts.is_first():
        yield
        return
    (path / ERROR_FILE).unlink(missing_ok=True)
    try:
        yield
    except BaseException as error:
        if not isinstance(error, ValueError | FloatingPointError | WorkdirLost):
            write_error(path, error)
        raise


def prepare_shared(path: pathlib.Path) -> None:
    """Create a folder; every process of a run calls it.

    Raises:
      ValueError: in every process: it cannot be written or cannot hold checkpoints, or is not
        shared by all processes.
      OSError: it is full, or its storage fails.
    """
    require_exact_path(path)
    random_name = hosts.gather(uuid.uuid4().hex)[0]  # nobody can have made a link of this name
    token = path / f".attempt_{random_name}"
    _change_in_first_process(path, lambda: _write_token(token))
    sees_token = hosts.gather(token.exists())  # all have looked when this returns
    _change_in_first_process(path, token.unlink)
    blind = [process for process, sees in enumerate(sees_token) if not sees]
    if blind:
        raise ValueError(
            f"workdir {str(path)!r} is not the same folder in every process: "
            f"{blind} cannot see what process 0 wrote. "
            "With several hosts it must be on storage that all of them share."
        )


def _change_in_first_process(path: pathlib.Path, change: Callable[[], None]) -> None:
    """Change the workdir in the first process; raise its error in every process."""
    error = None
    if hosts.is_first():
        error = _change_workdir(path, change)
    _raise_together(path, error)


def _write_token(token: pathlib.Path) -> None:
    token.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(token, "a full disk takes empty files")


def _change_workdir(path: pathlib.Path, change: Callable[[], None]) -> ValueError | OSError | None:
    """Call a function that changes the workdir; return the error if that is not possible."""
    try:
        change()
    except OSError as error:
        if error.errno in (*PASSING, *OUT_OF_FILES):
            return OSError(error.errno, error.strerror, str(path))
        return ValueError(
            f"workdir {str(path)!r} cannot be written: {error.strerror}. "
            "Choose a folder that you may write to."
        )
    return None


def _raise_together(path: pathlib.Path, error: ValueError | OSError | None) -> None:
    """Raise in every process if the first has an error; in the first one, this error."""
    if not any(hosts.gather(error is not None)):
        return
    if error is not None:
        raise error
    raise ValueError(f"workdir {str(path)!r} cannot be used; the first process says why.")


@contextlib.contextmanager
def undo_after_rejection(path: pathlib.Path, *files: str) -> Iterator[None]:
    """Open a context that removes new files and folders after a ValueError.

    Nothing is removed if there are other new files than `files`, or if another run has the lock:
    the new files are then of that run.
    """
    if not hosts.is_first():
        yield
        return
    made = [folder for folder in (path, *path.parents) if not folder.exists()]
    before: set[pathlib.Path] = set()
    with contextlib.suppress(OSError):  # the folder does not exist, or is rejected later
        before.update(path.iterdir())
    try:
        yield
    except ValueError:
        with contextlib.suppress(OSError):
            new = {*path.iterdir()} - before
            lock = path / LOCK_FILE
            is_locked = lock.is_symlink() or lock.exists()
            has_others = any(file.name not in files for file in new)
            if not (is_locked or has_others):
                for file in new:
                    file.unlink()
            for folder in made:
                folder.rmdir()
        raise


def reject_as_source(init_from: str | None, workdir: str, field: str = "init_from") -> None:
    """Raise ValueError where the run would write into the folder that its weights come from."""
    if init_from is None:
        return
    from vit_jax.weights.hub import is_hub_address

    if is_hub_address(init_from):
        return
    source, target = map(resolve_path, (init_from, workdir))
    if source == target or target in source.parents or source in target.parents:
        raise ValueError(
            f"config.{field}={init_from!r} and workdir {workdir!r} are the same folder, "
            "or one is inside the other. "
            "The first holds the source weights and is never written to; choose another workdir."
        )


def require_same_start(path: pathlib.Path, start: Mapping[str, object], source: str | None) -> None:
    """Record the start of a run when it first starts; require the same start of a resumed run.

    A start that left no checkpoint and no trial is overwritten. `start` holds JSON values that
    identify the weights ("parameters_sha256") and the data; `source` is where the weights come
    from.

    Raises:
      ValueError: weights or data have changed since; the weights of a run that is still training
        do.
    """
    file = path / START_FILE
    stored = None
    if file.exists() and _is_begun(path):
        stored = read_start(file)
    hosts.wait_for_all("start read")
    if stored is None:
        if hosts.is_first():
            write_atomically(file, json.dumps({"init_from": source, **start}, indent=2) + "\n")
        return
    if stored["parameters_sha256"] != start["parameters_sha256"]:
        raise ValueError(
            f"workdir {str(path)!r} was started from other weights than "
            f"config.init_from={source!r} holds now. Is a run still training there? "
            "Give the weights it was started from, or another workdir."
        )
    changes = []
    for name, value in start.items():
        if stored.get(name, value) != value:
            changes.append(f"  {name}: then {stored[name]!r}, now {value!r}")
    if changes:
        lines = "\n".join(changes)
        raise ValueError(
            f"workdir {str(path)!r} was started with other data:\n{lines}\n"
            "(Files are compared by name and class.) Its results cannot be compared with new ones: "
            "restore the data, or choose another workdir."
        )


def _take(
    lock: WorkdirLock,
    config: RunConfig,
    requested: RunConfig,
    stack: contextlib.ExitStack,
) -> ValueError | OSError | None:
    """Claim the folder in the first process; return the error, which all processes must know."""
    path = lock.folder
    try:
        _require_own_files(path)
        stack.enter_context(lock)  # first: the config is of the run that has the folder
        if _is_begun(path):
            require_same_config(path, config)
            read_metrics(path)  # damage is found before anything is compiled
        write_atomically(
            path / CONFIG_FILE, json.dumps(store_config(config, requested), indent=2) + "\n"
        )
    except (ValueError, OSError) as error:
        return error
    return None


def _is_begun(path: pathlib.Path) -> bool:
    """Return whether there is something that another config, or other weights, could spoil."""
    if has_checkpoints(path):
        return True
    return any(
        has_checkpoints(trial) or (trial / SUMMARY_FILE).exists()
        for trial in path.glob(f"{TRIALS}/*")
    )


def _require_own_files(path: pathlib.Path) -> None:
    """Raise ValueError for links among the files of a run, which would be written elsewhere."""
    for name in FILES:
        if (path / name).is_symlink():
            raise ValueError(
                f"{path / name} is a link: a run writes only into its workdir. "
                "Replace it by a copy of the file."
            )


_KEPT_FIELDS = ("model.compute_dtype",)
"""Fields whose `auto` stands for the value of an earlier start (`layout.keep_layout`)."""


def require_same_config(path: pathlib.Path, config: RunConfig) -> None:
    """Raise ValueError, with the fields, if the folder belongs to a run with another config."""
    if not (path / CONFIG_FILE).exists():
        return
    stored = flatten(_add_defaults(read_config(path), type(config)))
    now = flatten(json.loads(json.dumps(to_dict(config))))
    if ("search.learning_rates" in stored) != ("search.learning_rates" in now):
        raise ValueError(
            f"workdir {str(path)!r} belongs to a run of the other kind, "
            "pre-training or fine-tuning: choose another workdir. "
            "To fine-tune the weights of a run, give its folder as config.init_from."
        )
    lines = []
    for name in _list_differences(stored, now):
        if name in _KEPT_FIELDS and now.get(name) == "auto":
            continue
        there = _format_value(stored, name)
        given = _format_value(now, name)
        lines.append(f"{name[:MAX_SHOWN]}: there {there}, given {given}")
    if lines:
        raise ValueError(
            f"workdir {str(path)!r} belongs to a run with another config:{list_lines(lines)}\n"
            "Choose another workdir, or give the config it was started with."
        )


def has_same_config(path: pathlib.Path, config: RunConfig) -> bool:
    """Return True if a folder belongs to a run for which this config was requested."""
    if not (path / CONFIG_FILE).exists():
        return False
    try:
        stored = load_recipe(str(path / CONFIG_FILE))
    except (OSError, ValueError):  # no config of a run
        return False
    return type(stored) is type(config) and not _list_differences(
        flatten(json.loads(json.dumps(to_dict(stored)))),
        flatten(json.loads(json.dumps(to_dict(config)))),
    )


def _list_differences(stored: Mapping[str, object], now: Mapping[str, object]) -> list[str]:
    """Return the fields of the computation that differ, in order."""
    different = []
    for name in sorted(stored.keys() | now.keys()):
        if stored.get(name) != now.get(name) and not is_within(name, RUNTIME_FIELDS):
            different.append(name)
    return different


def _format_value(values: Mapping[str, object], name: str) -> str:
    return shorten(repr(values.get(name, "not set")), MAX_SHOWN)


def _add_defaults(stored: JsonObject, kind: type) -> JsonObject:
    """Return a stored config with the defaults of fields that it lacks, or unchanged."""
    try:
        return json.loads(json.dumps(to_dict(from_dict(kind, stored))))
    except ValueError:
        return stored
