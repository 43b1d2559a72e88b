"""Files of weights by source: a file, a folder, an address of the Hub or of a bucket.

No array is read here.
"""

import fnmatch
import pathlib

from vit_jax.checkpoint.reader import has_checkpoints
from vit_jax.storage import is_address
from vit_jax.storage.files import expanded, fetch, is_in_bucket
from vit_jax.weights import adapter, hub
from vit_jax.weights.formats.pickled import advise, choose_pickles, safetensors_name
from vit_jax.weights.formats.sharded import SUFFIX, is_index, is_shard
from vit_jax.weights.sidecar import CONFIG, PREPROCESSOR, WEIGHTS

INDEX = f"{WEIGHTS}{SUFFIX}"


def is_local(source: str) -> bool:
    """Return True for a path of this machine."""
    return not is_address(source) and not hub.is_hub_address(source)


def fetch_source(source: str | pathlib.Path, class_names: str = "{}.classes.txt") -> pathlib.Path:
    """Return the file or folder of a source on this machine; a workdir in a bucket stays there.

    Raises:
      ValueError: it cannot be downloaded, or is no address.
    """
    address = str(source)
    path = hub.fetch(address) if hub.is_hub_address(address) else expanded(source)
    if is_in_bucket(path) and not has_checkpoints(path):
        return _fetch_from_bucket(path, class_names)
    return path


def _fetch_from_bucket(path: pathlib.Path, class_names: str) -> pathlib.Path:
    """Download weights from a bucket, with what belongs to them; return the file or folder on this machine.

    Raises:
      ValueError: there are none, or they cannot be read.
    """
    if path.is_dir():
        return _fetch_folder(path)
    if is_index(path.name) or is_shard(path.name) or path.name == adapter.WEIGHTS:
        return _fetch_folder(path.parent) / path.name
    local = fetch(path)
    names = [
        class_names.format(path.name),
        *([CONFIG, PREPROCESSOR] if path.name == WEIGHTS else []),
    ]
    for beside in (path.with_name(name) for name in names):
        if beside.is_file():
            fetch(beside)
    return local


def _fetch_folder(path: pathlib.Path) -> pathlib.Path:
    present = list(path.iterdir())
    files = [file for file in present if _is_wanted(file.name)]
    if not any(file.name.endswith(".safetensors") for file in files):
        if chosen := choose_pickles(file.name for file in present):
            advice = advise(safetensors_name(chosen), chosen)
            raise ValueError(
                f"{path} has no .safetensors but {chosen[0]}. Copy it here. It is a PyTorch file, {advice}"
            )
        raise ValueError(
            f"{path}: must have checkpoints of ours or a .safetensors. Give the folder of weights."
        )
    fetched = [fetch(file) for file in files]
    folder = fetched[0].parent
    for older in set(folder.iterdir()) - set(
        fetched
    ):  # a copy of a file that the bucket has no more
        if _is_wanted(older.name):
            older.unlink(missing_ok=True)
    return folder


def _is_wanted(name: str) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in hub.PATTERNS)


def find_file(path: pathlib.Path) -> pathlib.Path:
    """Return the file of arrays of a source on this machine, or the index of several.

    Raises:
      ValueError: a folder without exactly one network, or a file that is one of several shards.
    """
    if path.is_dir():
        return _find_in_folder(path)
    if is_shard(path.name):
        raise ValueError(
            f"{path}: is one of several shards. Give its folder, or the index there ({INDEX})."
        )
    return path


def find_adapter_file(folder: pathlib.Path) -> pathlib.Path:
    """Return the file of an adapter's arrays.

    Raises:
      ValueError: there is none, or a network beside it, so that either could be meant.
    """
    names = {file.name for file in folder.iterdir()}
    if both := {WEIGHTS, INDEX} & names:
        raise ValueError(
            f"{folder} holds a network ({both.pop()}) and a PEFT adapter of a base ({adapter.CONFIG}). Give the "
            f"file of the network, or {adapter.WEIGHTS}."
        )
    if adapter.WEIGHTS in names:
        return folder / adapter.WEIGHTS
    if chosen := choose_pickles(names):
        raise ValueError(f"{folder}: holds {chosen[0]}, {_advise_folder(folder, chosen)}")
    raise ValueError(
        f"{folder} holds {adapter.CONFIG} and no {adapter.WEIGHTS}. Fetch the adapter again."
    )


def _find_in_folder(folder: pathlib.Path) -> pathlib.Path:
    names = sorted(file.name for file in folder.iterdir())
    files = [name for name in names if name.endswith(".safetensors")]
    indexes = [name for name in names if name.endswith(f".safetensors{SUFFIX}")]
    for usual in (WEIGHTS, INDEX):
        if usual in names:
            return folder / usual
    candidates = indexes or files
    if len(candidates) == 1 and not is_shard(candidates[0]):
        return folder / candidates[0]
    raise ValueError(_describe_folder(folder, names, files, indexes))


def _describe_folder(
    folder: pathlib.Path, names: list[str], files: list[str], indexes: list[str]
) -> str:
    """Return why a folder without exactly one network is not read, and the remedy."""
    if any(map(is_shard, files)) and not indexes:
        return (
            f"{folder} holds shards ({files[0]}, ...) and no index ({INDEX}). Fetch the index, too."
        )
    pickles = choose_pickles(names)
    if pickles and not (files or indexes):
        return f"{folder}: holds {pickles[0]}, {_advise_folder(folder, pickles)}"
    present = ", ".join(files) or "none"
    inside = next(
        (parent for parent in list(folder.absolute().parents)[:2] if has_checkpoints(parent)), None
    )
    wanted = f"give the workdir, {inside}" if inside else "give a file"
    return f"{folder} holds no checkpoints of ours and no {WEIGHTS} (.safetensors in it: {present}): {wanted}."


def _advise_folder(folder: pathlib.Path, pickles: list[str]) -> str:
    output = str(folder / safetensors_name(pickles))
    return f"a PyTorch file, {advise(output, [str(folder / name) for name in pickles])}"
