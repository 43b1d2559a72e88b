"""JAX is told to skip a TPU only where nothing hints at one."""

import importlib.metadata
import importlib.util
import os
import pathlib
import subprocess
import sys
import types

import pytest

from tests.integration.commands import HANG_SECONDS
from tests.tiny import ROOT
from vit_jax import accelerators


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine without devices, with libtpu and without plugins; the function that decides."""
    specs = {"libtpu": object(), "jax_plugins": None}
    monkeypatch.setattr(importlib.util, "find_spec", specs.__getitem__)
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: plugins)
    plugins = []

    def add(file):
        path = tmp_path / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("0x1ae0\n")

    def decide(**environment):
        return accelerators.default_platforms(environment, tmp_path)

    return types.SimpleNamespace(decide=decide, add=add, specs=specs, plugins=plugins)


def test_without_any_hint_it_is_the_cpu(machine):
    assert machine.decide(HOME="/root") == "cpu"
    assert machine.decide(JAX_PLATFORMS="") == "cpu"
    assert machine.decide(TPU_SKIP_MDS_QUERY="1", TPU_LIBRARY_PATH="libtpu.so") == "cpu"  # which JAX sets
    machine.add("sys/bus/pci/drivers/gvnic/0000:00:04.0/vendor")  # a Google VM's network card
    assert machine.decide() == "cpu"


@pytest.mark.parametrize(
    "file",
    [
        *("dev/accel0", "dev/vfio/0", "dev/nvidia0", "dev/dxg", "dev/kfd"),
        "sys/bus/pci/drivers/vfio-pci/0000:00:05.0/vendor",
    ],
)
def test_with_a_device_jax_decides(machine, file):
    machine.add(file)
    assert machine.decide() == ""


@pytest.mark.parametrize("name", ["TPU_NAME", "TPU_WORKER_ID", "JAX_FORCE_TPU_INIT"])
def test_with_a_variable_of_tpus_jax_decides(machine, name):
    assert machine.decide(**{name: "0"}) == ""


def test_what_a_user_has_chosen_stays(machine):
    assert machine.decide(JAX_PLATFORMS="tpu,cpu") == ""


def test_with_a_plugin_or_without_libtpu_jax_decides(machine):
    machine.plugins.append("metal")
    assert machine.decide() == ""
    machine.plugins.clear()
    machine.specs["jax_plugins"] = object()
    assert machine.decide() == ""
    machine.specs |= {"jax_plugins": None, "libtpu": None}
    assert machine.decide() == ""


@pytest.mark.tools
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")
@pytest.mark.skipif(accelerators.default_platforms({}, pathlib.Path("/")) == "", reason="there may be an accelerator")
def test_a_command_prints_no_errors_of_libtpu():
    variables = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
    result = subprocess.run(
        [sys.executable, "-m", "vit_jax", "doctor"],
        env=variables | {"ALLOW_MULTIPLE_LIBTPU_LOAD": "1"},  # also while another program holds libtpu's lock
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=HANG_SECONDS,
    )
    assert (result.returncode, result.stderr) == (0, "")
