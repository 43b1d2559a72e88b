"""Modules that were moved are imported by the names that earlier versions documented."""

import importlib
import subprocess
import sys

import pytest

from tests.tiny import ROOT
from vit_jax.imports.earlier_names import GOOGLE_MODULES, MOVED, find_present_name


@pytest.mark.parametrize(("earlier", "present"), MOVED.items())
def test_an_earlier_name_gives_the_present_module(earlier, present):
    assert importlib.import_module(earlier) is importlib.import_module(present)


def test_names_from_a_moved_folder_are_imported():
    program = """
from vit_jax.sweeps.suite import Task
from vit_jax.figures import network
import vit_jax.tools.figures.network, vit_jax.tools.sweeps.suite
assert Task is vit_jax.tools.sweeps.suite.Task
assert network is vit_jax.tools.figures.network
assert vit_jax.tools.figures.network.__name__ == "vit_jax.tools.figures.network"
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_other_names_are_left_to_python():
    assert find_present_name("vit_jax.planning") is None
    assert find_present_name("vit_jax.data") is None

    with pytest.raises(ModuleNotFoundError, match=r"vit_jax\.tools\.figures\.no_such"):
        importlib.import_module("vit_jax.figures.no_such")


@pytest.mark.parametrize("statement", ["import vit_jax.models_vit", "from vit_jax import utils"])
def test_modules_of_the_other_package_of_this_name_are_named_as_such(statement):
    with pytest.raises(ModuleNotFoundError, match="google-research/vision_transformer"):
        exec(statement)


def test_names_of_google_are_none_of_ours():
    for name in GOOGLE_MODULES:
        path = ROOT / name.replace(".", "/")
        assert not path.exists()
        assert not path.with_suffix(".py").exists()
