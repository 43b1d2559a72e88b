"""Repositories of the Hugging Face Hub, by huggingface_hub: indices of datasets, verified files.

The library has the cache, resumes downloads, and reads HF_TOKEN, HF_ENDPOINT and HF_HUB_OFFLINE.
Indices and records of verified files are in the cache folder of vit_jax.
"""

import concurrent.futures
import contextlib
import dataclasses
import hashlib
import json
import os
import pathlib
import re
import urllib.parse
from collections.abc import Iterable, Iterator, Mapping
from types import ModuleType
from typing import Any

from vit_jax.imports.extras import install_command
from vit_jax.storage.files import (
    cache_folder,
    open_regular,
    read_bounded,
    read_json,
    write_atomically,
)

Card = Mapping[str, Any]  # the metadata of a dataset card, values of YAML
SCHEME = "hf://"
COMMIT = re.compile(r"[0-9a-f]{40}")
_NUM_DOWNLOADS = 4
"""Number of files that are downloaded at the same time."""
_MAX_STATE_BYTES = 100
_UNREACHABLE = (
    "OfflineModeIsEnabled",
    "ConnectError",
    "ConnectTimeout",
    "ConnectionError",
    "LocalEntryNotFoundError",
)
"""Errors of the library without an answer of the Hub, by the names of their classes."""
_ADVICE = {
    "RepositoryNotFoundError": (
        "Correct the name; for a private or gated repository set HF_TOKEN to a token with access"
    ),
    "GatedRepoError": "Accept its terms on the Hub, and set HF_TOKEN to a token of that account",
    "RevisionNotFoundError": "Give a branch, a tag or a commit of the repository",
    **dict.fromkeys(
        _UNREACHABLE,
        "The Hub cannot be reached, and this is not in the cache. Connect, set HF_ENDPOINT to a "
        "mirror, or unset HF_HUB_OFFLINE",
    ),
}


@dataclasses.dataclass(frozen=True)
class StoredFile:
    """A file of a repository.

    Attributes:
      size: number of bytes.
      sha256: digest of the content, in hexadecimal; None for small files outside of LFS.
    """

    size: int
    sha256: str | None


@dataclasses.dataclass(frozen=True)
class DatasetIndex:
    """The state of a dataset's repository at a commit.

    Attributes:
      name: "owner/name".
      commit: 40 hexadecimal digits.
      files: files of the repository by their paths in it.
      card: metadata at the head of its README.md: licence, configurations, features.
    """

    name: str
    commit: str
    files: Mapping[str, StoredFile]
    card: Card


def import_library(address: str, instead: str) -> Any:
    """Return huggingface_hub.

    Raises:
      ValueError: it is not installed; the message names the address and another way.
    """
    try:
        import huggingface_hub
    except ImportError as error:
        raise ValueError(
            f"{address} needs huggingface_hub: {install_command('hub')}, or {instead}."
        ) from error
    return huggingface_hub


@contextlib.contextmanager
def explain_failure(address: str) -> Iterator[None]:
    """Raise ValueError with advice for errors of the network, the Hub or the address.

    The library has no class for all of them.
    """
    try:
        yield
    except Exception as error:
        advice = _ADVICE.get(type(error).__name__)
        reason = str(error)
        if advice is not None:
            # Further lines of the library are its own advice.
            first_line = reason.partition("\n")[0].removeprefix("Got: ")
            reason = f"{first_line.rstrip('.')}. {advice}."
        raise ValueError(f"{address} cannot be fetched: {reason}") from error


def read_index(library: ModuleType, name: str, revision: str) -> tuple[DatasetIndex, bool]:
    """Return the index of a dataset, and True if it is from the cache because the Hub is absent.

    The index of a commit is asked for once. Raises the errors of the library.
    """
    folder = cache_folder("hub") / name.replace("/", "--")
    if COMMIT.fullmatch(revision) and (folder / f"{revision}.json").exists():
        return _load_index(folder, revision), False
    try:
        info = library.HfApi().dataset_info(name, revision=revision, files_metadata=True)
    except Exception as error:
        is_absent = type(error).__name__ in _UNREACHABLE
        if is_absent and (folder / _name_index(revision)).exists():
            return _load_index(folder, revision), True
        raise
    index = DatasetIndex(name, info.sha, _list_files(info), _read_card(info))
    content = json.dumps(dataclasses.asdict(index))
    folder.mkdir(parents=True, exist_ok=True)
    for key in {revision, index.commit}:
        write_atomically(folder / _name_index(key), content)
    return index, False


def _name_index(revision: str) -> str:
    """Return the name of the file for a revision, which may have slashes."""
    return f"{urllib.parse.quote(revision, safe='')}.json"


def _load_index(folder: pathlib.Path, revision: str) -> DatasetIndex:
    """Return a stored index."""
    stored = read_json(folder / _name_index(revision))
    files = {name: StoredFile(**facts) for name, facts in stored["files"].items()}
    return DatasetIndex(stored["name"], stored["commit"], files, stored["card"])


def _list_files(info: Any) -> dict[str, StoredFile]:
    """Return the files that the Hub states; none has a path outside of the repository."""
    files = {}
    for sibling in info.siblings or ():
        path = pathlib.PurePosixPath(sibling.rfilename)
        if path.is_absolute() or ".." in path.parts:
            continue
        sha256 = None
        if sibling.lfs is not None:
            sha256 = sibling.lfs.sha256
        files[sibling.rfilename] = StoredFile(sibling.size or 0, sha256)
    return files


def _read_card(info: Any) -> Card:
    """Return the metadata of the README.md; {} without any."""
    if info.card_data is None:
        return {}
    return dict(info.card_data.to_dict())


def find_snapshot(index: DatasetIndex) -> pathlib.Path:
    """Return the folder of the library's cache for the files of a commit; it need not exist."""
    from huggingface_hub import constants

    folder = f"datasets--{index.name.replace('/', '--')}"
    return pathlib.Path(constants.HF_HUB_CACHE, folder, "snapshots", index.commit)


def fetch_files(library: ModuleType, index: DatasetIndex, names: Iterable[str]) -> None:
    """Download files into the snapshot of a commit unless they are there; verify new ones.

    Raises the errors of the library.

    Raises:
      ValueError: a file has another size or digest than the Hub states; it is removed.
    """
    snapshot = find_snapshot(index)

    def fetch(name: str) -> None:
        if not (snapshot / name).exists():
            library.hf_hub_download(
                index.name,
                name,
                repo_type="dataset",
                revision=index.commit,
            )
        _verify(snapshot / name, index.files[name])

    with concurrent.futures.ThreadPoolExecutor(_NUM_DOWNLOADS) as pool:
        for _ in pool.map(fetch, names):
            pass


def _verify(path: pathlib.Path, stated: StoredFile) -> None:
    """Raise ValueError unless a file is as the Hub states; a digest is computed once for a file."""
    status = path.stat()
    if status.st_size != stated.size:
        _reject_damaged(path, f"{status.st_size:,} bytes", f"{stated.size:,}")
    if stated.sha256 is None:
        return
    record = cache_folder("hub") / "verified" / stated.sha256
    state = f"{status.st_size} {status.st_mtime_ns}"
    if record.exists() and read_bounded(record, _MAX_STATE_BYTES).decode() == state:
        return
    digest = _compute_sha256(path)
    if digest != stated.sha256:
        _reject_damaged(path, f"SHA-256 {digest}", stated.sha256)
    record.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(record, state)


def _compute_sha256(path: pathlib.Path) -> str:
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _reject_damaged(path: pathlib.Path, found: str, stated: str) -> None:
    """Remove a damaged file and its link in the snapshot, and raise ValueError."""
    content = os.path.realpath(path)
    path.unlink()
    if os.path.exists(content):
        os.unlink(content)
    raise ValueError(
        f"{path.name} has {found}, and the Hub states {stated}. It was removed: repeat the "
        "command, which downloads it again."
    )
