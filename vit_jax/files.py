"""Writing a file completely or not at all; reading one that may be anything; showing names and errors of any kind."""

import contextlib
import errno
import os
import pathlib
import re
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterator
from typing import BinaryIO

# Control characters, separators of lines, marks that turn the direction of text, and surrogates.
_UNPRINTABLE = re.compile("[\0-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")

_MOST_LINKS = 40  # as Linux
_MOST_LETTERS = 50  # of a name within another name: systems allow 255 bytes

_BUCKET = re.compile(r"(?:\w+:)?(gs|s3)://")  # also in folder:gs://…


def refuse_bucket(path: str, given: str) -> None:
    """Raises ValueError for an address of a bucket, which Python would take for a folder named "gs:".

    `given` is what the user wrote, with the name of the option or field.

    Files are read and written as of a file system: atomically renamed, locked, memory-mapped.
    """
    if found := _BUCKET.match(path):
        tool = {"gs": "gcsfuse", "s3": "mount-s3"}[found[1]]
        raise ValueError(
            f"{given}: a folder is needed, and this is the address of a bucket. Mount the bucket ({tool} BUCKET "
            "FOLDER) and give the folder; launch/README.md has the options. tpu_pod.sh and gke.sh mount theirs."
        )


def printable(name: str) -> str:
    """A name as a terminal may show it: without power over it, on one line; ordinary Unicode stays as it is."""
    return _UNPRINTABLE.sub(lambda match: ascii(match[0])[1:-1], name)


def printable_lines(message: str) -> str:
    """The same for a message of several lines, which stay lines."""
    return "\n".join(map(printable, message.split("\n")))


def first_line(error: BaseException) -> str:
    """Of an error's message the first line that has words; the error's class where none has."""
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)


def read_bounded(path: str | os.PathLike[str], most_bytes: int) -> bytes:
    """The content of a regular file: a link to a device would be read without end, and a pipe waited for.

    Raises:
      ValueError: it is of another kind, or larger than `most_bytes`.
      OSError: the system refuses.
    """
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise ValueError("it is not a regular file")
    with open(path, "rb") as file:
        content = file.read(most_bytes + 1)  # some files of the system state a size of 0
    if len(content) > most_bytes:
        raise ValueError(f"it is larger than {most_bytes:,} bytes")
    return content


class WriteError(OSError, ValueError):
    """A file cannot be written: an error of the system, and a value that a user can change, its path."""

    def __str__(self) -> str:
        return (
            f"{self.filename} cannot be written: {self.strerror}. "
            "No file was changed; choose a path in an existing folder with free space and write permission."
        )


@contextlib.contextmanager
def make_folder(path: pathlib.Path) -> Iterator[None]:
    """Create a folder and its parents; after a ValueError in the context, remove those it created, unless filled.

    Links are followed, also those whose target does not exist.

    Raises:
      WriteError: the system refuses, or `path` is not a folder.
    """
    try:
        folder = pathlib.Path(os.path.realpath(path))
        made = [missing for missing in (folder, *folder.parents) if not missing.exists()]
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = "it is not a folder" if isinstance(error, FileExistsError) else error.strerror or str(error)
        raise WriteError(error.errno, reason, str(path)) from error
    try:
        yield
    except ValueError:
        with contextlib.suppress(OSError):  # not empty
            for folder in made:
                folder.rmdir()
        raise


@contextlib.contextmanager
def open_atomically(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Yield a new file that replaces `path` at the end, or is removed after an error.

    Links are followed: the target is replaced, and the link stays. The file is in the folder of the target, and its
    `name` is its path, for libraries that write by path. A pipe, a terminal, another character device or an open
    descriptor (`/dev/stdout`) is not replaced: at the end the content is written into it.

    Raises:
      WriteError: the system refuses (no such folder, no permission, no space), or `path` is a folder, a socket, a block
        device or a pipe without a reader.
      BrokenPipeError: the reader of a pipe has closed it.
    """
    try:
        target = _follow(pathlib.Path(path))
        stream = _open_stream(target)
        with _open_beside(target) if stream is None else _write_at_end(stream) as file:
            yield file
    except BrokenPipeError:
        raise
    except OSError as error:
        raise WriteError(error.errno, error.strerror or str(error), str(path)) from error


def write_atomically(path: str | os.PathLike[str], content: str | bytes | bytearray) -> None:
    """Write text (as UTF-8) or bytes to a file; see `open_atomically`."""
    with open_atomically(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def _follow(path: pathlib.Path) -> pathlib.Path:
    """Return the path that links lead to, which may not exist. Links of this process to its descriptors are kept."""
    for _ in range(_MOST_LINKS):
        path = pathlib.Path(os.path.realpath(path.parent), path.name)
        if _is_descriptor(path) or not path.is_symlink():
            return path
        path = path.parent / os.readlink(path)
    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))


def _is_descriptor(path: pathlib.Path) -> bool:
    return path.name.isdecimal() and str(path.parent) == os.path.realpath("/proc/self/fd")


def _open_stream(path: pathlib.Path) -> BinaryIO | None:
    """Open a path that must not be replaced; return None for a regular file and for a path that does not exist.

    A descriptor is duplicated: a second opening of the same file would begin at its start.
    """
    if _is_descriptor(path):
        return os.fdopen(os.dup(int(path.name)), "wb")
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return None
    if stat.S_ISREG(mode):
        return None
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if not (stat.S_ISFIFO(mode) or stat.S_ISCHR(mode)):
        raise OSError(errno.EINVAL, "it is a socket" if stat.S_ISSOCK(mode) else "it is a block device")
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_NONBLOCK)  # without a reader it would wait
    except OSError as error:
        if stat.S_ISFIFO(mode) and error.errno == errno.ENXIO:
            raise OSError(errno.ENXIO, "no program reads this pipe") from None
        raise
    os.set_blocking(descriptor, True)
    return os.fdopen(descriptor, "wb")


@contextlib.contextmanager
def _write_at_end(stream: BinaryIO) -> Iterator[BinaryIO]:
    """Yield a temporary file, and copy it into a stream unless there was an error: writers may move its position."""
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
        try:
            yield file
            file.flush()
            os.fsync(file.fileno())  # or a crash could leave the new name without content
            temporary.replace(path)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise
