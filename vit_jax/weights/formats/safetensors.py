"""`.safetensors` files, read and written by the library of that name, which checks its headers before it allocates.

The format has no checksums, so files with our metadata carry SHA-256 digests, which are compared
when they are read.
"""

import contextlib
import hashlib
import json
import os
import pathlib
import struct
from collections.abc import Mapping

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save

from vit_jax.storage.files import open_atomically
from vit_jax.weights.formats import metadata as metadata_texts
from vit_jax.weights.formats import stored
from vit_jax.weights.formats.stored import (
    ALLOWED,
    DAMAGED,
    DTYPES,
    ArrayFile,
    StoredArray,
    naming,
    shown,
)

_LENGTH = struct.Struct("<Q")  # of the header, which follows
_METADATA = "__metadata__"
_OURS = "vit_jax"
_DIGESTS = "vit_jax_sha256"
# Other libraries look for the framework whose layout the arrays have; transformers once read no
# other than this.
_FORMAT = {"format": "pt"}
_KINDS = {"f": "F", "i": "I", "u": "U", "V": "BF", "b": "BOOL"}
_DTYPES = {
    _KINDS[dtype.kind] + (str(8 * dtype.itemsize) if dtype != np.bool_ else ""): dtype
    for dtype in DTYPES
}


def read_headers(path: pathlib.Path, resources: contextlib.ExitStack) -> ArrayFile:
    """Open a file and check its header; `resources` close it."""
    # Not mapped into memory: a mapped file that another process shortens ends this one.
    file = resources.enter_context(safe_open(path, framework="np", backend="pread"))
    arrays = {}
    stored.check_number(len(file.keys()))
    for name in file.keys():  # noqa: SIM118 (it is no dictionary)
        stored.check_name(name)
        announced = file.get_slice(name)
        if (code := announced.get_dtype()) not in _DTYPES:
            raise ValueError(
                f"array {shown(name)}: it is of type {code!r}, which is not read. {ALLOWED}"
            )
        arrays[name] = StoredArray(tuple(announced.get_shape()), _DTYPES[code])
    texts = file.metadata() or {}
    metadata = metadata_texts.decode(texts[_OURS]) if _OURS in texts else {}
    if _DIGESTS not in texts:  # another's file, or an older one
        return ArrayFile(path, arrays, metadata, file.get_tensor)
    digests = metadata_texts.decode(texts[_DIGESTS])
    if digests.get(_METADATA) != hashlib.sha256(texts.get(_OURS, "").encode()).hexdigest():
        raise ValueError(f"its metadata was changed. {DAMAGED}")

    def read(name: str) -> np.ndarray:
        array = file.get_tensor(name)
        if digests.get(name) != _digest(array):
            raise ValueError(f"its bytes, type or shape were changed. {DAMAGED}")
        return array

    return ArrayFile(path, arrays, metadata, read)


def write_safetensors(
    path: str | os.PathLike[str],
    arrays: Mapping[str, np.ndarray],
    metadata: Mapping[str, object] | None = None,
) -> None:
    """Write arrays, completely or not at all; equal input gives equal bytes.

    The metadata is one text in the file's own metadata, under "vit_jax", beside "format": "pt" and
    the digests.

    Raises:
      ValueError: a name, a dtype or metadata that such a file cannot hold, or the system cannot
        write it.
    """
    with naming(str(path)):
        if _METADATA in arrays:
            raise ValueError(
                f"{_METADATA!r} cannot be the name of an array: it holds the metadata."
            )
        texts = dict(_FORMAT)
        ordered = stored.to_stored(arrays)
        if metadata:
            texts[_OURS] = metadata_texts.encode(metadata)
            digests = {name: _digest(array) for name, array in ordered.items()}
            digests[_METADATA] = hashlib.sha256(texts[_OURS].encode()).hexdigest()
            texts[_DIGESTS] = metadata_texts.encode(digests)
        content = save(ordered, metadata=texts)
    (length,) = _LENGTH.unpack_from(content)
    with open_atomically(path) as file:
        file.write(content[: _LENGTH.size])
        file.write(_ordered(content[_LENGTH.size : _LENGTH.size + length]))
        file.write(memoryview(content)[_LENGTH.size + length :])


def _digest(array: np.ndarray) -> str:
    """SHA-256 of type, shape and bytes, of an array in C order."""
    digest = hashlib.sha256(f"{array.dtype.name} {array.shape} ".encode())
    digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def _ordered(header: bytes) -> bytes:
    """Return the header with texts sorted by name: the library's order differs between runs."""
    fields = json.loads(header)
    fields[_METADATA] = dict(sorted(fields[_METADATA].items()))
    text = json.dumps(fields, ensure_ascii=False, separators=(",", ":")).encode().ljust(len(header))
    assert len(text) == len(header), "the same fields in another order take as many bytes"
    return text
