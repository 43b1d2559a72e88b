"""Commands that install an extra of setup.py in the present environment."""

import importlib.metadata
import json
import pathlib
import shlex
import shutil
import sys
import urllib.parse
import urllib.request
from typing import Any


def install_command(extra: str) -> str:
    """Return the command that adds an extra: from the checkout, the wheel or the repository that was installed."""
    python = pathlib.Path(sys.executable)
    is_on_path = pathlib.Path(shutil.which("pip") or "/").parent == python.parent
    pip = "pip" if is_on_path else f"{shlex.quote(str(python))} -m pip"
    checkout = pathlib.Path(__file__).parents[2]
    if (checkout / "setup.py").is_file():
        return f"{pip} install -e {_quoted(f'{checkout}[{extra}]')}"
    return f"{pip} install {_quoted(_requirement(extra, _origin()))}"


def _quoted(word: str) -> str:
    quoted = shlex.quote(word)
    return quoted if quoted != word else f"'{word}'"


def _requirement(extra: str, origin: dict[str, Any]) -> str:
    """Return what pip installs, given where the package came from (PEP 610)."""
    url = origin.get("url", "")
    if url.startswith("file:"):  # a wheel, or a folder
        return f"{urllib.request.url2pathname(urllib.parse.urlparse(url).path)}[{extra}]"
    if "vcs_info" in origin:
        return f"vit_jax[{extra}] @ {origin['vcs_info']['vcs']}+{url}@{origin['vcs_info']['commit_id']}"
    return f"vit_jax[{extra}] @ {url}" if url else f"vit_jax[{extra}]"


def _origin() -> dict[str, Any]:
    """Return what pip has recorded about the origin of the package; {} for a package index."""
    try:
        text = importlib.metadata.distribution("vit_jax").read_text("direct_url.json")
        return dict(json.loads(text or "{}"))
    except (importlib.metadata.PackageNotFoundError, ValueError):
        return {}
