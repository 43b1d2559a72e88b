"""The package as people install it: it has recipes and type information, without a checkout."""

import ast
import importlib.metadata
import pathlib
import shutil
import subprocess
import sys

import pytest
from packaging.requirements import Requirement

from vit_jax.config import load_recipe, to_text

ROOT = pathlib.Path(__file__).parents[1]


@pytest.fixture
def target(tmp_path):
    """A folder into which the package is installed from a copy of its source."""
    source = tmp_path / "source"
    ignored = shutil.ignore_patterns("__pycache__")
    for folder in ("vit_jax", "configs"):
        shutil.copytree(ROOT / folder, source / folder, ignore=ignored)
    for file in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, source)

    target = tmp_path / "target"
    install = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        "--no-deps",
        "--no-index",
        "--no-build-isolation",
        f"--target={target}",
        source,
    ]
    subprocess.run(install, check=True)
    return target


PROGRAM = """
import sys
sys.path.insert(0, sys.argv[1])
import vit_jax
print(vit_jax.__file__)
from vit_jax.cli import main
main(["show", "--config=digits"])
"""


@pytest.mark.newest
@pytest.mark.tools
def test_an_installed_package_finds_its_recipes_anywhere(target, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()

    result = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(target)],
        cwd=elsewhere,
        capture_output=True,
        text=True,
        check=True,
    )

    file, text = result.stdout.split("\n", 1)
    assert pathlib.Path(file) == target / "vit_jax" / "__init__.py"
    assert text == to_text(load_recipe("configs/digits.py"))
    for file in ("py.typed", "cli/model_table.tsv", "evals/imagenet_classes.tsv"):
        assert (target / "vit_jax" / file).is_file()


DISTRIBUTIONS = {
    "absl": "absl-py",
    "cv2": "opencv-python-headless",
    "google.api_core": "google-api-core",
    "google.auth": "google-auth",
    "google.cloud": "google-cloud-storage",
    "google.protobuf": "protobuf",
    "ml_collections": "ml-collections",
    "orbax": "orbax-checkpoint",
    "sklearn": "scikit-learn",
    "tensorflow_datasets": "tensorflow-datasets",
}
"""Names of imports and of their distributions, where they differ."""


def list_imports(path):
    """Return the complete names of the modules that a file imports."""
    names = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names.append(node.module)
    return names


def find_distribution(name):
    """Return the distribution of an imported module, or None for one of Python and for ours."""
    top = name.partition(".")[0]
    if top in sys.stdlib_module_names or top in {"vit_jax", "configs"}:
        return None
    for module, distribution in DISTRIBUTIONS.items():
        if name == module or name.startswith(f"{module}."):
            return distribution
    return top


def list_declared():
    texts = importlib.metadata.requires("vit_jax")
    return {Requirement(text).name for text in texts}


@pytest.mark.parametrize("folder", ["vit_jax", "configs", "launch"])
def test_direct_imports_are_declared(folder):
    imported = set()
    for path in (ROOT / folder).rglob("*.py"):
        imported.update(map(find_distribution, list_imports(path)))

    assert imported - {None} <= list_declared()
