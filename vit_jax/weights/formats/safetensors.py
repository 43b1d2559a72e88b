"""`.safetensors` files: a JSON header that says where each array lies, and the arrays.

The header is checked to the last byte before anything is read by it; with that done, reading is copying. The
`safetensors` library is not used: its metadata comes out in an order that changes from one file to the next.
"""

import contextlib
import json
import os
import pathlib
import struct
from collections.abc import Mapping
from typing import Any, BinaryIO

import numpy as np

from vit_jax.weights.formats import metadata as metadata_texts
from vit_jax.weights.formats.arrays import ArrayFile, StoredArray, check_fits, check_name
from vit_jax.weights.formats.encoding import DTYPES, describe, read_bytes, to_array, to_bytes
from vit_jax.weights.formats.failures import DAMAGED, naming, shown
from vit_jax.weights.formats.whole import write_whole

MAX_HEADER_BYTES = 16 * 2**20
_LENGTH = struct.Struct("<Q")
_METADATA = "__metadata__"
_OURS = "vit_jax"
# Other libraries look for the framework whose layout the arrays have; transformers once read no other than this.
_FORMAT = {"format": "pt"}
_KEYS = {"dtype", "shape", "data_offsets"}
_KINDS = {"f": "F", "i": "I", "u": "U", "V": "BF", "b": "BOOL"}
_CODES = {dtype: _KINDS[dtype.kind] + (str(8 * dtype.itemsize) if dtype != np.bool_ else "") for dtype in DTYPES}
_DTYPES = {code: dtype for dtype, code in _CODES.items()}


class SafetensorsFile(ArrayFile):
    """An open file."""

    def __init__(
        self,
        path: pathlib.Path,
        arrays: Mapping[str, StoredArray],
        metadata: dict[str, Any],
        file: BinaryIO,
        offsets: Mapping[str, int],
        resources: contextlib.ExitStack,
    ):
        super().__init__(path, arrays, metadata, resources)
        self._file = file
        self._offsets = offsets

    def _read(self, name: str) -> np.ndarray:
        array = self.arrays[name]
        self._file.seek(self._offsets[name])
        return to_array(read_bytes(self._file, array.num_bytes), array)


def open_safetensors(path: pathlib.Path, *, memory_bytes: int | None = None) -> SafetensorsFile:
    """Checks the header of a file.

    Args:
      path: the file.
      memory_bytes: the arrays must not need more; None for the physical memory.

    Raises:
      ValueError: anything about the header is not as it should be.
    """
    with naming(str(path)), contextlib.ExitStack() as resources:
        file = resources.enter_context(open(path, "rb"))
        header, data_offset = _read_header(file)
        texts = _texts(header.pop(_METADATA, {}))
        arrays, offsets = {}, {}
        for name, entry in header.items():
            check_name(name)
            with naming(f"array {shown(name)}"):
                arrays[name], offsets[name] = _parse_entry(entry)
        _check_adjacent(arrays, offsets, os.fstat(file.fileno()).st_size - data_offset)
        check_fits(arrays.values(), memory_bytes)
        metadata = metadata_texts.decode(texts[_OURS]) if _OURS in texts else {}
        offsets = {name: data_offset + offset for name, offset in offsets.items()}
        return SafetensorsFile(path, arrays, metadata, file, offsets, resources.pop_all())


def write_safetensors(
    path: str | os.PathLike[str], arrays: Mapping[str, np.ndarray], metadata: Mapping[str, Any] | None = None
) -> None:
    """Writes arrays, whole or not at all; equal input gives equal bytes.

    Args:
      path: the file, replaced if it exists.
      arrays: by name; read one at a time.
      metadata: JSON values; one text in the file's own metadata, under "vit_jax", beside "format": "pt".

    Raises:
      ValueError: a name, a dtype or metadata that such a file cannot hold, or the system refuses to write.
    """
    with naming(str(path)):
        if _METADATA in arrays:
            raise ValueError(f"{_METADATA!r} cannot be the name of an array: it is where the metadata stands.")
        texts = {**_FORMAT, _OURS: metadata_texts.encode(metadata)} if metadata else _FORMAT
        stored = {name: describe(name, arrays[name]) for name in arrays}
        # The largest numbers first, so that each array starts at a multiple of its item size.
        names = sorted(stored, key=lambda name: (-stored[name].dtype.itemsize, name))
        header = _header_bytes({name: stored[name] for name in names}, texts)
    with write_whole(path) as file:
        file.write(header)
        for name in names:
            file.write(to_bytes(arrays[name]))


def _read_header(file: BinaryIO) -> tuple[dict[str, Any], int]:
    """The header, and the position in the file at which data begins."""
    size = os.fstat(file.fileno()).st_size
    (length,) = _LENGTH.unpack(file.read(_LENGTH.size))
    if length > min(MAX_HEADER_BYTES, size - _LENGTH.size):
        raise ValueError(
            f"its header claims {length:,} bytes; the file has {size:,}, and at most {MAX_HEADER_BYTES:,} are read. "
            f"{DAMAGED}"
        )
    return metadata_texts.strict_json(file.read(length).decode("utf-8")), _LENGTH.size + length


def _texts(texts: Any) -> dict[str, str]:
    if not isinstance(texts, dict) or not all(isinstance(text, str) for text in texts.values()):
        raise ValueError(f"its {_METADATA} is not texts under names. {DAMAGED}")
    for item in texts.items():
        "".join(item).encode()  # JSON can escape what is no character
    return texts


def _parse_entry(entry: Any) -> tuple[StoredArray, int]:
    """An array, and where in the data it starts."""
    if not isinstance(entry, dict) or entry.keys() != _KEYS:
        raise ValueError(f"its header must have {', '.join(sorted(_KEYS))} and nothing else. {DAMAGED}")
    dtype, shape, span = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        raise ValueError(f"it is of type {shown(str(dtype))}, which is not read. Allowed: {', '.join(_DTYPES)}.")
    if not _are_counts(shape) or not _are_counts(span) or len(span) != 2:
        raise ValueError(f"its shape and its two data_offsets must be whole numbers from 0 to 2^63. {DAMAGED}")
    array = StoredArray(tuple(shape), _DTYPES[dtype])
    if span[1] - span[0] != array.num_bytes:
        raise ValueError(
            f"its shape {array.shape} of {array.dtype} takes {array.num_bytes:,} bytes, "
            f"and it has {span[1] - span[0]:,}. {DAMAGED}"
        )
    return array, span[0]


def _are_counts(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 2**63 for value in values)


def _check_adjacent(arrays: Mapping[str, StoredArray], offsets: Mapping[str, int], num_bytes: int) -> None:
    """The arrays fill the data: nothing between them, nothing twice, nothing left."""
    end = 0
    for name in sorted(offsets, key=lambda name: (offsets[name], arrays[name].num_bytes)):
        if offsets[name] != end:
            raise ValueError(
                f"array {shown(name)}: it starts at byte {offsets[name]:,} of the data, "
                f"and what is before it ends at {end:,}. {DAMAGED}"
            )
        end += arrays[name].num_bytes
    if end != num_bytes:
        raise ValueError(f"its arrays take {end:,} bytes and the file has {num_bytes:,} for them. {DAMAGED}")


def _header_bytes(arrays: Mapping[str, StoredArray], texts: Mapping[str, str]) -> bytes:
    header: dict[str, Any] = {_METADATA: dict(texts)}
    end = 0
    for name, array in arrays.items():
        start, end = end, end + array.num_bytes
        header[name] = {"dtype": _CODES[array.dtype], "shape": list(array.shape), "data_offsets": [start, end]}
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _LENGTH.size)
    if len(text) > MAX_HEADER_BYTES:
        raise ValueError(f"the header would take {len(text):,} bytes; at most {MAX_HEADER_BYTES:,} are allowed.")
    return _LENGTH.pack(len(text)) + text
