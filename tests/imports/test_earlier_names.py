"""Modules that were moved are imported by the names that earlier versions documented."""

import importlib
import subprocess
import sys

import pytest

from vit_jax.imports.earlier_names import MOVED, find_present_name


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

    with pytest.raises(ModuleNotFoundError, match=r"vit_jax\.tools\.figures\.missing"):
        importlib.import_module("vit_jax.figures.missing")
