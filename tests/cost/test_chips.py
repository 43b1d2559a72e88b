"""The table of chips: names as jax prints them, no two alike, numbers of a plausible size."""

import pathlib
import re

import pytest

from vit_jax import cost
from vit_jax.cost.chips import CHIPS, Chip, find_chip, mfu


@pytest.mark.parametrize(
    ("device_kind", "name"),
    [
        ("TPU v2", "TPU v2"),
        ("TPU v3", "TPU v3"),
        ("TPU v4", "TPU v4"),
        ("TPU v5 lite", "TPU v5e"),
        ("TPU v5", "TPU v5p"),
        ("TPU v5p", "TPU v5p"),
        ("TPU v6 lite", "TPU v6e"),
        ("TPU7x", "TPU 7x"),
        ("Tesla P100-PCIE-16GB", "P100 PCIe"),
        ("Tesla V100-SXM2-16GB", "V100 SXM2 16GB"),
        ("Tesla T4", "T4"),
        ("NVIDIA A100-SXM4-40GB", "A100 SXM 40GB"),
        ("NVIDIA A100-SXM4-80GB", "A100 SXM 80GB"),
        ("NVIDIA A10G", "A10G"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA H100 80GB HBM3", "H100 SXM"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA B200", "B200"),
        ("NVIDIA GeForce RTX 3090", "RTX 3090"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
    ],
)
def test_found_by_what_jax_prints(device_kind: str, name: str) -> None:
    chip = find_chip(device_kind)
    assert chip is not None
    assert chip.name == name


@pytest.mark.parametrize(
    "device_kind", ["cpu", "", "NVIDIA ", "TPU", "NVIDIA A100-SXM4-80GB MIG 1g.10gb", "NVIDIA GeForce RTX 3090 Ti"]
)
def test_unknown_rather_than_nearly_right(device_kind: str) -> None:
    assert find_chip(device_kind) is None


def test_names_and_kinds_are_unique() -> None:
    names = [chip.name for chip in CHIPS]
    kinds = [kind for chip in CHIPS for kind in chip.device_kinds]
    assert len(set(names)) == len(names)
    assert len(set(kinds)) == len(kinds)


@pytest.mark.parametrize("chip", CHIPS, ids=lambda chip: chip.name)
def test_numbers_have_their_units(chip: Chip) -> None:
    assert 10e12 < chip.peak_bf16_flops < 3e15
    assert 8 * 2**30 <= chip.memory_bytes < 512 * 2**30
    assert 0.3e12 <= chip.memory_bandwidth_bytes_per_second < 10e12
    # The ridge of the roofline: a slipped power of ten in either number leaves this range.
    assert 20 < chip.peak_bf16_flops / chip.memory_bandwidth_bytes_per_second < 1000
    assert chip.source


def test_per_core_chips_are_halved() -> None:
    v3 = find_chip("TPU v3")
    assert v3 is not None
    assert (v3.peak_bf16_flops, v3.memory_bytes) == (61.5e12, 16 * 2**30)


def test_mfu() -> None:
    v4 = find_chip("TPU v4")
    assert v4 is not None
    assert mfu(137.5e12, v4) == pytest.approx(0.5)
    with pytest.raises(ValueError, match="0 or more"):
        mfu(-1.0, v4)


def test_cost_imports_no_jax() -> None:
    folder = pathlib.Path(next(iter(cost.__path__)))
    for file in folder.glob("*.py"):
        assert not re.search(r"^\s*(import|from) (jax|flax|optax|numpy)\b", file.read_text(), re.MULTILINE), file
