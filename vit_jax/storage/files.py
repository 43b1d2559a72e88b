"""Atomic writes, bounded reads, and paths of this machine or of a bucket.

A path is one of this machine, or of a bucket (`buckets.BucketPath`). `expand_path` returns either.
"""

import contextlib
import errno
import fcntl
import functools
import io
import json
import os
import pathlib
import re
import secrets
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator
from typing import IO, TYPE_CHECKING, Any, AnyStr, BinaryIO, cast

from vit_jax.storage import is_address

if TYPE_CHECKING:
    from vit_jax.storage.buckets import BucketPath

JsonObject = dict[str, Any]
"""Values of JSON by name."""

_NEITHER = {
    stat.S_IFDIR: (errno.EISDIR, os.strerror(errno.EISDIR)),
    stat.S_IFSOCK: (errno.EINVAL, "it is a socket"),
    stat.S_IFBLK: (errno.EINVAL, "it is a block device"),
}
"""Kinds of paths that can be neither replaced nor written into, with the error of each."""
_MOST_LINKS = 40
"""Number of links that are followed, as by Linux."""
_MOST_LETTERS = 50
"""Letters of a name that are part of another name; systems allow 255 bytes."""
_BUCKET = re.compile(r"(?:\w+:)?(gs|s3)://")
"""The begin of an address of a bucket, also in folder:gs://…"""
_MOUNT_TOOLS = {"gs": "gcsfuse", "s3": "mount-s3"}


def reject_bucket(path: str, option: str, *, allowed: bool = False) -> None:
    """Raise ValueError for an address of a bucket, which Python would take for a folder "gs:".

    Args:
      path: the value of an option.
      option: its name and value, for the message.
      allowed: accept gs://, which is read or written here.
    """
    match = _BUCKET.match(path)
    if match is None or (allowed and match[1] == "gs"):
        return
    raise ValueError(
        f"{option}: a folder is needed, and this is the address of a bucket. "
        f"Mount the bucket ({_MOUNT_TOOLS[match[1]]} BUCKET FOLDER) and give the folder; "
        "docs/gcs.md lists the options that take gs:// directly."
    )


def expand_path(path: str | os.PathLike[str]) -> pathlib.Path:
    """Return a path with the home folder in place of `~` and `~user`, or a `BucketPath` for gs://.

    Raises:
      ValueError: the system knows no such user, or no home folder of a user without a name, as in
        some containers; an address names no bucket, or the libraries for it are not installed.
    """
    if is_address(path):
        # A BucketPath has the methods of a path that are used.
        return cast(pathlib.Path, _open_address(os.fspath(path)))
    try:
        return pathlib.Path(path).expanduser()
    except RuntimeError:
        raise ValueError(
            f"{os.fspath(path)}: its home folder is not known. Write the path in full."
        ) from None


def cache_folder(name: str) -> pathlib.Path:
    """Return the user's folder for files that can be computed again.

    It is $XDG_CACHE_HOME/vit_jax/NAME, by default in ~/.cache.
    """
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return expand_path(home) / "vit_jax" / name


def use_compilation_cache(enabled: bool) -> None:
    """Keep compiled programs for other processes, unless the user has chosen a cache of JAX."""
    import jax

    if enabled and not jax.config.jax_compilation_cache_dir:  # type: ignore[attr-defined]
        jax.config.update("jax_compilation_cache_dir", str(cache_folder("xla")))


def _open_address(address: str) -> "BucketPath":
    from vit_jax.storage import buckets

    try:
        return buckets.open_address(address)
    except ImportError as error:
        from vit_jax.imports.extras import install_command

        raise ValueError(
            f"{address}: gs:// needs {error.name}, which is not installed: "
            f"{install_command('gcs')}. "
            "Or mount the bucket (gcsfuse BUCKET FOLDER) and give the folder."
        ) from None


def resolve_path(path: str | os.PathLike[str]) -> pathlib.Path:
    """Return `expand_path(path)` in full and without links."""
    path = expand_path(path)
    if is_in_bucket(path):
        return path
    return pathlib.Path(os.path.realpath(path))


def is_in_bucket(path: str | os.PathLike[str]) -> bool:
    """Return True for a `BucketPath`, the path of an object or folder of a bucket."""
    return not isinstance(path, str) and is_address(path)


@functools.cache  # a run opens its data several times
def mirror(address: str, *whole: str) -> pathlib.Path:
    """Return a folder of this machine with the names below a gs:// address.

    `open_regular` reads their content from the bucket. Files whose names end in one of `whole` are
    downloaded, for libraries that open them by themselves.

    Raises:
      ValueError: the address cannot be listed.
    """
    from vit_jax.storage import mirrors

    with _explain_unreadable(address):
        return mirrors.mirror(_open_address(address.rstrip("/")), _mirror_root(), whole)


def fetch(path: pathlib.Path) -> pathlib.Path:
    """Return a copy of an object in a bucket, in the user's cache folder; errors as `mirror`."""
    from vit_jax.storage import mirrors

    with _explain_unreadable(str(path)):
        return mirrors.fetch(cast("BucketPath", path), _mirror_root())


@contextlib.contextmanager
def _explain_unreadable(address: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ValueError(
            f"{address}: cannot be read: {error.strerror}. Correct the address."
        ) from error


def is_mirrored(path: str) -> bool:
    """Return True for the path of a file in a `mirror`."""
    return path.startswith(f"{_mirror_root()}/")


def _mirror_root() -> pathlib.Path:
    """Return the folder of all mirrors, without links, because paths are compared with it."""
    return _without_links(cache_folder("gs"))


_without_links = functools.cache(lambda path: pathlib.Path(os.path.realpath(path)))


# Reading files that others made.

MAX_JSON_BYTES = 2**26
MAX_JSON_DEPTH = 64
"""Number of levels that recursive code handles."""


def open_regular(path: str | os.PathLike[str]) -> io.BufferedReader:
    """Open a regular file for reading.

    Reading a device would not end, and reading a pipe would wait. Objects of buckets are read in
    ranges, by a `BucketPath` or by their name in a `mirror`.

    Raises:
      ValueError: it is another kind of file.
      OSError: an error of the system.
    """
    if is_in_bucket(path) or is_mirrored(os.fspath(path)):
        from vit_jax.storage import mirrors

        remote = mirrors.open_remote(path, _mirror_root())
        if remote is not None:
            return remote
    # Checked before the file is opened, because opening a device can have effects.
    if stat.S_ISREG(os.stat(path).st_mode):
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
        if stat.S_ISREG(os.fstat(descriptor).st_mode):  # it may have been replaced since
            return os.fdopen(descriptor, "rb")
        os.close(descriptor)
    raise ValueError("it is not a regular file")


def measure_size(file: BinaryIO) -> int:
    """Return the size in bytes of a file from `open_regular`."""
    remote_size: int | None = getattr(getattr(file, "raw", None), "size", None)
    if remote_size is not None:
        return remote_size
    return os.fstat(file.fileno()).st_size


def read_range(path: str | os.PathLike[str], offset: int, size: int) -> bytes:
    """Return bytes of a regular file, fewer at its end; errors as `open_regular`."""
    with open_regular(path) as file:
        raw = cast(io.RawIOBase, file.raw)  # without a buffer, which would read ahead
        raw.seek(offset)
        return raw.read(max(size, 0)) or b""  # a negative size would read to the end


def read_bounded(path: str | os.PathLike[str], most_bytes: int) -> bytes:
    """Return the content of a regular file of at most `most_bytes` bytes.

    Raises:
      ValueError: it is another kind of file, or larger.
      OSError: an error of the system.
    """
    with open_regular(path) as file:
        stated = measure_size(file)
        content = b""
        if stated <= most_bytes:
            content = file.read(stated + 1) or b""
        if len(content) > stated:  # it grows, or states a size of 0, as files of the system do
            content += file.read(most_bytes + 1 - len(content)) or b""
    if max(stated, len(content)) > most_bytes:
        raise ValueError(f"it is larger than {most_bytes:,} bytes")
    return content


def read_json(path: str | os.PathLike[str], most_bytes: int = MAX_JSON_BYTES) -> Any:
    """Return the JSON value in a file.

    Raises:
      ValueError: the file cannot be read, is larger than `most_bytes`, or holds no JSON; the
        message names it.
    """
    name = os.fspath(path)
    try:
        return parse_json(read_bounded(path, most_bytes))
    except OSError as error:
        raise ValueError(f"{name} is not readable JSON: {error.strerror}.") from error
    except ValueError as error:
        raise ValueError(f"{name} is not readable JSON: {error}.") from error


def parse_json(text: str | bytes, **options: Any) -> Any:
    """Return the value of a JSON text; `options` are those of `json.loads`.

    Raises:
      ValueError: it is not JSON, or nested deeper than `MAX_JSON_DEPTH`.
    """
    too_deep = ValueError(f"it is nested deeper than {MAX_JSON_DEPTH} levels")
    try:
        value = json.loads(text, **options)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"it is not JSON ({error})") from error
    except RecursionError:
        raise too_deep from None
    level = [value]
    for _ in range(MAX_JSON_DEPTH + 1):
        level = _list_children(level)
    if level:
        raise too_deep
    return value


def _list_children(parents: Iterable[Any]) -> list[Any]:
    """Return the values of all objects and the items of all lists."""
    children: list[Any] = []
    for parent in parents:
        if isinstance(parent, dict):
            children += parent.values()
        elif isinstance(parent, list):
            children += parent
    return children


def read_lines(file: IO[AnyStr], most: int) -> Iterator[AnyStr]:
    """Yield the lines of a file with their ends.

    Raises:
      ValueError: a line has more than `most` bytes or characters.
    """
    number = 0
    while line := file.readline(most + 1):
        number += 1
        if len(line) > most:
            unit = "bytes" if isinstance(line, bytes) else "characters"
            raise ValueError(f"line {number:,} is longer than {most:,} {unit}")
        yield line


_CLEANUPS: list[Callable[[], object]] = []


def clean_up_at_once(action: Callable[[], object]) -> None:
    """Call `action` too when `hosts.exits.leave_at_once` ends the process, without `atexit`."""
    _CLEANUPS.append(action)


def clean_up() -> None:
    """Call each action of `clean_up_at_once` once."""
    while _CLEANUPS:
        with contextlib.suppress(OSError):
            _CLEANUPS.pop()()


# Writing.

OUT_OF_FILES = (errno.EMFILE, errno.ENFILE)
"""Errors of the limits of a process and of a machine, not of a path."""
TOO_MANY_FILES = (
    "too many open files: the limit of this process or machine is reached. "
    "Raise it (ulimit -n 65536)."
)


class WriteError(OSError, ValueError):
    """A file cannot be written: an error of the system, and of a value, the path."""

    def __str__(self) -> str:
        if self.errno in OUT_OF_FILES:
            return TOO_MANY_FILES
        return (
            f"{self.filename} cannot be written: {self.strerror}. No file was changed; "
            "choose a path in an existing folder with free space and write permission."
        )


@contextlib.contextmanager
def make_folder(path: pathlib.Path) -> Iterator[None]:
    """Create a folder and its parents; after a ValueError or a stop, remove the new empty ones.

    Links are followed, also those whose target does not exist. A bucket has no folders: nothing is
    created.

    Raises:
      WriteError: an error of the system, or `path` is not a folder.
    """
    if is_in_bucket(path):
        yield
        return
    try:
        folder = pathlib.Path(os.path.realpath(path))
        made = [missing for missing in (folder, *folder.parents) if not missing.exists()]
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = error.strerror or str(error)
        if isinstance(error, FileExistsError):
            reason = "it is not a folder"
        raise WriteError(error.errno, reason, str(path)) from error
    try:
        yield
    except (ValueError, KeyboardInterrupt):
        with contextlib.suppress(OSError):  # not empty
            for folder in made:
                folder.rmdir()
        raise


@contextlib.contextmanager
def open_atomically(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Yield a new file that replaces `path` at the end, or is removed after an error.

    Links are followed: the target is replaced, and the link stays. The file is in the folder of the
    target, and its `name` is its path, for libraries that write by path. A pipe, a terminal,
    another character device or an open descriptor (`/dev/stdout`) is not replaced: at the end the
    content is written into it. An object of a bucket is uploaded at the end.

    Raises:
      WriteError: an error of the system (no such folder, no permission, no space), or `path` is a
        folder, a socket, a block device or a pipe without a reader.
      BrokenPipeError: the reader of a pipe has closed it.
    """
    try:
        with _open_replacement(path) as file:
            yield file
    except BrokenPipeError:
        raise
    except OSError as error:
        raise WriteError(error.errno, error.strerror or str(error), str(path)) from error


def _open_replacement(
    path: str | os.PathLike[str],
) -> contextlib.AbstractContextManager[BinaryIO]:
    """Return the context of a new file that becomes the content of `path`."""
    if is_in_bucket(path):
        return _upload_at_end(cast("BucketPath", path))
    target = _follow(pathlib.Path(path))
    if _is_stream(target):
        return _write_at_end(_open_stream(target))
    return _open_beside(target)


@contextlib.contextmanager
def _upload_at_end(path: "BucketPath") -> Iterator[BinaryIO]:
    """Yield a temporary file, and upload it unless there was an error."""
    with tempfile.NamedTemporaryFile() as file:
        yield cast(BinaryIO, file)
        file.seek(0)
        path.write_bytes(file.read())


def write_atomically(path: str | os.PathLike[str], content: str | bytes | bytearray) -> None:
    """Write text (as UTF-8) or bytes to a file; see `open_atomically`."""
    if isinstance(content, str):
        content = content.encode()
    with open_atomically(path) as file:
        file.write(content)


def find_target(path: str | os.PathLike[str]) -> pathlib.Path | None:
    """Return the file that `open_atomically` creates or replaces.

    Return None if it writes into a pipe, a device or a descriptor.

    Raises:
      OSError: it is a folder, a socket, a block device or a link of a circle.
    """
    target = _follow(pathlib.Path(path))
    if _is_stream(target):
        return None
    return target


def _follow(path: pathlib.Path) -> pathlib.Path:
    """Return the path that links lead to, which may not exist.

    Links of this process to its descriptors are kept.
    """
    for _ in range(_MOST_LINKS):
        path = pathlib.Path(os.path.realpath(path.parent), path.name)
        if _is_descriptor(path) or not path.is_symlink():
            return path
        path = path.parent / os.readlink(path)
    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))


def _is_descriptor(path: pathlib.Path) -> bool:
    return path.name.isdecimal() and str(path.parent) == os.path.realpath("/proc/self/fd")


def _is_stream(path: pathlib.Path) -> bool:
    """Return True for a path that must not be replaced, False for a regular or missing file.

    Raises:
      OSError: it can be neither replaced nor written into.
    """
    if _is_descriptor(path):
        return True
    try:
        kind = stat.S_IFMT(path.stat().st_mode)
    except FileNotFoundError:
        return False
    if kind in _NEITHER:
        raise OSError(*_NEITHER[kind])
    return kind != stat.S_IFREG


def _open_stream(path: pathlib.Path) -> BinaryIO:
    if _is_descriptor(path):  # a second opening of the same file would begin at its start
        return os.fdopen(os.dup(int(path.name)), "wb")
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_NONBLOCK)  # without a reader it would wait
    except OSError as error:
        if path.is_fifo() and error.errno == errno.ENXIO:
            raise OSError(errno.ENXIO, "no program reads this pipe") from None
        raise
    os.set_blocking(descriptor, True)
    return os.fdopen(descriptor, "wb")


@contextlib.contextmanager
def _write_at_end(stream: BinaryIO) -> Iterator[BinaryIO]:
    """Yield a temporary file, in which writers may seek; without an error, copy it into a stream."""
    with stream, tempfile.TemporaryFile() as file:
        yield file
        file.seek(0)
        print(end="", flush=True)  # the stream may be standard output
        shutil.copyfileobj(file, stream)


@contextlib.contextmanager
def _open_beside(path: pathlib.Path) -> Iterator[BinaryIO]:
    """Yield a new file in the folder of a regular file, and rename it unless there was an error."""
    temporary = path.with_name(f".{path.name[:_MOST_LETTERS]}.{secrets.token_hex(8)}.tmp")
    with open(temporary, "x+b") as file:  # fails if it exists: it would belong to another process
        with contextlib.suppress(OSError):  # some file systems have no locks
            _lock(file)
        try:
            yield file
            file.flush()
            os.fsync(file.fileno())  # or a crash could leave the new name without content
            temporary.replace(path)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise


_TEMPORARY = re.compile(r"\..*\.[0-9a-f]{16}\.tmp")  # names that `_open_beside` gives


def find_unfinished(folder: pathlib.Path) -> list[pathlib.Path]:
    """Return temporary files of `open_atomically`, at any depth, whose process has ended."""
    unfinished = []
    for path in folder.rglob(".*.tmp"):
        if _TEMPORARY.fullmatch(path.name) and not _is_locked(path):
            unfinished.append(path)
    return unfinished


def _lock(file: BinaryIO) -> None:
    """Lock a file until it is closed.

    Raises:
      OSError: another process has it locked, or the file system has no locks.
    """
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _is_locked(path: pathlib.Path) -> bool:
    """Return True if a process may still be writing a file."""
    try:
        with open_regular(path) as file:
            _lock(file)
    except (OSError, ValueError):
        return True
    return False


def remove_tree(folder: pathlib.Path) -> None:
    """Remove a folder and its content, as far as the system permits."""
    if not is_in_bucket(folder):
        shutil.rmtree(folder, ignore_errors=True)
        return
    with contextlib.suppress(OSError):
        cast("BucketPath", folder).rmtree()
