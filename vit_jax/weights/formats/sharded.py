"""Weights in several `.safetensors` files with an index (`model.safetensors.index.json`).

The index maps each array to its file, a shard. Both sides are compared before data is read: every
shard is in the folder of the index and holds exactly the arrays that the index states.
"""

import contextlib
import pathlib
import re
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from vit_jax.storage.files import read_json
from vit_jax.text.printable import printable, shorten
from vit_jax.weights.formats import stored
from vit_jax.weights.formats.pickled import advise, find_pickles
from vit_jax.weights.formats.stored import ArrayFile, StoredArray, naming, quote

SUFFIX = ".index.json"
WEIGHTS = "model.safetensors"  # the usual name of a file that is not split
INDEX = f"{WEIGHTS}{SUFFIX}"
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
    path: pathlib.Path,
    resources: contextlib.ExitStack,
    open_file: Opener,
) -> ArrayFile:
    """Open all shards of an index by `open_file` and check their headers.

    `resources` close them.
    """
    weight_map = _read_weight_map(path)
    shards = sorted(set(weight_map.values()))
    _require_files(path, shards)

    arrays: dict[str, StoredArray] = {}
    files: dict[str, ArrayFile] = {}
    problems: list[str] = []
    for shard in shards:
        with naming(quote(shard)):
            file = open_file(path.with_name(shard), resources)
        stated = {name for name, place in weight_map.items() if place == shard}
        for name in sorted(stated - file.arrays.keys()):
            problems.append(f"{name} is not in {shard}")
        for name in sorted(file.arrays.keys() - stated):
            problems.append(f"{name} of {shard} is not in the index")
        arrays |= file.arrays
        files |= dict.fromkeys(stated, file)

    if problems:
        raise ValueError(
            f"the index and its shards differ: {_join_first(problems)}. "
            "Fetch all files from one place."
        )

    def read(name: str) -> np.ndarray:
        return files[name].read_array(name)

    return ArrayFile(path, arrays, {}, read)


def _read_weight_map(path: pathlib.Path) -> Mapping[str, str]:
    """Return the shard of each array, by the names of files beside the index."""
    index = read_json(path)
    weight_map = None
    if isinstance(index, dict):
        weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(
            "it has no weight_map from arrays to files. Give the index of a model, or its folder."
        )
    stored.check_number(len(weight_map))

    shards = {shard for shard in weight_map.values() if isinstance(shard, str)}
    pickles = find_pickles(shards)
    if pickles:
        inputs = [str(path.with_name(name)) for name in pickles if _is_plain(name)]
        output = str(path.with_name(WEIGHTS))
        raise ValueError(f"it is the index of PyTorch files, {advise(output, inputs)}")

    for name, shard in weight_map.items():
        if not _is_weights_file(shard):
            raise ValueError(
                f"array {quote(name)} is in {quote(str(shard))}: must be the name of "
                "a .safetensors file in the folder of the index. Fetch the index again."
            )
    return weight_map


def _is_weights_file(shard: object) -> bool:
    """Return True for the name of a .safetensors file without a folder."""
    if not isinstance(shard, str):
        return False
    return _is_plain(shard) and shard.endswith(".safetensors")


def _is_plain(name: str) -> bool:
    """Return True for the name of a file, False for a path to another folder."""
    if name in ("", ".", ".."):
        return False
    if "/" in name or "\\" in name:
        return False
    return name.isprintable()


def _require_files(index: pathlib.Path, shards: list[str]) -> None:
    """Raise ValueError unless all shards are there, and no other shard of the same series."""
    if len(shards) > MAX_SHARDS:
        raise ValueError(
            f"{len(shards):,} shards are more than the {MAX_SHARDS} allowed. Join them."
        )

    missing = [shard for shard in shards if not index.with_name(shard).is_file()]
    if missing:
        raise ValueError(
            f"shards that it names are not in its folder: {_join_first(missing)}. Fetch them."
        )

    series = set(map(_find_series, shards)) - {None}
    others = []
    for file in sorted(index.parent.glob("*.safetensors")):
        if file.name not in shards and _find_series(file.name) in series:
            others.append(file.name)
    if others:
        raise ValueError(
            f"shards in its folder are not in the index: {_join_first(others)}. "
            "Fetch all from one place."
        )


def _find_series(name: str) -> tuple[str, str] | None:
    """Return the common part of the names of shards of one save: all but the number."""
    match = _SHARD.fullmatch(name)
    if match is None:
        return None
    return match["stem"], match["total"]


def _join_first(words: Sequence[str]) -> str:
    """Return the first of several words, and the number of the others."""
    first = []
    for word in words[:_MOST_LISTED]:
        short = shorten(word, _MOST_CHARACTERS)
        first.append(printable(short))
    listed = ", ".join(first)
    more = len(words) - _MOST_LISTED
    if more <= 0:
        return listed
    return f"{listed} and {more} more"
