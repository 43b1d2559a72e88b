"""A cache of arrays on disk.

Each entry is a folder, which is complete before it gets its name, and is checked before it is used.
The record of a folder, which is written last, holds the SHA-256 of each file.
"""

import contextlib
import dataclasses
import hashlib
import io
import json
import logging
import os
import pathlib
import secrets
import shutil
import tokenize
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypedDict

import numpy as np

from vit_jax.storage.files import WriteError, make_folder, open_regular, parse_json, read_bounded
from vit_jax.text.printable import first_line, printable

RECORD = "about.json"
# Age of an unfinished folder of another machine that is removed; a lock is renewed every 5 s
STALE_SECONDS = 24 * 3600.0
_UNFINISHED = ".unfinished_"
_MOST_RECORD_BYTES = 2**20
_DAMAGE = (OSError, ValueError, KeyError, TypeError, OverflowError, tokenize.TokenError)


class ArrayRecord(TypedDict):
    """An array file in the record of its folder."""

    dtype: str
    shape: list[int]
    sha256: str


@dataclasses.dataclass(frozen=True)
class Cache:
    """A folder of entries, for several processes.

    Attributes:
      folder: need not exist.
      lock: returns a context in which this process uses an unfinished folder.
      is_abandoned: (folder, now, expiry in seconds) -> True if no process uses an unfinished folder.
    """

    folder: pathlib.Path
    lock: Callable[[pathlib.Path], contextlib.AbstractContextManager[object]]
    is_abandoned: Callable[[pathlib.Path, float, float], bool]

    def remove_abandoned(self, now: float) -> None:
        """Remove unfinished folders of processes that were killed.

        `now` is a time of the cache's file system.
        """
        for folder in self.folder.glob(f"{_UNFINISHED}*"):
            # Another process may have removed the folder, or another user may own it.
            with contextlib.suppress(OSError):
                if self.is_abandoned(folder, now, STALE_SECONDS):
                    _remove(folder)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
    """Arrays with the same number of rows, kept in one folder of a cache.

    Attributes:
      folder: its name depends on `about`.
      about: JSON with all facts that determine the arrays.
      files: names of the array files.
      num_rows: length of each array.
      cache: the cache of the folder; None if the folder is only read.
    """

    folder: pathlib.Path
    about: str
    files: Sequence[str]
    num_rows: int
    cache: Cache | None = None

    def find(self) -> dict[str, np.ndarray] | None:
        """Return the arrays by file, mapped; None if they do not exist or are damaged.

        Damage is logged.
        """
        if not os.path.lexists(self.folder):
            return None
        try:
            return self.read(self.folder)
        except _DAMAGE as error:
            problem = printable(first_line(error))
            logging.getLogger(__name__).warning(
                "%s is damaged and is computed again: %s.", self.folder, problem
            )
            return None

    def read(self, folder: pathlib.Path) -> dict[str, np.ndarray]:
        """Return the arrays in a folder, mapped.

        They stay readable when the folder is renamed or removed.

        Raises:
          ValueError, OSError, KeyError, TypeError: a file is missing or not as recorded.
        """
        record = parse_json(read_bounded(folder / RECORD, _MOST_RECORD_BYTES))
        if record["about"] != json.loads(self.about):
            raise ValueError(f"{RECORD} describes other arrays")
        arrays = {}
        for file in self.files:
            arrays[file] = self._read_array(folder / file, record["arrays"][file])
        return arrays

    def write_record(self, folder: pathlib.Path, arrays: Mapping[str, ArrayRecord]) -> None:
        """Write the record of a folder whose array files are complete.

        `arrays` is by file, from `write_rows`.
        """
        record = {"about": json.loads(self.about), "arrays": dict(arrays)}
        (folder / RECORD).write_text(json.dumps(record, indent=2) + "\n")

    @contextlib.contextmanager
    def new_folder(self) -> Iterator[pathlib.Path]:
        """Yield a new locked folder, which becomes the entry's folder at the end.

        It is removed after an error, or if another process has published the same arrays.

        Raises:
          WriteError: a file cannot be written.
        """
        cache = self.cache
        assert cache is not None
        try:
            with make_folder(cache.folder):
                unfinished = _name_unfinished(cache.folder)
                # `tempfile` would hide the folder from other users of a shared cache.
                unfinished.mkdir()
            try:
                with cache.lock(unfinished):
                    cache.remove_abandoned(now=unfinished.stat().st_mtime)
                    yield unfinished
                self._publish(unfinished)
            finally:
                shutil.rmtree(unfinished, ignore_errors=True)
        except WriteError:
            raise
        except OSError as error:
            path = str(error.filename or self.folder)
            raise WriteError(error.errno, error.strerror or str(error), path) from error

    def _publish(self, complete: pathlib.Path) -> None:
        replaced = _name_unfinished(self.folder.parent)
        if os.path.lexists(self.folder):
            with contextlib.suppress(*_DAMAGE):
                self.read(self.folder)
                return  # another process has published it
            with contextlib.suppress(FileNotFoundError):  # another process has moved it
                self.folder.rename(replaced)
        try:
            complete.rename(self.folder)
        except OSError:  # another process was faster
            if not os.path.lexists(self.folder):
                raise
        finally:
            _remove(replaced)

    def _read_array(self, path: pathlib.Path, expected: ArrayRecord) -> np.ndarray:
        with open_regular(path) as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != expected["sha256"]:
            raise ValueError(
                f"the {path.stat().st_size:,} bytes of {path.name} do not have the recorded SHA-256"
            )
        array = np.lib.format.open_memmap(path, mode="r")
        has_dtype = array.dtype.name == expected["dtype"]
        has_shape = list(array.shape) == expected["shape"] and len(array) == self.num_rows
        if not has_dtype or not has_shape:
            raise ValueError(
                f"{path.name} has the dtype {array.dtype}, the shape {array.shape}; not as recorded"
            )
        return array


def write_rows(path: pathlib.Path, chunks: Iterable[np.ndarray], num_rows: int) -> ArrayRecord:
    """Write an array file, chunk by chunk.

    Return dtype, shape and SHA-256 of the computed rows, for the record.

    Raises:
      RuntimeError: the chunks do not have `num_rows` rows in all.
    """
    digest = hashlib.sha256()
    dtype = ""
    shape = list[int]()
    written = 0
    with open(path, "xb") as file:
        for chunk in chunks:
            pieces = [np.ascontiguousarray(chunk)]
            if not dtype:
                dtype = chunk.dtype.name
                shape = [num_rows, *chunk.shape[1:]]
                pieces.insert(0, _build_header(chunk.dtype, tuple(shape)))
            for piece in pieces:
                digest.update(piece.data)
                file.write(piece.data)
            written += len(chunk)
    if written != num_rows:
        raise RuntimeError(f"{path.name}: {written:,} of {num_rows:,} rows were computed.")
    return {"dtype": dtype, "shape": shape, "sha256": digest.hexdigest()}


def _build_header(dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
    header = io.BytesIO()
    facts = {
        "descr": np.lib.format.dtype_to_descr(dtype),
        "fortran_order": False,
        "shape": shape,
    }
    np.lib.format.write_array_header_1_0(header, facts)
    return np.frombuffer(header.getvalue(), np.uint8)


def _name_unfinished(cache: pathlib.Path) -> pathlib.Path:
    """Return a new hidden name. It is random, because processes in containers have equal numbers."""
    return cache / f"{_UNFINISHED}{secrets.token_hex(16)}"


def _remove(path: pathlib.Path) -> None:
    """Remove a folder with its content, or a link, file or pipe in its place.

    `shutil.rmtree` would wait for a pipe.
    """
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()
