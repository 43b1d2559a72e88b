"""Files of weights by source: a file, a folder, an address of the Hub or of a bucket.

No array is read here.
"""

import fnmatch
import pathlib
import re
from collections.abc import Iterable

from vit_jax.checkpoint.reader import has_checkpoints
from vit_jax.storage import is_address
from vit_jax.storage.files import expand_path, fetch, is_in_bucket
from vit_jax.weights import adapter, hub
from vit_jax.weights.formats.pickled import advise, choose_pickles, name_replacement
from vit_jax.weights.formats.sharded import INDEX, SUFFIX, WEIGHTS, is_index, is_shard
from vit_jax.weights.sidecar import CONFIG, PREPROCESSOR

_WANTED = re.compile("|".join(map(fnmatch.translate, hub.PATTERNS)))


def is_local(source: str) -> bool:
    """Return True for a path of this machine."""
    return not is_address(source) and not hub.is_hub_address(source)


def find_class_names_file(path: pathlib.Path) -> pathlib.Path:
    """Return the file for the class names of a .npz whose metadata has no room for them."""
    return path.with_name(f"{path.name}.classes.txt")


def split_step(source: str | pathlib.Path) -> tuple[str, int | None]:
    """Return the workdir and the step of "WORKDIR@STEP"; another source, and None.

    A path that exists is never split, and an address of the Hub has a revision after its @.
    """
    text = str(source)
    workdir, at, step = text.rpartition("@")
    if not at or not step.isdecimal() or hub.is_hub_address(text):
        return text, None
    if expand_path(text).exists() or not has_checkpoints(workdir):
        return text, None
    return workdir, int(step)


# Download.


def fetch_source(source: str | pathlib.Path) -> pathlib.Path:
    """Return the file or folder of a source on this machine; a workdir in a bucket stays there.

    Raises:
      ValueError: it cannot be downloaded, or is no address.
    """
    address = str(source)
    if hub.is_hub_address(address):
        return hub.fetch(address)
    path = expand_path(source)
    if is_in_bucket(path) and not has_checkpoints(path):
        return _fetch_from_bucket(path)
    return path


def _fetch_from_bucket(path: pathlib.Path) -> pathlib.Path:
    """Download weights and their configuration; return the file or folder on this machine.

    Raises:
      ValueError: there are no weights, or they cannot be read.
    """
    if path.is_dir():
        return _fetch_folder(path)
    if is_index(path.name) or is_shard(path.name) or path.name == adapter.WEIGHTS:
        folder = _fetch_folder(path.parent)
        return folder / path.name

    local = fetch(path)
    companions = [find_class_names_file(path)]
    if path.name == WEIGHTS:
        companions += [path.with_name(CONFIG), path.with_name(PREPROCESSOR)]
    for file in companions:
        if file.is_file():
            fetch(file)
    return local


def _fetch_folder(path: pathlib.Path) -> pathlib.Path:
    """Download the weights of a folder; return the folder on this machine."""
    present = list(path.iterdir())
    _require_safetensors(path, present)
    wanted = _select_wanted(present)
    fetched = list(map(fetch, wanted))

    folder = fetched[0].parent
    for file in _select_wanted(folder.iterdir()):
        if file not in fetched:  # the copy of a file that was removed from the bucket
            file.unlink(missing_ok=True)
    return folder


def _require_safetensors(folder: pathlib.Path, files: Iterable[pathlib.Path]) -> None:
    """Raise ValueError, with the remedy, if none of the files is a .safetensors."""
    names = _list_names(files)
    if _select_by_suffix(names, ".safetensors"):
        return
    pickles = choose_pickles(names)
    if pickles:
        advice = advise(name_replacement(pickles), pickles)
        raise ValueError(
            f"{folder} has no .safetensors but {pickles[0]}. "
            f"Copy it here. It is a PyTorch file, {advice}"
        )
    raise ValueError(
        f"{folder}: must have vit_jax checkpoints or a .safetensors. Give the folder of weights."
    )


def _select_wanted(files: Iterable[pathlib.Path]) -> list[pathlib.Path]:
    """Return the files of weights and of their configuration."""
    return [file for file in files if _WANTED.match(file.name)]


def _list_names(files: Iterable[pathlib.Path]) -> list[str]:
    return sorted(file.name for file in files)


def _select_by_suffix(names: Iterable[str], suffix: str) -> list[str]:
    return [name for name in names if name.endswith(suffix)]


# Files of a folder on this machine.


def find_file(path: pathlib.Path) -> pathlib.Path:
    """Return the file of arrays of a source on this machine, or the index of several files.

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
    names = _list_names(folder.iterdir())
    for network in (WEIGHTS, INDEX):
        if network in names:
            raise ValueError(
                f"{folder} holds a network ({network}) and a PEFT adapter of a base "
                f"({adapter.CONFIG}). Give the file of the network, or {adapter.WEIGHTS}."
            )
    if adapter.WEIGHTS in names:
        return folder / adapter.WEIGHTS

    pickles = choose_pickles(names)
    if pickles:
        raise ValueError(f"{folder}: holds {pickles[0]}, {_advise_folder(folder, pickles)}")
    raise ValueError(
        f"{folder} holds {adapter.CONFIG} and no {adapter.WEIGHTS}. Fetch the adapter again."
    )


def _find_in_folder(folder: pathlib.Path) -> pathlib.Path:
    """Return the file of the only network in a folder, or its index.

    Raises:
      ValueError: there is no network, or more than one.
    """
    names = _list_names(folder.iterdir())
    for usual_name in (WEIGHTS, INDEX):
        if usual_name in names:
            return folder / usual_name

    files = _select_by_suffix(names, ".safetensors")
    indexes = _select_by_suffix(names, f".safetensors{SUFFIX}")
    candidates = indexes or files
    if len(candidates) == 1 and not is_shard(candidates[0]):
        return folder / candidates[0]

    has_index = len(indexes) > 0
    if not has_index and any(map(is_shard, files)):
        raise ValueError(
            f"{folder} holds shards ({files[0]}, ...) and no index ({INDEX}). Fetch the index, too."
        )
    pickles = choose_pickles(names)
    if pickles and not candidates:
        raise ValueError(f"{folder}: holds {pickles[0]}, {_advise_folder(folder, pickles)}")
    raise ValueError(
        f"{folder} holds no vit_jax checkpoints and no {WEIGHTS} (.safetensors in it: "
        f"{', '.join(files) or 'none'}): {_advise_path(folder)}."
    )


def _advise_folder(folder: pathlib.Path, pickles: list[str]) -> str:
    """Return the advice for a folder with pickled files only."""
    output = folder / name_replacement(pickles)
    inputs = [str(folder / name) for name in pickles]
    return f"a PyTorch file, {advise(str(output), inputs)}"


def _advise_path(folder: pathlib.Path) -> str:
    """Return the path to give in the place of a folder inside a workdir, or of another one."""
    parents = folder.absolute().parents
    for parent in parents[:2]:
        if has_checkpoints(parent):
            return f"give the workdir, {parent}"
    return "give a file"
