"""The figures of `plan` for devices: the name of their machine, and the result of the process that
plans.
"""

import json
import sys
import types

import pytest

from vit_jax.tools.machine import planned
from vit_jax.tools.machine.planned import Planned, find_topology, plan
from vit_jax.tools.plan import aot
from vit_jax.tools.plan.topology import parse_topology

PLAN = {
    "basis": "compiled",
    "reason": "",
    "step_seconds": 0.5,
    "needed_bytes": 7,
}
V5E = parse_topology("v5e:1x1").stand_ins()


@pytest.mark.parametrize(
    "kind", ["cpu", "NVIDIA H100 PCIe", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "TPU v3"]
)
def test_devices_that_plan_does_not_know(kind):
    assert find_topology([types.SimpleNamespace(device_kind=kind)]) is None


def test_numbers_of_devices_that_plan_does_not_know():
    h100 = types.SimpleNamespace(device_kind="NVIDIA H100 80GB HBM3")
    v5e = parse_topology("v5e:2x4").stand_ins()
    h100s = parse_topology("h100:8").stand_ins()

    assert find_topology([h100]) == "h100:1"
    assert find_topology(v5e[:3]) is None
    assert find_topology(h100s * 2) is None


def test_a_plan_of_an_unknown_machine_has_no_figures():
    cpu = types.SimpleNamespace(device_kind="cpu")
    assert plan("x", [], [cpu]) == Planned("plan does not know 1 x cpu")


TOO_LARGE = PLAN | {"step_seconds": None, "reason": "too large"}


@pytest.mark.parametrize(
    "name", ["v5e:1x1", "v5e:2x4", "v4:2x2x1", "v5p:2x2x1", "v6e:2x2", "h100:8", "l4:1"]
)
def test_the_name_of_a_machine(name):
    assert find_topology(parse_topology(name).stand_ins()) == name


@pytest.fixture
def program(tmp_path, monkeypatch):
    """Make a shell script the program that plans."""

    def write(text):
        path = tmp_path / "python"
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(path))

    return write


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"echo '{json.dumps(PLAN)}'", Planned("compiled for v5e:1x1", 0.5, 7)),
        (f"echo '{json.dumps(TOO_LARGE)}'", Planned("plan for v5e:1x1: too large", None, 7)),
        ("echo one >&2; echo two >&2; exit 3", Planned("plan for v5e:1x1 failed with code 3: two")),
    ],
    ids=["figures", "too large", "failure"],
)
def test_what_the_process_says(program, text, expected):
    program(text)

    assert plan("recipe", ["--config.x=1"], V5E) == expected
    assert expected.is_compiled == (expected.seconds is not None)


def test_words_of_the_process(program, tmp_path):
    program(f'echo "$@" >{tmp_path / "words"}; exit 1')
    plan("recipe", ["--config.x=1"], V5E)
    words = "-P -m vit_jax plan --config=recipe --config.x=1 --topology=v5e:1x1 --json\n"

    assert (tmp_path / "words").read_text() == words


def test_a_process_that_does_not_end_is_killed(program, monkeypatch):
    monkeypatch.setattr(planned, "LIMIT_SECONDS", 0.01)
    program("exec sleep 600")

    assert plan("recipe", [], V5E) == Planned("plan for v5e:1x1 took longer than 0.01 s")


@pytest.mark.tools
@pytest.mark.skipif(not aot.has_compiler(), reason="libtpu is not installed")
def test_a_plan_of_a_tpu():
    overrides = ["--config.input.image_size=32,32", "--config.global_batch=8"]
    figures = plan("pretrain_imagenet1k:ViT-mu/16", overrides, V5E)

    assert figures.basis == "compiled for v5e:1x1"
    assert 0 < figures.seconds < 1
    assert figures.num_bytes > 2**20
