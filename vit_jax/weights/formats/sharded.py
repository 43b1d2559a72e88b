"""Weights in several `.safetensors` files, the shards, with an index (`model.safetensors.index.json`).

The index maps each array to its shard. Both sides are compared before data is read: every shard is
in the folder of the index and holds exactly the arrays that the index states.
"""

import contextlib
import pathlib
import re
from collections.abc import Callable, Iterable, Mapping

import numpy as np

from vit_jax.storage.files import read_json
from vit_jax.text.printable import printable, shortened
from vit_jax.weights.formats import stored
from vit_jax.weights.formats.pickled import advise, find_pickles
from vit_jax.weights.formats.stored import ArrayFile, StoredArray, naming, shown

SUFFIX = ".index.json"
WEIGHTS = "model.safetensors"
MAX_SHARDS = 500  # all are open at once
_MOST_LISTED = 5
_MOST_CHARACTERS = 160
_SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<total>\d{5})\.safetensors")
Opener = Callable[[pathlib.Path, contextlib.ExitStack], ArrayFile]


def is_index(name: str) -> bool:
    """Return True for the name of an index."""
    return name.endswith(SUFFIX)


def is_shard(name: str) -> bool:
    """Return True for the name of one of several shards."""
    match = _SHARD.fullmatch(name)
    return match is not None and int(match["total"]) > 1


def read_headers(
    path: pathlib.Path, resources: contextlib.ExitStack, open_file: Opener
) -> ArrayFile:
    """Open all shards of an index by `open_file` and check their headers; `resources` close them."""
    weight_map = _read_weight_map(path)
    shards = sorted(set(weight_map.values()))
    _require_files(path, shards)

    arrays: dict[str, StoredArray] = {}
    files: dict[str, ArrayFile] = {}
    problems: list[str] = []
    for shard in shards:
        with naming(shown(shard)):
            file = open_file(path.with_name(shard), resources)
        stated = {name for name, place in weight_map.items() if place == shard}
        problems += [f"{name} is not in {shard}" for name in sorted(stated - file.arrays.keys())]
        problems += [
            f"{name} of {shard} is not in the index" for name in sorted(file.arrays.keys() - stated)
        ]
        arrays |= file.arrays
        files |= dict.fromkeys(stated, file)
    if problems:
        raise ValueError(
            f"the index and its shards differ: {_listed(problems)}. Fetch all files from one place."
        )

    def read(name: str) -> np.ndarray:
        return files[name].read_array(name)

    return ArrayFile(path, arrays, {}, read)


def _read_weight_map(path: pathlib.Path) -> Mapping[str, str]:
    """Return the shard of each array, whose names are those of files beside the index."""
    index = read_json(path)
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(
            "it has no weight_map from arrays to files. Give the index of a model, or its folder."
        )
    stored.check_number(len(weight_map))

    pickles = find_pickles({shard for shard in weight_map.values() if isinstance(shard, str)})
    if pickles:
        inputs = [str(path.with_name(name)) for name in pickles if _is_plain(name)]
        output = str(path.with_name(WEIGHTS))
        raise ValueError(f"it is the index of PyTorch files, {advise(output, inputs)}")
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or not _is_plain(shard) or not shard.endswith(".safetensors"):
            raise ValueError(
                f"array {shown(name)} is in {shown(str(shard))}: must be the name of a .safetensors file in the "
                "folder of the index. Fetch the index again."
            )
    return weight_map


def _is_plain(name: str) -> bool:
    """Return True for the name of a file, False for a path to another folder."""
    return name.isprintable() and not {"/", "\\"} & set(name) and name not in ("", ".", "..")


def _require_files(index: pathlib.Path, shards: list[str]) -> None:
    """Raise ValueError unless all shards are there, and no other shard of the same series."""
    if len(shards) > MAX_SHARDS:
        raise ValueError(
            f"{len(shards):,} shards are more than the {MAX_SHARDS} allowed. Join them."
        )
    if missing := [shard for shard in shards if not index.with_name(shard).is_file()]:
        raise ValueError(
            f"shards that it names are not in its folder: {_listed(missing)}. Fetch them."
        )
    series = {_series_of(shard) for shard in shards} - {None}
    present = {file.name for file in index.parent.glob("*.safetensors")}
    if others := sorted(name for name in present - set(shards) if _series_of(name) in series):
        raise ValueError(
            f"shards in its folder are not in the index: {_listed(others)}. Fetch all from one place."
        )


def _series_of(name: str) -> tuple[str, str] | None:
    """Return what shards of one save have in common: their name without the number."""
    match = _SHARD.fullmatch(name)
    return None if match is None else (match["stem"], match["total"])


def _listed(words: Iterable[str]) -> str:
    words = list(words)
    more = len(words) - _MOST_LISTED
    listed = ", ".join(
        printable(shortened(word, _MOST_CHARACTERS)) for word in words[:_MOST_LISTED]
    )
    return listed if more <= 0 else f"{listed} and {more} more"
