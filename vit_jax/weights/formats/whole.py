"""Writing a file completely or not at all."""

import contextlib
import os
import pathlib
from collections.abc import Iterator
from typing import BinaryIO


@contextlib.contextmanager
def write_whole(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Gives a new file beside `path`, which takes its place at the end, or vanishes if anything goes wrong before.

    Raises:
      ValueError: the system refuses: no such folder, no right to write, no space.
    """
    path = pathlib.Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.unlink(missing_ok=True)
        with open(temporary, "x+b") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())  # or a crash could leave the new name with nothing behind it
        temporary.replace(path)
    except OSError as error:
        raise ValueError(
            f"{path} cannot be written: {error.strerror or error}. "
            f"Nothing was changed; choose a folder that exists and has room, and that you may write to."
        ) from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
