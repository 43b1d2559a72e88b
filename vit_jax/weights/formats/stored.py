"""An open file of named arrays, and the rules of every format.

Names are plain, types are known, and arrays are no larger than the memory. Every error in a file
becomes a ValueError that names the file and the part.
"""

import contextlib
import dataclasses
import math
import os
import pathlib
import struct
import tokenize
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

import ml_dtypes
import numpy as np
from safetensors import SafetensorError

from vit_jax.imports.references import CodeNotAllowed
from vit_jax.storage.files import JsonObject
from vit_jax.text.printable import shorten

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = (
    *map(np.dtype, ("float16", "float32", "float64", "int8", "int16", "int32", "int64")),
    *map(np.dtype, ("uint8", "uint16", "uint32", "uint64", "bool")),
    BFLOAT16,
)
ALLOWED = f"Allowed: {', '.join(map(str, DTYPES))}."
DAMAGED = "The file is damaged or incomplete: fetch it again."
MAX_ARRAYS = 10_000  # 16 in each of 600 layers; a header takes a third of a millisecond
MAX_NAME_CHARACTERS = 1024
_ODD_PARTS = {"", ".", ".."}
_SHOWN_CHARACTERS = 80
_MAX_ERROR_CHARACTERS = 500
# Errors of the system and of parsers on damaged bytes; RuntimeError includes RecursionError and
# NotImplementedError.
_BUILT_IN = (
    EOFError,
    MemoryError,
    OSError,
    OverflowError,
    RuntimeError,
    SyntaxError,
    TypeError,
    ValueError,
)
_PARSERS = (
    *_BUILT_IN,
    struct.error,
    zlib.error,
    zipfile.BadZipFile,
    tokenize.TokenError,
    SafetensorError,
)


@contextlib.contextmanager
def naming(subject: str) -> Iterator[None]:
    """Turn any error inside into a ValueError whose message starts with the subject.

    The subject is a file, or a part of one.
    """
    try:
        yield
    except CodeNotAllowed:  # it names the file
        raise
    except _PARSERS as error:
        raise ValueError(f"{subject}: {_describe_error(error)}") from error


def _describe_error(error: BaseException) -> str:
    if type(error) is ValueError:
        return str(error)
    if isinstance(error, MemoryError):
        return "there is not enough memory for it."
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}."
    text = str(error).rstrip(".")[:_MAX_ERROR_CHARACTERS]
    return f"{text or type(error).__name__}. {DAMAGED}"


def quote(name: str) -> str:
    """Return a name from a file for printing: quoted, escaped and of bounded length."""
    return repr(shorten(name, _SHOWN_CHARACTERS))


class StoredArray(NamedTuple):
    """Shape and dtype of an array as its file announces them; the dtype is one of `DTYPES`."""

    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def num_bytes(self) -> int:
        """Return the number of bytes in memory."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclasses.dataclass(frozen=True)
class ArrayFile:
    """A file of arrays, open for reading."""

    path: pathlib.Path
    arrays: Mapping[str, StoredArray]  # by name; no data has been read for it
    metadata: JsonObject  # written by this package; empty for a file from elsewhere
    read_array: Callable[[str], np.ndarray]

    def read(self, name: str) -> np.ndarray:
        """Return a new array: C order, the machine's byte order, bit for bit as stored."""
        if name not in self.arrays:
            raise ValueError(
                f"{self.path}: there is no array {quote(name)} among its {len(self.arrays)}."
            )
        with naming(str(self.path)), naming(f"array {quote(name)}"):
            return self.read_array(name)


def check_number(number: int) -> None:
    """Raise ValueError for more arrays than any network has."""
    if number > MAX_ARRAYS:
        raise ValueError(
            f"{number:,} arrays are more than the {MAX_ARRAYS:,} allowed: is it a file of weights?"
        )


def check_name(name: str) -> None:
    """Raise ValueError for a name that could be taken for another path, or garble a terminal."""
    has_odd_parts = not _ODD_PARTS.isdisjoint(name.split("/"))
    is_garbled = "\\" in name or not name.isprintable()
    if has_odd_parts or is_garbled or len(name) > MAX_NAME_CHARACTERS:
        raise ValueError(
            f"the array name {quote(name)} is not allowed: names are words joined by '/', "
            "without '..', backslashes and control characters, of at most "
            f"{MAX_NAME_CHARACTERS} characters."
        )


def check_fits(arrays: Iterable[StoredArray]) -> None:
    """Raise ValueError if the arrays together exceed the physical memory of this machine."""
    try:
        memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):  # not every system states it
        return
    total_bytes = sum(array.num_bytes for array in arrays)
    if total_bytes > memory_bytes:
        raise ValueError(
            f"its arrays take {total_bytes / 1e9:,.1f} GB and there are "
            f"{memory_bytes / 1e9:,.1f} GB of memory. Use a machine with more memory, "
            "if this is the right file."
        )


def prepare_arrays(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the arrays in name order, each in C order and little-endian, copied only if needed.

    Raises:
      ValueError: a name or a dtype is not allowed, or there are too many arrays.
    """
    check_number(len(arrays))
    for name, array in arrays.items():
        check_name(name)
        if array.dtype.newbyteorder("=") not in DTYPES:
            raise ValueError(
                f"array {quote(name)} is of dtype {array.dtype}, which cannot be written. {ALLOWED}"
            )

    ordered = {}
    for name in sorted(arrays):
        array = np.asarray(arrays[name])
        little_endian = array.dtype.newbyteorder("<")
        ordered[name] = array.astype(little_endian, order="C", copy=False)
    return ordered
