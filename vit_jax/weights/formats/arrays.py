"""What a file of named arrays offers, and what is refused whatever its format: odd names and sizes.

A reader learns names, shapes and types from the file's headers, checks them, and takes memory for an
array only when that array is read.
"""

import abc
import contextlib
import dataclasses
import math
import os
import pathlib
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import Any, Self

import numpy as np

from vit_jax.weights.formats.failures import naming, shown

MAX_NAME_CHARACTERS = 1024
MAX_DIMS = 64  # NumPy's own limit


@dataclasses.dataclass(frozen=True)
class StoredArray:
    """An array as its file announces it.

    Attributes:
      shape: sizes of its dimensions; () for a single number.
      dtype: one of `encoding.DTYPES`, in the machine's byte order.
    """

    shape: tuple[int, ...]
    dtype: np.dtype

    def __post_init__(self) -> None:
        """Refuses what NumPy could not hold, so that `num_bytes` and `numpy.empty` can be relied on."""
        if len(self.shape) > MAX_DIMS:
            raise ValueError(f"it has {len(self.shape)} dimensions; at most {MAX_DIMS} are possible.")
        if any(size < 0 for size in self.shape):
            raise ValueError(f"its shape {self.shape} has a negative size.")
        # Zeros aside, for NumPy multiplies the others too.
        if math.prod(size for size in self.shape if size) * self.dtype.itemsize >= 2**63:
            raise ValueError(f"its shape {self.shape} is more than any memory holds.")

    @property
    def num_bytes(self) -> int:
        """Bytes in memory."""
        return math.prod(self.shape) * self.dtype.itemsize


class ArrayFile(abc.ABC):
    """A file of arrays, open for reading; close it, or use it as a context manager.

    Attributes:
      path: the file.
      arrays: shape and dtype of each array by name, in the order of the file; no data has been read for it.
      metadata: what the file was written with by this package; empty for a file from elsewhere.
    """

    def __init__(
        self,
        path: pathlib.Path,
        arrays: Mapping[str, StoredArray],
        metadata: dict[str, Any],
        resources: contextlib.ExitStack,
    ):
        self.path = path
        self.arrays = arrays
        self.metadata = metadata
        self._resources = resources

    def read(self, name: str) -> np.ndarray:
        """One array, in memory of its own: C order, the machine's byte order, bit for bit as stored.

        Raises:
          ValueError: there is no such array, its data is damaged, or memory does not suffice.
        """
        if name not in self.arrays:
            raise ValueError(f"{self.path}: there is no array {shown(name)} among its {len(self.arrays)}.")
        with naming(str(self.path)), naming(f"array {shown(name)}"):
            return self._read(name)

    @abc.abstractmethod
    def _read(self, name: str) -> np.ndarray: ...

    def close(self) -> None:
        """Closes the file; arrays that were read stay valid."""
        self._resources.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def check_name(name: str) -> None:
    """Raises ValueError for a name that could be taken for another place on disk, or garble a terminal."""
    odd_parts = {"", ".", ".."}.intersection(name.split("/"))
    if odd_parts or "\\" in name or not name.isprintable() or len(name) > MAX_NAME_CHARACTERS:
        raise ValueError(
            f"the array name {shown(name)} is not allowed: names are words joined by '/', "
            f"without '..', backslashes and control characters, of at most {MAX_NAME_CHARACTERS} characters."
        )


def check_fits(arrays: Iterable[StoredArray], memory_bytes: int | None) -> None:
    """Raises ValueError if the arrays together exceed the memory.

    Args:
      arrays: what the file announces.
      memory_bytes: what there is; None for the physical memory of this machine.
    """
    memory_bytes = _physical_bytes() if memory_bytes is None else memory_bytes
    total_bytes = sum(array.num_bytes for array in arrays)
    if memory_bytes is not None and total_bytes > memory_bytes:
        raise ValueError(
            f"its arrays take {total_bytes / 1e9:,.1f} GB and there are {memory_bytes / 1e9:,.1f} GB of memory. "
            f"Use a machine with more memory, if the file is what you expect."
        )


def _physical_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):  # not every system tells
        return None
