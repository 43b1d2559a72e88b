"""Weights from the Hugging Face Hub, `hf://owner/name[@revision]`, through huggingface_hub where it is installed.

Only weights and their configuration are fetched, nothing that could run.
"""

import pathlib
import re

PATTERNS = ["*.safetensors", "config.json", "preprocessor_config.json"]
_REPOSITORY = re.compile(r"hf://(?P<name>[\w.-]+/[\w.-]+)(?:@(?P<revision>[\w./-]+))?")


def is_hub_address(source: str) -> bool:
    """Whether a source is on the Hub and not a path."""
    return source.startswith("hf://")


def fetch(source: str) -> pathlib.Path:
    """Downloads a repository's weights, or finds them where they were downloaded before; returns the local folder.

    Raises:
      ValueError: a malformed address, huggingface_hub is not installed, or it cannot fetch.
    """
    match = _REPOSITORY.fullmatch(source)
    if not match:
        raise ValueError(f"{source!r} is not an address of the form hf://owner/name or hf://owner/name@revision.")
    try:
        import huggingface_hub
    except ImportError as error:
        raise ValueError(
            f"{source} needs huggingface_hub: pip install 'vit_jax[hub]', or download model.safetensors and "
            "config.json yourself and give the folder."
        ) from error
    try:
        folder = huggingface_hub.snapshot_download(match["name"], revision=match["revision"], allow_patterns=PATTERNS)
    except Exception as error:  # of the network, the Hub or the address; the library has no one class for them
        raise ValueError(f"{source} cannot be fetched: {error}") from error
    return pathlib.Path(folder)
