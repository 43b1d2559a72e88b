"""One kind of error for everything that can be wrong with a file: ValueError that names the file and the part."""

import contextlib
import struct
import zipfile
import zlib
from collections.abc import Iterable, Iterator

DAMAGED = "The file is damaged or was not fetched whole: fetch it again."
# What zipfile, zlib, json and the system raise on bytes that nobody vouched for; RuntimeError has RecursionError
# and NotImplementedError in it.
_PARSERS = (EOFError, MemoryError, OSError, OverflowError, RuntimeError, ValueError, struct.error, zlib.error)
_SHOWN_CHARACTERS = 80


@contextlib.contextmanager
def naming(subject: str) -> Iterator[None]:
    """Whatever goes wrong inside becomes a ValueError whose message starts with the subject.

    Args:
      subject: a file, or a part of one.
    """
    try:
        yield
    except (*_PARSERS, zipfile.BadZipFile) as error:
        raise ValueError(f"{subject}: {_reason(error)}") from error


def _reason(error: BaseException) -> str:
    if type(error) is ValueError:
        return str(error)
    if isinstance(error, MemoryError):
        return "there is not enough memory for it."
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}."
    return f"{str(error).rstrip('.') or type(error).__name__}. {DAMAGED}"


def repeated(names: Iterable[str]) -> str | None:
    """The first name that has been there before, or None."""
    seen: set[str] = set()
    for name in names:
        if name in seen:
            return name
        seen.add(name)
    return None


def shown(name: str) -> str:
    """A name from a file as it can be printed: quoted, escaped, and not endless."""
    return repr(name if len(name) <= _SHOWN_CHARACTERS else f"{name[:_SHOWN_CHARACTERS]}…")
