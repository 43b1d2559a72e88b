"""Commands that install an extra of setup.py in the present environment."""

import importlib.metadata
import importlib.util
import json
import pathlib
import shlex
import shutil
import sys
import urllib.parse
import urllib.request
from typing import Any


def install_command(extra: str) -> str:
    """Return the command that adds an extra, from the origin of the installed package."""
    install = _find_installer()
    checkout = pathlib.Path(__file__).parents[2]
    if (checkout / "setup.py").is_file():
        return f"{install} -e {_quote(f'{checkout}[{extra}]')}"
    requirement = _make_requirement(extra, _read_origin())
    return f"{install} {_quote(requirement)}"


def _find_installer() -> str:
    """Return the beginning of a command that installs; uv makes environments without pip."""
    python = pathlib.Path(sys.executable)
    pip_on_path = pathlib.Path(shutil.which("pip") or "/")
    if pip_on_path.parent == python.parent:
        return "pip install"
    quoted = shlex.quote(str(python))
    if importlib.util.find_spec("pip") is None:
        return f"uv pip install --python={quoted}"
    return f"{quoted} -m pip install"


def _quote(word: str) -> str:
    """Return a word of a shell in quotes, also where it needs none."""
    quoted = shlex.quote(word)
    if quoted == word:
        return f"'{word}'"
    return quoted


def _make_requirement(extra: str, origin: dict[str, Any]) -> str:
    """Return the requirement for pip of a package with this origin (PEP 610)."""
    url = origin.get("url", "")
    if url.startswith("file:"):  # a wheel, or a folder
        path = urllib.request.url2pathname(urllib.parse.urlparse(url).path)
        return f"{path}[{extra}]"
    if "vcs_info" in origin:
        vcs = origin["vcs_info"]
        return f"vit_jax[{extra}] @ {vcs['vcs']}+{url}@{vcs['commit_id']}"
    if url:
        return f"vit_jax[{extra}] @ {url}"
    return f"vit_jax[{extra}]"


def _read_origin() -> dict[str, Any]:
    """Return the record of pip about the origin of the package; {} for a package index."""
    try:
        text = importlib.metadata.distribution("vit_jax").read_text("direct_url.json")
        return dict(json.loads(text or "{}"))
    except (importlib.metadata.PackageNotFoundError, ValueError):
        return {}
