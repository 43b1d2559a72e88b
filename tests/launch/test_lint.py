"""Linters over launch/: shellcheck and hadolint, and two promises that no linter knows."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from vit_jax import cli
from vit_jax.config.schema import FinetuneConfig, PretrainConfig

ROOT = Path(__file__).parents[2]
LAUNCH = ROOT / "launch"
SCRIPTS = sorted([*LAUNCH.glob("*.sh"), *LAUNCH.glob("*.sbatch"), ROOT / ".ci/run"])
STAND_INS = sorted((Path(__file__).parent / "stand_ins").iterdir())


def find_linter(name: str) -> str:
    """Return the linter that was installed beside this Python, or elsewhere."""
    path = Path(sys.executable).with_name(name)
    found = str(path) if path.exists() else shutil.which(name)
    assert found, f"{name} is not installed: pip install '.[test]'"
    return found


@pytest.mark.tools
@pytest.mark.parametrize("folder", [SCRIPTS, STAND_INS], ids=["launch", "stand-ins"])
def test_shellcheck(folder):
    words = [find_linter("shellcheck"), "--external-sources", *folder]
    result = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)

    assert result.returncode == 0, result.stdout


@pytest.mark.tools
def test_hadolint():
    words = [find_linter("hadolint"), LAUNCH / "Dockerfile"]
    result = subprocess.run(words, capture_output=True, text=True)

    assert result.returncode == 0, result.stdout


def test_images_install_the_extras_of_setup():
    """There is one target for each accelerator, each with the extra of its name."""
    dockerfile = (LAUNCH / "Dockerfile").read_text()
    setup = (ROOT / "setup.py").read_text()
    pattern = (
        r"^FROM base AS (\w+)\n(?:[^F].*\n)*?"
        r'RUN pip install "\$\(echo /wheels/\*\.whl\)\[(\w+)\]"\nUSER 1000$'
    )
    targets = dict(re.findall(pattern, dockerfile, re.MULTILINE))

    assert targets == {"cpu": "cpu", "tpu": "tpu", "cuda": "cuda"}
    for extra in targets.values():
        assert f'"{extra}": [' in setup


def test_images_have_a_pinned_python_that_setup_allows():
    dockerfile = (LAUNCH / "Dockerfile").read_text()
    setup = (ROOT / "setup.py").read_text()
    (major, minor) = re.findall(r"^ARG BASE=\S+/python:(\d+)\.(\d+)\.\d+-", dockerfile, re.M)[0]

    assert f"Python :: {major}.{minor}" in setup
    assert 'CMD ["doctor"]' in dockerfile
    assert "doctor" in cli.VERBS


def test_images_hold_what_the_installation_reads():
    ignored = set((ROOT / ".dockerignore").read_text().splitlines())
    needed = {
        "README.md",
        "setup.py",
        "pyproject.toml",
        "vit_jax",
        "configs",
        "launch",
        "*",
        "*.md",
    }

    assert not needed & ignored
    assert {".git", ".venv*", "runs"} <= ignored


SOURCED = ("check.sh", "commands.sh", "environment.sh", "tpu_attempt.sh", "tpu_machine.sh")

EXECUTED = [path for path in SCRIPTS if path.name not in SOURCED]


@pytest.mark.parametrize("script", EXECUTED, ids=lambda path: path.name)
def test_scripts_may_be_executed_and_stop_at_errors(script):
    text = script.read_text()

    assert script.stat().st_mode & 0o100
    assert text.startswith("#!/usr/bin/env bash\n")
    assert "\nset -euo pipefail\n" in text


def test_no_hyper_parameter_in_launch():
    """No script gives vit-jax a value of its configuration: these are in configs/ and on the user's
    command line.
    """
    fields = set(PretrainConfig.__dataclass_fields__) | set(FinetuneConfig.__dataclass_fields__)
    assert "optimizer" in fields

    for path in LAUNCH.iterdir():
        if path.is_file() and path.suffix != ".md":
            assert not re.findall(r"--config\.[a-z_]+", path.read_text()), path
