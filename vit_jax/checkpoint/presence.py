"""Check that written arrays can be found again, before their checkpoint counts as saved."""

import os
import pathlib
from typing import Any

import orbax.checkpoint as ocp

from vit_jax.checkpoint.workarounds import list_keys
from vit_jax.storage.files import MAX_JSON_BYTES, expand_path, read_bounded, read_json

MANIFEST = "manifest.ocdbt"  # a reader begins here and finds all arrays of an item
MANIFEST_START = bytes.fromhex("0cdb3a2a")
_TREE = "_METADATA"
_ARRAY_DESCRIPTIONS = (".zarray", "zarr.json")
_REWRITTEN = "\\[]*?"
"""Characters of a path that tensorstore, or the merge of the files of processes, rewrites."""


class MissingArrays(RuntimeError):
    """Arrays of a checkpoint that is being written cannot be found again."""


def build_checked_handler(
    arrays: ocp.type_handlers.TypeHandlerRegistry,
) -> ocp.PyTreeCheckpointHandler:
    """Return a handler of items that fails if an array is missing, before orbax commits.

    orbax calls `finalize` in the first process, when all processes have written their arrays. A
    subclass would need a registration of its classes of arguments.
    """
    handler = ocp.PyTreeCheckpointHandler(type_handler_registry=arrays)
    merge_files = handler.finalize

    def finalize(directory: Any) -> None:
        merge_files(directory)
        require_arrays(directory)

    handler.finalize = finalize  # type: ignore[method-assign]
    return handler


def require_arrays(item: str | os.PathLike[str]) -> None:
    """Raise MissingArrays unless the manifest of an item lists every array that it describes.

    It reads the manifest and the index of arrays, and no array.

    Args:
      item: the folder of an item, on this machine or in a bucket.
    """
    folder = expand_path(item)
    described = set()
    for entry in read_json(folder / _TREE)["tree_metadata"].values():
        keys = [str(key["key"]) for key in entry["key_metadata"]]
        described.add(".".join(keys))
    if not described:
        return
    _require_manifest(folder / MANIFEST)

    stored = set()
    for key in list_keys(folder):
        name, _, last = key.rpartition("/")
        if last in _ARRAY_DESCRIPTIONS:
            stored.add(name)
    missing = sorted(described - stored)
    if missing:
        count = f"{len(missing)} of {len(described)}"
        raise MissingArrays(f"{folder}: {count} arrays are missing, such as {missing[0]}")


def _require_manifest(file: pathlib.Path) -> None:
    if not file.exists():
        raise MissingArrays(f"{file} is missing, without which no array can be found")
    content = read_bounded(file, MAX_JSON_BYTES)
    stated_length = int.from_bytes(content[4:12], "little")
    if content[:4] != MANIFEST_START or stated_length != len(content):
        raise MissingArrays(f"{file} is not complete")


def require_exact_path(folder: pathlib.Path) -> None:
    """Raise ValueError for a path under which checkpoints would not be found again.

    The array writer takes a backslash for a slash and brackets, asterisks and question marks for
    patterns, also in the name of a parent folder. It cannot write below names that are not UTF-8.
    """
    path = str(folder)
    rewritten = list(filter(path.__contains__, _REWRITTEN))
    if rewritten:
        raise ValueError(
            f"workdir={path!r}: {' '.join(rewritten)} must not be in the path of checkpoints, "
            "also not in the name of a parent folder: the array writer would write elsewhere. "
            "Choose another folder."
        )
    try:
        path.encode()
    except UnicodeEncodeError:
        raise ValueError(
            f"workdir={path!r}: the path of checkpoints must be UTF-8, "
            "also the names of its parent folders. Choose another folder."
        ) from None
