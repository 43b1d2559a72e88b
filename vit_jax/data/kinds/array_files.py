"""Arrays in NPZ and IDX files: their headers, checked against the files, and their values.

Values that a file holds uncompressed are mapped into memory: they are read when they are used, and
worker processes share them. Compressed values are decompressed as a whole.
"""

import contextlib
import functools
import gzip
import io
import math
import os
import struct
import warnings
import zipfile
import zlib
from collections.abc import Iterator
from typing import IO, BinaryIO, Literal, NamedTuple, cast

import numpy as np

from vit_jax.data.records import read_file_state
from vit_jax.storage.files import is_mirrored, measure_size, open_regular
from vit_jax.storage.gcs_client import NoAnswer
from vit_jax.text.printable import first_line, printable

MAX_MEMORY_BYTES = 2**32
"""Limit of the decompressed values of an array, which are held in memory."""
_MAX_HEADER_BYTES = 10_000  # the limit of NumPy
_MAX_MEMBERS = 10_000
_NPY = ".npy"
_GZIP = b"\x1f\x8b"
_LOCAL_HEADER_BYTES = 30
_LENGTHS_OF_LOCAL_HEADER = struct.Struct("<2H")
_IDX_TYPES = {
    0x08: ">u1",
    0x09: ">i1",
    0x0B: ">i2",
    0x0C: ">i4",
    0x0D: ">f4",
    0x0E: ">f8",
}
_MAX_IDX_DIMENSIONS = 8
_HEADERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}
_DAMAGE = (
    EOFError,
    MemoryError,
    NotImplementedError,
    OSError,
    OverflowError,
    RuntimeError,
    SyntaxError,
    TypeError,
    ValueError,
    struct.error,
    zipfile.BadZipFile,
    zlib.error,
)
"""Errors of the system and of the libraries on damaged files."""


class StoredArray(NamedTuple):
    """An array in a file.

    Attributes:
      path: the file.
      state: size and times of the file when its header was read.
      member: name of the array in an NPZ file, "" in an IDX file.
      shape: sizes of its dimensions.
      dtype: type of its values.
      order: "C" or "F", by the dimension whose values are neighbours.
      header_bytes: size of the header before the values, in the member or the file.
      offset: place of the first value in the file; None: the values are compressed.
    """

    path: str
    state: tuple[int, ...]
    member: str
    shape: tuple[int, ...]
    dtype: np.dtype
    order: Literal["C", "F"]
    header_bytes: int
    offset: int | None

    @property
    def num_bytes(self) -> int:
        """Size of the values."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def place(self) -> str:
        """Name of the array in messages."""
        if self.member:
            return f"{self.path}:{self.member}"
        return self.path

    def read(self) -> np.ndarray:
        """Return the values, mapped if the file holds them uncompressed on this machine.

        Raises:
          ValueError: the file has changed, is damaged, or is too large to be decompressed.
        """
        with explain_damage(self.place):
            if self.state != read_file_state(self.path):
                raise ValueError("it has changed since it was opened")
            if self.offset is not None and not is_mirrored(self.path):
                return np.memmap(
                    self.path,
                    self.dtype,
                    "r",
                    offset=self.offset,
                    shape=self.shape,
                    order=self.order,
                )
            return _decompress(self)


@contextlib.contextmanager
def explain_damage(place: str) -> Iterator[None]:
    """Raise ValueError, which begins with the place, for errors of the system and of libraries."""
    try:
        yield
    except NoAnswer:
        raise
    except _DAMAGE as error:
        reason = printable(first_line(error)).rstrip(".") or type(error).__name__
        raise ValueError(
            f"{printable(place)}: cannot be read ({reason}). Copy the file again, or write it anew."
        ) from error


@functools.lru_cache(4)  # training and test split of the data of a run, and of other data
def _decompress(stored: StoredArray) -> np.ndarray:
    """Return the values of a compressed array, which cannot be changed."""
    if stored.num_bytes > MAX_MEMORY_BYTES:
        raise ValueError(
            f"it takes {stored.num_bytes / 2**30:.1f} GiB of memory, because it is compressed; "
            "store it uncompressed, by numpy.savez or gunzip, to read it from the disk"
        )
    with open_stream(stored.path, stored.member) as stream:
        stream.read(stored.header_bytes)
        content = stream.read(stored.num_bytes)
        has_more = stream.read(1) != b""  # reading the end compares the checksum
    if len(content) < stored.num_bytes or has_more:
        raise ValueError(f"it does not hold the {stored.num_bytes:,} bytes that its header states")
    values = np.frombuffer(content, stored.dtype)
    return values.reshape(stored.shape, order=stored.order)


@contextlib.contextmanager
def open_stream(path: str, member: str = "") -> Iterator[BinaryIO]:
    """Yield the decompressed content of an IDX file, or of a member of an NPZ file."""
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(open_regular(path))
        stream: BinaryIO = file
        if member:
            archive = stack.enter_context(zipfile.ZipFile(file))
            stream = cast(BinaryIO, stack.enter_context(archive.open(f"{member}{_NPY}")))
        elif _is_gzip(file):
            unpacked = stack.enter_context(gzip.GzipFile(fileobj=file))
            stream = cast(BinaryIO, unpacked)
        yield stream


def _is_gzip(file: io.BufferedReader) -> bool:
    """Return True for a file that begins as gzip writes it; its position is unchanged."""
    return file.peek(len(_GZIP)).startswith(_GZIP)


def read_idx_header(path: str) -> StoredArray:
    """Return the array of an IDX file, which may be compressed by gzip.

    Raises:
      ValueError: it is no IDX file, or its size is not the one that its header states.
    """
    with explain_damage(path):
        state = read_file_state(path)
        with open_stream(path) as stream:
            is_compressed = isinstance(stream, gzip.GzipFile)
            zeros, code, num_dimensions = struct.unpack(">HBB", stream.read(4))
            if zeros or code not in _IDX_TYPES or not 0 < num_dimensions <= _MAX_IDX_DIMENSIONS:
                raise ValueError("it does not begin as an IDX file")
            sizes = stream.read(4 * num_dimensions)
            shape = struct.unpack(f">{num_dimensions}I", sizes)

        header_bytes = 4 + 4 * num_dimensions
        stored = StoredArray(
            path,
            state,
            member="",
            shape=shape,
            dtype=np.dtype(_IDX_TYPES[code]),
            order="C",
            header_bytes=header_bytes,
            offset=None if is_compressed else header_bytes,
        )
        if not is_compressed:
            _require_size(stored, state[0] - header_bytes)
        return stored


def read_npz_headers(path: str) -> dict[str, StoredArray]:
    """Return the arrays of an NPZ file by name.

    Raises:
      ValueError: it is no NPZ file, holds Python objects, or an array has another size than its
        header states.
    """
    with explain_damage(path):
        state = read_file_state(path)
        arrays = {}
        with open_regular(path) as file, zipfile.ZipFile(file) as archive:
            members = archive.infolist()
            if len(members) > _MAX_MEMBERS:
                raise ValueError(f"it has {len(members):,} members")
            for member in members:
                if not member.filename.endswith(_NPY):
                    continue
                stored = _read_npy_header(path, state, archive, member)
                if member.compress_type == zipfile.ZIP_STORED:
                    start = _find_start(file, member)
                    stored = stored._replace(offset=start + stored.header_bytes)
                    _require_inside(stored, measure_size(file))
                arrays[stored.member] = stored
        return arrays


def _read_npy_header(
    path: str,
    state: tuple[int, ...],
    archive: zipfile.ZipFile,
    member: zipfile.ZipInfo,
) -> StoredArray:
    """Return an array by the header of its member, without the place of its values."""
    name = member.filename.removesuffix(_NPY)
    with archive.open(member) as stream, warnings.catch_warnings(action="ignore"):
        version = np.lib.format.read_magic(stream)
        if version not in _HEADERS:
            raise ValueError(f"{name} is of version {version} of the .npy format")
        shape, is_fortran, dtype = _HEADERS[version](stream, max_header_size=_MAX_HEADER_BYTES)
        header_bytes = stream.tell()
    if dtype.hasobject:
        raise ValueError(f"{name} holds Python objects, which are not read")
    stored = StoredArray(
        path,
        state,
        member=name,
        shape=tuple(map(int, shape)),
        dtype=dtype,
        order="F" if is_fortran else "C",
        header_bytes=header_bytes,
        offset=None,
    )
    _require_size(stored, member.file_size - header_bytes)
    return stored


def _find_start(file: IO[bytes], member: zipfile.ZipInfo) -> int:
    """Return the place of the content of a member, by the lengths in its local header."""
    size = _LENGTHS_OF_LOCAL_HEADER.size
    file.seek(member.header_offset + _LOCAL_HEADER_BYTES - size)
    lengths = _LENGTHS_OF_LOCAL_HEADER.unpack(file.read(size))
    return member.header_offset + _LOCAL_HEADER_BYTES + sum(lengths)


def _require_size(stored: StoredArray, num_bytes: int) -> None:
    """Raise ValueError unless the values have the size that the header states."""
    if min(stored.shape, default=1) < 0 or stored.num_bytes != num_bytes:
        raise ValueError(
            f"{os.path.basename(stored.place)}: the shape {stored.shape} of {stored.dtype} takes "
            f"{stored.num_bytes:,} bytes, and it has {num_bytes:,}"
        )


def _require_inside(stored: StoredArray, file_bytes: int) -> None:
    """Raise ValueError unless a file of this size contains the values."""
    assert stored.offset is not None, "the values are not compressed"
    if stored.offset + stored.num_bytes > file_bytes:
        raise ValueError(f"{stored.member} ends behind the end of the file")
