"""A run's folder: that it can be used at all, belongs to this run and its config, and is the same for every process."""

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
from vit_jax.config.parsing import flatten, from_dict
from vit_jax.config.schema import RUNTIME_FIELDS
from vit_jax.storage.files import OUT_OF_FILES, JsonObject, expanded, resolved, write_atomically
from vit_jax.text.printable import shortened
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
from vit_jax.weights.hub import is_hub_address

PASSING = {
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EIO,
    errno.ESTALE,
}  # what may be over when the command is started again
MAX_SHOWN = 200  # letters of a value in an error
TRIALS = "search"  # sub-folder of a fine-tuning run, with a workdir for each learning rate


@contextlib.contextmanager
def claim(workdir: str, config: RunConfig) -> Iterator[WorkdirLock]:
    """Create and lock the folder, check that it belongs to this config, write `config.json`; yield the lock.

    Raises:
      ValueError: the folder cannot be written or cannot hold checkpoints, is used by another run, belongs to a run of
        another config (the fields are named), or is not shared by all processes.
    """
    path = expanded(workdir).absolute()
    require_exact_path(path)
    lock = lock_of(path, enabled=hosts.is_first())
    with contextlib.ExitStack() as stack:
        stack.enter_context(refused_without_trace(path, CONFIG_FILE, START_FILE))
        prepare_shared(path)
        _raise_together(path, _take(lock, config, stack) if hosts.is_first() else None)
        with _recorded_error(path):
            yield lock


@contextlib.contextmanager
def _recorded_error(path: pathlib.Path) -> Iterator[None]:
    """Leave the error that ends the run in the folder.

    One of the config or the data leaves no trace; of a loss that is not finite `divergence.json` says more.
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
      ValueError: in every process: it cannot be written or cannot hold checkpoints, or is not shared by all processes.
      OSError: it is full, or its storage fails.
    """
    require_exact_path(path)
    token = (
        path / f".attempt_{hosts.gather(uuid.uuid4().hex)[0]}"
    )  # a name that no link in somebody else's folder has
    _raise_together(
        path, _change_workdir(path, lambda: _write_token(token)) if hosts.is_first() else None
    )
    seen = hosts.gather(token.exists())  # all have looked when this returns
    _raise_together(path, _change_workdir(path, token.unlink) if hosts.is_first() else None)
    if blind := [process for process, sees in enumerate(seen) if not sees]:
        raise ValueError(
            f"workdir {str(path)!r} is not the same folder in every process: {blind} cannot see what process 0 wrote. "
            "With several hosts it must be on storage that all of them share."
        )


def _write_token(token: pathlib.Path) -> None:
    token.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(token, "a full disk takes empty files")


def _change_workdir(path: pathlib.Path, change: Callable[[], None]) -> ValueError | OSError | None:
    """Call a function that changes the workdir; return the error of a workdir that cannot be written."""
    try:
        change()
    except OSError as error:
        if error.errno in (*PASSING, *OUT_OF_FILES):
            return OSError(error.errno, error.strerror, str(path))
        return ValueError(
            f"workdir {str(path)!r} cannot be written: {error.strerror}. Choose a folder that you may write to."
        )
    return None


def _raise_together(path: pathlib.Path, error: ValueError | OSError | None) -> None:
    """Raise in every process if the first has an error, there that error."""
    if any(hosts.gather(error is not None)):
        raise error or ValueError(
            f"workdir {str(path)!r} cannot be used; the first process says why."
        )


@contextlib.contextmanager
def refused_without_trace(path: pathlib.Path, *files: str) -> Iterator[None]:
    """Remove what the run made after a ValueError in the context, unless it is more than these files.

    Where another run has the lock, new files are of that run, and stay.
    """
    if not hosts.is_first():
        yield
        return
    made = [folder for folder in (path, *path.parents) if not folder.exists()]
    before: set[pathlib.Path] = set()
    with contextlib.suppress(OSError):  # there is none, or none that can be used, as will be said
        before.update(path.iterdir())
    try:
        yield
    except ValueError:
        with contextlib.suppress(OSError):
            new = {*path.iterdir()} - before
            is_locked = (path / LOCK_FILE).is_symlink() or (path / LOCK_FILE).exists()
            is_ours = not is_locked and {file.name for file in new} <= {*files}
            for file in new if is_ours else ():
                file.unlink()
            for folder in made:
                folder.rmdir()
        raise


def refuse_as_source(init_from: str | None, workdir: str) -> None:
    """Raise ValueError where the run would write into the folder that its weights come from."""
    if init_from is None or is_hub_address(init_from):
        return
    source, target = map(resolved, (init_from, workdir))
    if source == target or target in source.parents or source in target.parents:
        raise ValueError(
            f"config.init_from={init_from!r} and workdir {workdir!r} are the same folder, or one is inside the other. "
            "The first holds the source weights and is never written to; choose another workdir."
        )


def require_same_start(path: pathlib.Path, start: Mapping[str, object], source: str | None) -> None:
    """Records what a run starts from when it first starts; a resumed run must find the same.

    A start that left no checkpoint and no trial is overwritten. `start` holds JSON values that identify the weights
    ("parameters_sha256") and the data; `source` is where the weights come from.

    Raises:
      ValueError: weights or data have changed since; the weights of a run that is still training do.
    """
    file = path / START_FILE
    stored = read_start(file) if file.exists() and _is_begun(path) else None
    hosts.wait_for_all("start read")
    if stored is None:
        if hosts.is_first():
            write_atomically(file, json.dumps({"init_from": source, **start}, indent=2) + "\n")
        return
    if stored["parameters_sha256"] != start["parameters_sha256"]:
        raise ValueError(
            f"workdir {str(path)!r} was started from other weights than config.init_from={source!r} holds now. Is a "
            "run still training there? Give the weights it was started from, or another workdir."
        )
    if changed := [name for name, value in start.items() if stored.get(name, value) != value]:
        lines = "\n".join(
            f"  {name}: then {stored[name]!r}, now {start[name]!r}" for name in changed
        )
        raise ValueError(
            f"workdir {str(path)!r} was started on other data than those of now:\n{lines}\n(Files are compared by "
            "name and class.) Its results cannot be compared with new ones: restore the data, or choose another "
            "workdir."
        )


def _take(
    lock: WorkdirLock, config: RunConfig, stack: contextlib.ExitStack
) -> ValueError | OSError | None:
    """The part of the first process; returns its error, because all processes must learn of it before any raises."""
    path = lock.folder
    try:
        _require_own_files(path)
        stack.enter_context(lock)  # first: the config is of the run that has the folder
        if _is_begun(path):
            require_same_config(path, config)
            read_metrics(path)  # damage is found before anything is compiled
        write_atomically(path / CONFIG_FILE, json.dumps(to_dict(config), indent=2) + "\n")
    except (ValueError, OSError) as error:
        return error
    return None


def _is_begun(path: pathlib.Path) -> bool:
    """Return whether there is something that another config, or other weights, could spoil."""
    trials = path.glob(f"{TRIALS}/*")
    return has_checkpoints(path) or any(
        has_checkpoints(t) or (t / SUMMARY_FILE).exists() for t in trials
    )


def _require_own_files(path: pathlib.Path) -> None:
    """Raise ValueError for links in the place of files that the run writes: they would be written where they lead."""
    own = (
        CONFIG_FILE,
        START_FILE,
        METRICS_FILE,
        SUMMARY_FILE,
        PAUSE_FILE,
        DIVERGENCE_FILE,
        ERROR_FILE,
    )
    for name in own:
        if (path / name).is_symlink():
            raise ValueError(
                f"{path / name} is a link: a run writes only into its workdir. Replace it by a copy of the file."
            )


def require_same_config(path: pathlib.Path, config: RunConfig) -> None:
    """Raise ValueError, which names the fields, where the folder's `config.json` is of a run of another config."""
    if not (path / CONFIG_FILE).exists():
        return
    stored = flatten(_with_defaults(read_config(path), type(config)))
    now = flatten(json.loads(json.dumps(to_dict(config))))
    if ("search.learning_rates" in stored) != ("search.learning_rates" in now):
        raise ValueError(
            f"workdir {str(path)!r} belongs to a run of the other kind, pre-training or fine-tuning: choose another "
            "workdir. To fine-tune the weights of a run, give its folder as config.init_from."
        )
    differ = [
        name for name in sorted(stored.keys() | now.keys()) if stored.get(name) != now.get(name)
    ]
    lines = [
        f"  {name[:MAX_SHOWN]}: there {_shown(stored, name)}, given {_shown(now, name)}\n"
        for name in differ
        if not any(name == field or name.startswith(f"{field}.") for field in RUNTIME_FIELDS)
    ]
    if lines:
        raise ValueError(
            f"workdir {str(path)!r} belongs to a run with another config:\n{''.join(lines)}"
            "Choose another workdir, or give the config it was started with."
        )


def _shown(values: Mapping[str, object], name: str) -> str:
    return shortened(repr(values.get(name, "not set")), MAX_SHOWN)


def _with_defaults(stored: JsonObject, kind: type) -> JsonObject:
    """A stored config with the defaults of fields that it lacks, as those of an older version; or unchanged."""
    try:
        return json.loads(json.dumps(to_dict(from_dict(kind, stored))))
    except ValueError:
        return stored
