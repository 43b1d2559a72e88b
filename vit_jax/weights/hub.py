"""Weights from and to the Hugging Face Hub, `hf://owner/name[@revision]`, by huggingface_hub where it is installed.

Only weights and their configuration are fetched, nothing that could run.
"""

import pathlib
import re
from typing import Any

from vit_jax.imports.extras import install_command
from vit_jax.weights.formats.pickled import advise, choose_pickles, safetensors_name

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
    return source.startswith("hf://")


def fetch(source: str) -> pathlib.Path:
    """Download a repository's weights unless they are cached; return the local folder.

    Raises:
      ValueError: a malformed address, huggingface_hub is not installed, or it cannot fetch.
    """
    match, library = _open(
        source, "download model.safetensors and config.json yourself and give the folder"
    )
    try:
        folder = library.snapshot_download(
            match["name"], revision=match["revision"], allow_patterns=PATTERNS
        )
    except (
        Exception
    ) as error:  # of the network, the Hub or the address; the library has no one class for them
        raise ValueError(f"{source} cannot be fetched: {error}") from error
    local = pathlib.Path(folder)
    if not any(local.glob("*.safetensors")):
        _reject_pickles(source, match, library)
    return local


def _reject_pickles(source: str, match: re.Match[str], library: Any) -> None:
    """Raise ValueError if a repository has weights of PyTorch only, with the commands that convert them."""
    try:
        names = library.HfApi().list_repo_files(match["name"], revision=match["revision"])
    except Exception:  # as in `fetch`; the caller reports that there are no weights
        return
    folder = match["name"].rpartition("/")[2]
    if chosen := choose_pickles([name for name in names if "/" not in name]):
        revision = f" --revision={match['revision']}" if match["revision"] else ""
        inputs = [f"{folder}/{name}" for name in chosen]
        raise ValueError(
            f"{source} has no .safetensors but {chosen[0]}, a PyTorch file. Download it by hf download "
            f"{match['name']}{revision} --local-dir={folder}, and give that folder. The file is a pickle, "
            f"{advise(f'{folder}/{safetensors_name(chosen)}', inputs)}"
        )


def require_hub(address: str) -> None:
    """Raise ValueError if an upload there is impossible, before weights are converted for it."""
    match, _ = _open(address, "upload the folder yourself")
    if match["revision"]:
        raise ValueError(f"{address}: a revision is made by the upload; give hf://owner/name.")


def push(folder: pathlib.Path, address: str) -> str:
    """Upload a folder of weights as a repository, which is created if it does not exist; return its address.

    Raises:
      ValueError: as `require_hub`, or the Hub refuses; the folder stays.
    """
    match, library = _open(address, "upload the folder yourself")
    try:
        hub = library.HfApi()
        hub.create_repo(match["name"], exist_ok=True)
        hub.upload_folder(repo_id=match["name"], folder_path=str(folder))
    except Exception as error:  # as in `fetch`
        raise ValueError(
            f"{folder} is written, and cannot be uploaded to {address}: {error}"
        ) from error
    return f"hf://{match['name']}"


def _open(address: str, instead: str) -> tuple[re.Match[str], Any]:
    """Return the parts of an address, and the library."""
    match = _REPOSITORY.fullmatch(address)
    if not match:
        raise ValueError(
            f"{address!r} is not an address of the form hf://owner/name or hf://owner/name@revision."
        )
    try:
        import huggingface_hub
    except ImportError as error:
        raise ValueError(
            f"{address} needs huggingface_hub: {install_command('hub')}, or {instead}."
        ) from error
    return match, huggingface_hub
