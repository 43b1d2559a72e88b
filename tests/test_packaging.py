"""The package as people install it: recipes and type information come with it, and no checkout is needed."""

import pathlib
import shutil
import subprocess
import sys

import pytest

from vit_jax.config import load_recipe, to_text

ROOT = pathlib.Path(__file__).parents[1]


@pytest.mark.newest
@pytest.mark.tools
def test_an_installed_package_finds_its_recipes_anywhere(tmp_path):
    source, target, elsewhere = (tmp_path / name for name in ("source", "target", "elsewhere"))
    elsewhere.mkdir()

    for folder in ("vit_jax", "configs"):
        shutil.copytree(
            ROOT / folder,
            source / folder,
            ignore=shutil.ignore_patterns("__pycache__"),
        )

    for file in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, source)

    options = [
        "--quiet",
        "--disable-pip-version-check",
        "--no-deps",
        "--no-index",
        "--no-build-isolation",
    ]
    subprocess.run(
        [sys.executable, "-m", "pip", "install", *options, f"--target={target}", source],
        check=True,
    )

    for file in ("py.typed", "evals/imagenet_classes.tsv"):
        assert (target / "vit_jax" / file).is_file()

    program = "import vit_jax; print(vit_jax.__file__); from vit_jax.cli import main; main(['show', '--config=digits'])"
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(target)!r}); {program}"]
    result = subprocess.run(
        command,
        cwd=elsewhere,
        capture_output=True,
        text=True,
        check=True,
    )
    file, text = result.stdout.split("\n", 1)

    assert pathlib.Path(file) == target / "vit_jax" / "__init__.py"
    assert text == to_text(load_recipe("configs/digits.py"))
