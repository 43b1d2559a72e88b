"""Files of named arrays, `.npz` and `.safetensors`: read without trusting them, written completely or not at all.

Several .safetensors with an index are read as one file. A file is arrays by name and a dictionary
of metadata; `weights.names` knows their meaning.
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
# The first bytes of a file; .safetensors begins with the length of a header and its JSON.
_READERS: dict[bytes, Reader] = {
    rb".{5}\0\0\0\{": safetensors.read_headers,
    rb"PK(\x03\x04(?!.*/data\.pkl)|\x05\x06)": npz.read_headers,
}
_OTHERS = {  # the first bytes of other files, in this order: the kind of the file
    rb"\Z": "empty. Fetch it again",
    rb"\s*<(!doctype|html|\?xml|head)": "a web page, as a failed download leaves it. Fetch the file again",
    rb"version https://git-lfs": "a git-lfs pointer instead of the file it points to. Run git lfs pull",
    rb"PK\x03\x04": "a PyTorch file",
    rb"\x80[\x02-\x05]": "a Python pickle, perhaps of PyTorch",
    rb"\x89HDF": "an HDF5 file, as Keras writes it. Save its arrays with numpy.savez",
    rb"\x93NUMPY": "one array (.npy) without a name. Save arrays by name with numpy.savez",
    rb"[\x81-\x8f][\xa0-\xbf]|[\xde\xdf]": "msgpack, as Flax writes it. Save its arrays with numpy.savez",
    rb"\x1f\x8b|BZh|\xfd7zXZ|\x28\xb5\x2f\xfd": "compressed. Unpack it first",
    rb".{257}ustar": "a tar archive. Unpack it first",
    rb"\s*\{": f"JSON text. Give a file that holds the weights, or an index of them (*{sharded.SUFFIX})",
}
_PICKLES = {"a PyTorch file", "a Python pickle, perhaps of PyTorch"}
_TENSORFLOW = "a TensorFlow checkpoint. Convert it to .npz with TensorFlow (tf.train.load_checkpoint, numpy.savez)"


@contextlib.contextmanager
def open_arrays(
    path: str | os.PathLike[str], *, allowed: tuple[str, ...] = ()
) -> Iterator[ArrayFile]:
    """Open a file of weights, of whichever format its content is, and read its headers; close it at the end.

    `allowed` are packages whose code the metadata may name, from `references.allowed_code`.

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
    return _find_reader(path)(path, resources)


def _find_reader(path: pathlib.Path) -> Reader:
    """Return the reader of a file; ValueError with the kind of the file if there is none."""
    if path.is_dir():
        kind = (
            _TENSORFLOW
            if any((path / name).is_file() for name in ("saved_model.pb", "checkpoint"))
            else "a folder"
        )
    elif not path.exists():
        if not path.with_name(f"{path.name}.index").exists():
            raise ValueError("there is no such file or folder.")
        kind = _TENSORFLOW
    elif not path.is_file():
        kind = "a device or a pipe"
    else:
        with open_regular(path) as file:
            head = file.read(_HEAD_BYTES)
        if reader := _first_match(_READERS, head):
            return reader
        kind = _first_match(_OTHERS, head) or f"of no known format: it starts with {head[:16]!r}"
        if head and re.search(r"\.ckpt.*\.(index|meta|data-\d+-of-\d+)$", path.name):
            kind = _TENSORFLOW
        if kind in _PICKLES:
            suffix = (
                f"{path.suffix}.safetensors" if path.suffix == ".safetensors" else ".safetensors"
            )
            output = str(path.with_suffix(suffix))
            raise ValueError(f"this is {kind}, {pickled.advise(output, [str(path)])}")
    raise ValueError(f"this is {kind}. Files of plain arrays are read: .npz and .safetensors.")


def _first_match(table: Mapping[bytes, T], head: bytes) -> T | None:
    return next(
        (
            value
            for start, value in table.items()
            if re.match(start, head, re.DOTALL | re.IGNORECASE)
        ),
        None,
    )
