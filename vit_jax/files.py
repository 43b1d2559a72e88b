"""Writing a file completely or not at all."""

import contextlib
import os
import pathlib
from collections.abc import Iterator
from typing import BinaryIO


class WriteError(OSError, ValueError):
    """A file cannot be written: an error of the system, and a value that a user can change, its path."""

    def __str__(self) -> str:
        return (
            f"{self.filename} cannot be written: {self.strerror}. "
            "Nothing was changed; choose an existing folder with free space and write permission."
        )


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
