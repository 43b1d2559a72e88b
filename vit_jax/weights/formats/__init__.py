"""Files of named arrays, `.npz` and `.safetensors`, read without trusting them.

Files are written completely or not at all. Several .safetensors with an index are read as one file.
A file is arrays by name and a dictionary of metadata; `weights.names` knows their meaning.
"""

import contextlib
import os
import pathlib
import re
from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

from vit_jax.imports.references import mark_stored
from vit_jax.storage.files import open_regular
from vit_jax.weights.formats import npz, pickled, safetensors, sharded
from vit_jax.weights.formats.npz import write_npz
from vit_jax.weights.formats.safetensors import write_safetensors
from vit_jax.weights.formats.stored import ArrayFile, StoredArray, check_fits, naming

__all__ = ["ArrayFile", "StoredArray", "naming", "open_arrays", "write_npz", "write_safetensors"]

T = TypeVar("T")
Reader = Callable[[pathlib.Path, contextlib.ExitStack], ArrayFile]

_HEAD_BYTES = 512

# The first bytes of a file → its reader. A .safetensors begins with the length of a header and its
# JSON.
_READERS: dict[bytes, Reader] = {
    rb".{5}\0\0\0\{": safetensors.read_headers,
    rb"PK(\x03\x04(?!.*/data\.pkl)|\x05\x06)": npz.read_headers,
}

# The first bytes of other files → the kind of the file, with a remedy. The first match counts.
_OTHERS = {
    rb"\Z": "empty. Fetch it again",
    rb"\s*<(!doctype|html|\?xml|head)": (
        "a web page, as a failed download leaves it. Fetch the file again"
    ),
    rb"version https://git-lfs": (
        "a git-lfs pointer instead of the file it points to. Run git lfs pull"
    ),
    rb"PK\x03\x04": "a PyTorch file",
    rb"\x80[\x02-\x05]": "a Python pickle, perhaps of PyTorch",
    rb"\x89HDF": "an HDF5 file, as Keras writes it. Save its arrays with numpy.savez",
    rb"\x93NUMPY": "one array (.npy) without a name. Save arrays by name with numpy.savez",
    rb"[\x81-\x8f][\xa0-\xbf]|[\xde\xdf]": (
        "msgpack, as Flax writes it. Save its arrays with numpy.savez"
    ),
    rb"\x1f\x8b|BZh|\xfd7zXZ|\x28\xb5\x2f\xfd": "compressed. Unpack it first",
    rb".{257}ustar": "a tar archive. Unpack it first",
    rb"\s*\{": (
        f"JSON text. Give a file that holds the weights, or an index of them (*{sharded.SUFFIX})"
    ),
}
_PICKLES = ("a PyTorch file", "a Python pickle, perhaps of PyTorch")
_TENSORFLOW = (
    "a TensorFlow checkpoint. Convert it to .npz with TensorFlow "
    "(tf.train.load_checkpoint, numpy.savez)"
)
_TENSORFLOW_FILE = re.compile(r"\.ckpt.*\.(index|meta|data-\d+-of-\d+)$")


@contextlib.contextmanager
def open_arrays(
    path: str | os.PathLike[str],
    *,
    allowed: tuple[str, ...] = (),
) -> Iterator[ArrayFile]:
    """Open a file of weights, whose format its content shows, and read its headers.

    The file is closed at the end. `allowed` are packages whose code the metadata may name, from
    `references.parse_allowed_code`.

    Raises:
      ValueError: the file is of another kind (the message names it), damaged, or larger than the
        physical memory.
    """
    path = pathlib.Path(path)
    with contextlib.ExitStack() as resources:
        with naming(str(path)):
            opened = _open(path, resources)
            check_fits(opened.arrays.values())
            mark_stored(opened.metadata, str(path), allowed)
        yield opened


def _open(path: pathlib.Path, resources: contextlib.ExitStack) -> ArrayFile:
    """Open one file, or all shards of an index."""
    if sharded.is_index(path.name) and path.is_file():
        return sharded.read_headers(path, resources, _open_one)
    return _open_one(path, resources)


def _open_one(path: pathlib.Path, resources: contextlib.ExitStack) -> ArrayFile:
    _require_file(path)
    with open_regular(path) as file:
        head = file.read(_HEAD_BYTES)
    read_headers = _find_match(_READERS, head)
    if read_headers is None:
        raise _build_error(path, head)
    return read_headers(path, resources)


def _require_file(path: pathlib.Path) -> None:
    """Raise ValueError, with the kind of the path, unless it is a regular file."""
    if path.is_file():
        return
    if path.is_dir():
        has_tensorflow = (path / "saved_model.pb").is_file() or (path / "checkpoint").is_file()
        raise _build_kind_error(_TENSORFLOW if has_tensorflow else "a folder")
    if path.exists():
        raise _build_kind_error("a device or a pipe")
    if path.with_name(f"{path.name}.index").exists():
        raise _build_kind_error(_TENSORFLOW)
    raise ValueError("there is no such file or folder.")


def _build_error(path: pathlib.Path, head: bytes) -> ValueError:
    """Return the error about a file that is not read, by its first bytes."""
    if head and _TENSORFLOW_FILE.search(path.name):
        return _build_kind_error(_TENSORFLOW)

    kind = _find_match(_OTHERS, head)
    if kind is None:
        return _build_kind_error(f"of no known format: it starts with {head[:16]!r}")
    if kind not in _PICKLES:
        return _build_kind_error(kind)

    suffix = ".safetensors"
    if path.suffix == suffix:  # the output has another name than the file
        suffix = f"{suffix}{suffix}"
    output = path.with_suffix(suffix)
    return ValueError(f"this is {kind}, {pickled.advise(str(output), [str(path)])}")


def _build_kind_error(kind: str) -> ValueError:
    return ValueError(f"this is {kind}. Files of plain arrays are read: .npz and .safetensors.")


def _find_match(table: Mapping[bytes, T], head: bytes) -> T | None:
    """Return the value of the first pattern that matches the first bytes of a file."""
    for pattern, value in table.items():
        if re.match(pattern, head, re.DOTALL | re.IGNORECASE):
            return value
    return None
