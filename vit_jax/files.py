"""Writing a file completely or not at all; reading one that may be anything; showing names and errors of any kind."""

import contextlib
import os
import pathlib
import re
import stat
from collections.abc import Iterator
from typing import BinaryIO

# Control characters, separators of lines, marks that turn the direction of text, and surrogates.
_UNPRINTABLE = re.compile("[\0-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


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
            "Nothing was changed; choose an existing folder with free space and write permission."
        )


@contextlib.contextmanager
def make_folder(path: pathlib.Path) -> Iterator[None]:
    """Makes a folder and its parents; after a ValueError in the context those that it made go again, unless filled.

    Raises:
      WriteError: the system refuses.
    """
    made = [folder for folder in (path, *path.parents) if not folder.exists()]
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise WriteError(error.errno, error.strerror or str(error), str(path)) from error
    try:
        yield
    except ValueError:
        with contextlib.suppress(OSError):  # not empty
            for folder in made:
                folder.rmdir()
        raise


@contextlib.contextmanager
def open_atomically(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Yields a new file in the folder of `path`; it replaces `path` at the end, or is removed after an error.

    The file's `name` is its path, for libraries that write by path.

    Raises:
      WriteError: the system refuses: no such folder, no permission, no space.
    """
    path = pathlib.Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.unlink(missing_ok=True)
        with open(temporary, "x+b") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())  # or a crash could leave the new name without content
        temporary.replace(path)
    except OSError as error:
        raise WriteError(error.errno, error.strerror or str(error), str(path)) from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def write_atomically(path: str | os.PathLike[str], content: str | bytes | bytearray) -> None:
    """Replaces a file by text (as UTF-8) or bytes; arguments and errors as for `open_atomically`."""
    with open_atomically(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)
