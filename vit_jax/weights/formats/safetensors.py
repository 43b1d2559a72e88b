"""`.safetensors` files, read and written by the library of that name.

The library checks headers before it allocates memory. The format has no checksums, so files with
our metadata carry SHA-256 digests, which are compared when they are read.
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

from vit_jax.imports.requirements import explain_version
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
    quote,
)

_LENGTH = struct.Struct("<Q")  # bytes of the header, which follows
_METADATA = "__metadata__"
_OURS = "vit_jax"
_DIGESTS = "vit_jax_sha256"

# Other libraries look for the framework whose layout the arrays have; transformers once read no
# other than this.
_FORMAT = {"format": "pt"}
_KINDS = {"f": "F", "i": "I", "u": "U", "V": "BF"}


def _name_dtype(dtype: np.dtype) -> str:
    """Return the name of a dtype in the format, such as F32 or BOOL."""
    if dtype == np.bool_:
        return "BOOL"
    bits = 8 * dtype.itemsize
    return f"{_KINDS[dtype.kind]}{bits}"


_DTYPES = {_name_dtype(dtype): dtype for dtype in DTYPES}


def read_headers(path: pathlib.Path, resources: contextlib.ExitStack) -> ArrayFile:
    """Open a file and check its header; `resources` close it."""
    file = resources.enter_context(_open(path))
    names = file.keys()
    stored.check_number(len(names))

    arrays = {}
    for name in names:
        stored.check_name(name)
        announced = file.get_slice(name)
        code = announced.get_dtype()
        if code not in _DTYPES:
            raise ValueError(
                f"array {quote(name)}: it is of type {code!r}, which is not read. {ALLOWED}"
            )
        arrays[name] = StoredArray(tuple(announced.get_shape()), _DTYPES[code])

    texts = file.metadata() or {}
    metadata: dict[str, object] = {}
    if _OURS in texts:
        metadata = metadata_texts.decode(texts[_OURS])
    if _DIGESTS not in texts:  # a file of another program, or an older one
        return ArrayFile(path, arrays, metadata, file.get_tensor)

    digests = metadata_texts.decode(texts[_DIGESTS])
    if digests.get(_METADATA) != _digest_text(texts.get(_OURS, "")):
        raise ValueError(f"its metadata was changed. {DAMAGED}")

    def read(name: str) -> np.ndarray:
        array = file.get_tensor(name)
        if digests.get(name) != _digest(array):
            raise ValueError(f"its bytes, type or shape were changed. {DAMAGED}")
        return array

    return ArrayFile(path, arrays, metadata, read)


def _open(path: pathlib.Path) -> safe_open:
    """Return the file, not mapped into memory: one that another process shortens would end this one.

    Raises:
      ValueError: the installed library is too old to read without mapping.
    """
    try:
        return safe_open(path, framework="np", backend="pread")
    except TypeError:
        raise ValueError(f"it cannot be read: {explain_version('safetensors')}") from None


def write_safetensors(
    path: str | os.PathLike[str],
    arrays: Mapping[str, np.ndarray],
    metadata: Mapping[str, object] | None = None,
) -> None:
    """Write arrays, completely or not at all; equal input gives equal bytes.

    The metadata is one text in the file's metadata, under "vit_jax", beside "format": "pt" and the
    digests.

    Raises:
      ValueError: a name, a dtype or metadata that such a file cannot hold, or the system cannot
        write it.
    """
    with naming(str(path)):
        if _METADATA in arrays:
            raise ValueError(
                f"{_METADATA!r} cannot be the name of an array: it holds the metadata."
            )
        ordered = stored.prepare_arrays(arrays)
        texts = dict(_FORMAT)
        if metadata:
            text = metadata_texts.encode(metadata)
            digests = {name: _digest(array) for name, array in ordered.items()}
            digests[_METADATA] = _digest_text(text)
            texts[_OURS] = text
            texts[_DIGESTS] = metadata_texts.encode(digests)
        content = memoryview(save(ordered, metadata=texts))

    (header_bytes,) = _LENGTH.unpack_from(content)
    header_end = _LENGTH.size + header_bytes
    header = bytes(content[_LENGTH.size : header_end])
    with open_atomically(path) as file:
        file.write(content[: _LENGTH.size])
        file.write(_sort_texts(header))
        file.write(content[header_end:])


def _digest_text(text: str) -> str:
    """Return the SHA-256 of a text in UTF-8."""
    return hashlib.sha256(text.encode()).hexdigest()


def _digest(array: np.ndarray) -> str:
    """Return the SHA-256 of type, shape and bytes of an array, in C order."""
    plain = np.ascontiguousarray(array).reshape(-1)
    digest = hashlib.sha256(f"{array.dtype.name} {array.shape} ".encode())
    digest.update(plain.view(np.uint8).data)
    return digest.hexdigest()


def _sort_texts(header: bytes) -> bytes:
    """Return the header with texts sorted by name: the library's order differs between runs."""
    fields = json.loads(header)
    fields[_METADATA] = dict(sorted(fields[_METADATA].items()))
    text = json.dumps(fields, ensure_ascii=False, separators=(",", ":"))
    padded = text.encode().ljust(len(header))
    assert len(padded) == len(header), "the same fields in another order take as many bytes"
    return padded
