"""Mirrors: names, sizes and generations of a bucket's objects in a folder of this machine.

A placeholder has the name and size of its object, no content (it takes no space), and no permission
to read; its time of change is the object's generation in microseconds. `open_remote` reads its
content from the bucket.
"""

import errno
import io
import os
import pathlib
import secrets
import stat

from vit_jax.storage import SCHEME
from vit_jax.storage.buckets import (
    READ_AHEAD_BYTES,
    BucketPath,
    Ranges,
    Status,
    run_in_threads,
)
from vit_jax.storage.gcs_client import raise_system_errors, request_options

_PLACEHOLDER = 0o200
"""Permissions of a placeholder, which no reader can take for a file of zeros."""


def mirror(address: BucketPath, root: pathlib.Path, whole: tuple[str, ...] = ()) -> pathlib.Path:
    """Create or update a folder with a placeholder for each object below an address; return it.

    Args:
      address: the folder in the bucket.
      root: the folder of all mirrors on this machine.
      whole: ends of names whose objects are downloaded.

    Raises:
      OSError: the bucket cannot be listed, or the folder cannot be written.
    """
    folder = root / address.bucket / address.key
    objects = {}
    changed = []
    for path, status in address.objects():
        local = folder / path.relative_to(address)
        objects[local] = (path, status)
        if not _is_current(local, status):
            changed.append(local)
    if not objects:
        raise FileNotFoundError(errno.ENOENT, "there is no object below this address", str(address))

    def store(local: pathlib.Path) -> None:
        path, status = objects[local]
        _store_object(path, status, local, is_whole=local.name.endswith(whole))

    run_in_threads(store, changed)
    for local in folder.rglob("*"):
        if local not in objects and _is_removable(local, whole):
            local.unlink(missing_ok=True)
    return folder


def _is_removable(local: pathlib.Path, whole: tuple[str, ...]) -> bool:
    """Return True for a complete file of a mirror.

    Another process may be writing a hidden file.
    """
    if not local.is_file() or local.name.startswith("."):
        return False
    return _is_placeholder(local) or (bool(whole) and local.name.endswith(whole))


def fetch(path: BucketPath, root: pathlib.Path) -> pathlib.Path:
    """Download an object into the folder of the mirrors, unless it is current; return the file."""
    local = root / path.bucket / path.key
    status = path.stat()
    if not _is_current(local, status) or _is_placeholder(local):
        _store_object(path, status, local, is_whole=True)
    return local


def open_remote(path: str | os.PathLike[str], root: pathlib.Path) -> io.BufferedReader | None:
    """Open an object of a bucket, by its address or by its placeholder in a mirror below `root`.

    Return None for other files.
    """
    if isinstance(path, BucketPath):
        return path.open_ranges()

    text = os.fspath(path)
    if not text.startswith(f"{root}/") or not _is_placeholder(pathlib.Path(text)):
        return None
    status = os.stat(text)
    address = BucketPath(SCHEME + text.removeprefix(f"{root}/"))
    ranges = Ranges(address, status.st_size, generation=status.st_mtime_ns // 1000)
    return io.BufferedReader(ranges, READ_AHEAD_BYTES)


def _is_current(local: pathlib.Path, status: Status) -> bool:
    """Return True if a file or placeholder is of the present generation of its object."""
    return local.exists() and local.stat().st_mtime_ns == status.generation * 1000


def _is_placeholder(path: pathlib.Path) -> bool:
    """Return True for a file without the content of its object."""
    return stat.S_IMODE(path.stat().st_mode) == _PLACEHOLDER


def _store_object(path: BucketPath, status: Status, local: pathlib.Path, is_whole: bool) -> None:
    """Write an object or its placeholder, completely or not at all."""
    local.parent.mkdir(parents=True, exist_ok=True)

    temporary = local.with_name(f".{secrets.token_hex(8)}")
    try:
        temporary.touch(0o600)
        if is_whole:
            _download(path, status.generation, temporary)
        else:
            os.truncate(temporary, status.st_size)
            temporary.chmod(_PLACEHOLDER)
        time_of_change = status.generation * 1000
        os.utime(temporary, ns=(time_of_change, time_of_change))
        temporary.replace(local)
    finally:
        temporary.unlink(missing_ok=True)


def _download(path: BucketPath, generation: int, file: pathlib.Path) -> None:
    """Write the content of one generation of an object to a file."""
    with raise_system_errors(path):
        path.blob().download_to_filename(
            file,
            if_generation_match=generation,
            **request_options(),
        )
