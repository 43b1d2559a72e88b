"""The table of chips: names as jax prints them, no two alike, numbers of a plausible size."""

import pathlib
import re

import pytest

from vit_jax import cost
from vit_jax.cost.chips import CHIPS, Chip, find_chip, mfu


@pytest.mark.parametrize(
    ("device_kind", "name"),
    [
        ("TPU v5 lite", "TPU v5e"),
        ("TPU v5", "TPU v5p"),
        ("TPU7x", "TPU 7x"),
        ("Tesla V100-SXM2-16GB", "V100 SXM2 16GB"),
        ("NVIDIA A100-SXM4-80GB", "A100 SXM 80GB"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("cpu", None),
        ("", None),
        ("NVIDIA ", None),
        ("TPU", None),
        ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", None),  # a part of a chip
        ("NVIDIA GeForce RTX 3090 Ti", None),
    ],
)
def test_found_by_what_jax_prints(device_kind: str, name: str | None) -> None:
    chip = find_chip(device_kind)
    assert (None if chip is None else chip.name) == name


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


def test_tpu_v3_is_halved_and_mfu_is_by_peak() -> None:
    v3 = find_chip("TPU v3")  # two devices a chip
    assert v3 is not None
    assert (v3.peak_bf16_flops, v3.memory_bytes) == (61.5e12, 16 * 2**30)
    assert mfu(61.5e12 / 2, v3) == pytest.approx(0.5)


def test_cost_imports_no_jax() -> None:
    folder = pathlib.Path(next(iter(cost.__path__)))
    for file in folder.glob("*.py"):
        assert not re.search(r"^\s*(import|from) (jax|flax|optax|numpy)\b", file.read_text(), re.MULTILINE), file
