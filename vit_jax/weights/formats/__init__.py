"""Files of named arrays, `.npz` and `.safetensors`: read without trusting them, written completely or not at all.

A file is arrays by name and a dictionary of metadata; `weights.names` knows what the names mean.
"""

import contextlib
import os
import pathlib
import re
from collections.abc import Iterator

from vit_jax.files import open_regular
from vit_jax.references import mark_stored
from vit_jax.weights.formats import npz, safetensors
from vit_jax.weights.formats.arrays import ArrayFile, StoredArray, check_fits, naming
from vit_jax.weights.formats.npz import write_npz
from vit_jax.weights.formats.safetensors import write_safetensors

__all__ = ["ArrayFile", "StoredArray", "naming", "open_arrays", "write_npz", "write_safetensors"]

_HEAD_BYTES = 512
_SAFETENSORS = re.compile(rb".{5}\0\0\0\{", re.DOTALL)  # a header length that is not astronomical, and JSON
_ZIP = re.compile(rb"PK(\x03\x04|\x05\x06)")
_READ = "Files of plain arrays are read: .npz and .safetensors."
_UNPICKLE = (
    "which runs code when it is opened and is therefore not read. If you trust it, load it with its own library "
    "and save it as .safetensors"
)
_OF_TORCH = (
    ': python -c "import torch, safetensors.torch as s; s.save_file({k: v.contiguous().clone() for k, v in '
    "torch.load('FILE', 'cpu', weights_only=True).items()}, 'model.safetensors')\" (if the weights are an entry of the "
    "file, such as ['model'] or ['state_dict'], add it behind the parenthesis of torch.load)"
)
# What a file starts with, in order, and what it then is.
_OTHERS = {
    rb"\s*<(!doctype|html|\?xml|head)": "a web page, as a failed download leaves it. Fetch the file again",
    rb"version https://git-lfs": "a git-lfs pointer instead of the file it points to. Run git lfs pull",
    rb"PK\x03\x04.*/data\.pkl": f"a PyTorch file, {_UNPICKLE}{_OF_TORCH}",
    rb"\x80[\x02-\x05]": f"a Python pickle, perhaps of PyTorch, {_UNPICKLE}{_OF_TORCH}",
    rb"\x89HDF": "an HDF5 file, as Keras writes it. Save its arrays with numpy.savez",
    rb"\x93NUMPY": "one array (.npy) without a name. Save arrays by name with numpy.savez",
    rb"[\x81-\x8f][\xa0-\xbf]|[\xde\xdf]": "msgpack, as Flax writes it. Save its arrays with numpy.savez",
    rb"\x1f\x8b|BZh|\xfd7zXZ|\x28\xb5\x2f\xfd": "compressed. Unpack it first",
    rb".{257}ustar": "a tar archive. Unpack it first",
    rb"\s*\{": "JSON text, perhaps the index of weights in several files. Give a file that holds the weights",
}
_TENSORFLOW = "a TensorFlow checkpoint. Convert it to .npz with TensorFlow (tf.train.load_checkpoint, numpy.savez)"


@contextlib.contextmanager
def open_arrays(
    path: str | os.PathLike[str], *, memory_bytes: int | None = None, allowed: tuple[str, ...] = ()
) -> Iterator[ArrayFile]:
    """Opens a file of weights, of whichever format its content is, and reads its headers; closes it at the end.

    Args:
      path: the file; its suffix does not matter.
      memory_bytes: the arrays must not need more; None for the physical memory of this machine.
      allowed: packages whose code the metadata may name, from `references.allowed_code`.

    Raises:
      ValueError: it is no such file (the message names what it is), or it is damaged, or too large.
    """
    path = pathlib.Path(path)
    with contextlib.ExitStack() as resources:
        with naming(str(path)):
            _require_file(path)
            with open_regular(path) as file:
                head = file.read(_HEAD_BYTES)
            is_safetensors = _SAFETENSORS.match(head)
            if not is_safetensors and (words := _describe_other(path, head)):
                raise ValueError(f"this is {words}. {_READ}")
            opened = (safetensors if is_safetensors else npz).read_headers(path, resources)
            check_fits(opened.arrays.values(), memory_bytes)
            mark_stored(opened.metadata, str(path), allowed)
        yield opened


def _require_file(path: pathlib.Path) -> None:
    if path.is_dir():
        kind = _TENSORFLOW if (path / "saved_model.pb").exists() or (path / "checkpoint").is_file() else "a folder"
        raise ValueError(f"this is {kind}. {_READ}")
    if path.with_name(f"{path.name}.index").exists() and not path.exists():
        raise ValueError(f"this is {_TENSORFLOW}. {_READ}")
    if not path.exists():
        raise ValueError("there is no such file or folder.")
    if not path.is_file():
        raise ValueError(f"this is a device or a pipe. {_READ}")


def _describe_other(path: pathlib.Path, head: bytes) -> str:
    """What a file is that is not read; empty for an archive, which may be."""
    if not head:
        return "empty. Fetch it again"
    if re.search(r"\.ckpt.*\.(index|meta|data-\d+-of-\d+)$", path.name):
        return _TENSORFLOW
    flags = re.DOTALL | re.IGNORECASE
    words = next((words for pattern, words in _OTHERS.items() if re.match(pattern, head, flags)), "")
    return words or ("" if _ZIP.match(head) else f"of no known format: it starts with {head[:16]!r}")
