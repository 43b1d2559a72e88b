"""Weights from and to the Hugging Face Hub, `hf://owner/name[@revision]`, by huggingface_hub.

Only weights and their configuration are fetched, nothing that could run.
"""

import pathlib
import re
from types import ModuleType

from vit_jax.storage.hub_files import SCHEME, explain_failure, import_library
from vit_jax.weights.formats.pickled import advise, choose_pickles, name_replacement

PATTERNS = [
    "*.safetensors",
    "*.safetensors.index.json",
    "config.json",
    "preprocessor_config.json",
    "adapter_config.json",
]
_REPOSITORY = re.compile(r"hf://(?P<name>[\w.-]+/[\w.-]+)(?:@(?P<revision>[\w./-]+))?")


def is_hub_address(source: str) -> bool:
    """Return True for a source on the Hub, False for a path."""
    return source.startswith(SCHEME)


def fetch(source: str) -> pathlib.Path:
    """Download a repository's weights unless they are cached; return the local folder.

    Raises:
      ValueError: a malformed address, huggingface_hub is not installed, or it cannot fetch.
    """
    match, library = _open(
        source, "download model.safetensors and config.json yourself and give the folder"
    )
    with explain_failure(source):
        folder = library.snapshot_download(
            match["name"],
            revision=match["revision"],
            allow_patterns=PATTERNS,
        )

    local = pathlib.Path(folder)
    if not any(local.glob("*.safetensors")):
        _reject_pickles(source, match, library)
    return local


def _reject_pickles(source: str, match: re.Match[str], library: ModuleType) -> None:
    """Raise ValueError, with commands to convert them, for weights of PyTorch only."""
    try:
        files = library.HfApi().list_repo_files(match["name"], revision=match["revision"])
    except Exception:  # the caller reports that there are no weights
        return
    top_files = [name for name in files if "/" not in name]
    pickles = choose_pickles(top_files)
    if not pickles:
        return

    _, _, folder = match["name"].rpartition("/")
    revision = ""
    if match["revision"]:
        revision = f" --revision={match['revision']}"
    inputs = [f"{folder}/{name}" for name in pickles]
    output = f"{folder}/{name_replacement(pickles)}"
    raise ValueError(
        f"{source} has no .safetensors but {pickles[0]}, a PyTorch file. Download it by "
        f"hf download {match['name']}{revision} --local-dir={folder}, and give that folder. "
        f"The file is a pickle, {advise(output, inputs)}"
    )


def require_hub(address: str) -> None:
    """Raise ValueError if an upload there is impossible, before weights are converted for it."""
    match, _ = _open(address, "upload the folder yourself")
    if match["revision"]:
        raise ValueError(f"{address}: a revision is made by the upload; give hf://owner/name.")


def push(folder: pathlib.Path, address: str) -> str:
    """Upload a folder of weights as a repository; return its address.

    The repository is created if it does not exist.

    Raises:
      ValueError: an upload is impossible, or the Hub rejects it; the folder stays.
    """
    match, library = _open(address, "upload the folder yourself")
    try:
        hub = library.HfApi()
        hub.create_repo(match["name"], exist_ok=True)
        hub.upload_folder(repo_id=match["name"], folder_path=str(folder))
    except Exception as error:  # the library has no class for its errors
        raise ValueError(
            f"{folder} is written, and cannot be uploaded to {address}: {error}"
        ) from error
    return f"hf://{match['name']}"


def _open(address: str, instead: str) -> tuple[re.Match[str], ModuleType]:
    """Return the parts of an address, and the library."""
    match = _REPOSITORY.fullmatch(address)
    if not match:
        raise ValueError(
            f"{address!r} is not an address of the form hf://owner/name or "
            "hf://owner/name@revision."
        )
    return match, import_library(address, instead)
