"""The command that installs an extra fits the way in which the package was installed."""

import importlib.util
import json
import sys
from importlib.machinery import ModuleSpec

import pytest

from tests.tiny import ROOT
from vit_jax.imports import extras

COMMIT = "0123456789abcdef"


@pytest.fixture
def environment(tmp_path, monkeypatch):
    """An environment into which the package was copied, with a function that records where it came from."""
    packages = tmp_path / "site-packages"
    programs = tmp_path / "bin"
    (packages / "vit_jax").mkdir(parents=True)
    programs.mkdir()
    (programs / "pip").write_text("#!/bin/sh\n")
    (programs / "pip").chmod(0o755)
    monkeypatch.setattr(
        extras,
        "__file__",
        str(packages / "vit_jax/imports/extras.py"),
    )
    monkeypatch.setattr(sys, "executable", str(programs / "python"))
    monkeypatch.setattr(sys, "path", [str(packages)])
    monkeypatch.setenv("PATH", str(programs))

    def record(origin):
        folder = packages / "vit_jax-0.2.0.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: vit_jax\nVersion: 0.2.0\n")

        if origin is not None:
            (folder / "direct_url.json").write_text(json.dumps(origin))

    return record


def test_a_checkout_is_installed_again(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert extras.install_command("onnx") == f"{sys.executable} -m pip install -e '{ROOT}[onnx]'"


@pytest.mark.parametrize(
    ("origin", "requirement"),
    [
        (None, "vit_jax[onnx]"),
        (
            {"url": "file:///my%20wheels/vit_jax-0.2.0-py3-none-any.whl"},
            "/my wheels/vit_jax-0.2.0-py3-none-any.whl[onnx]",
        ),
        ({"url": "file:///code/vit_jax", "dir_info": {}}, "/code/vit_jax[onnx]"),
        ({"url": "https://a.org/v.whl"}, "vit_jax[onnx] @ https://a.org/v.whl"),
        (
            {"url": "https://a.org/vit.git", "vcs_info": {"vcs": "git", "commit_id": COMMIT}},
            f"vit_jax[onnx] @ git+https://a.org/vit.git@{COMMIT}",
        ),
    ],
    ids=["index", "wheel", "folder", "url", "repository"],
)
def test_a_copy_is_installed_from_its_origin(
    environment,
    origin,
    requirement,
):
    environment(origin)
    assert extras.install_command("onnx") == f"pip install '{requirement}'"


def test_the_pip_is_that_of_this_python(environment, monkeypatch):
    environment(None)
    monkeypatch.setenv("PATH", "/usr/bin")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: ModuleSpec(name, None))

    assert extras.install_command("onnx") == f"{sys.executable} -m pip install 'vit_jax[onnx]'"


def test_an_environment_of_uv_has_no_pip(environment, monkeypatch):
    environment(None)
    monkeypatch.setenv("PATH", "/usr/bin")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)

    command = extras.install_command("onnx")

    assert command == f"uv pip install --python={sys.executable} 'vit_jax[onnx]'"


def test_no_other_message_names_a_package_index():
    """A message with an extra takes its command from here."""
    sources = {}
    for path in (ROOT / "vit_jax").rglob("*.py"):
        sources[path.name] = path.read_text()

    assert [name for name, text in sources.items() if "pip install 'vit_jax[" in text] == []
