"""Chips and their networks: tables that agree with each other, and collectives by hand."""

import pytest

from tests.columns import list_column
from vit_jax.sharding.chips import CHIPS, find_chip
from vit_jax.sharding.fabrics import (
    FABRICS,
    HOP_SECONDS,
    NETWORK_SECONDS,
    Group,
    collective_seconds,
    find_fabric,
)


@pytest.mark.parametrize(
    ("device_kind", "name"),
    [
        ("TPU v5 lite", "TPU v5e"),
        ("TPU v5", "TPU v5p"),
        ("Tesla V100-SXM2-16GB", "V100 SXM2 16GB"),
        ("NVIDIA A100-SXM4-80GB", "A100 SXM 80GB"),
    ],
)
def test_chips_are_found_by_what_jax_prints(device_kind, name):
    assert find_chip(device_kind).name == name


@pytest.mark.parametrize(
    "device_kind",
    [
        "cpu",
        "NVIDIA ",
        # A part of a chip.
        "NVIDIA A100-SXM4-80GB MIG 1g.10gb",
        "NVIDIA GeForce RTX 3090 Ti",
    ],
)
def test_other_devices_are_no_known_chips(device_kind):
    assert find_chip(device_kind) is None


def test_names_and_kinds_are_unique():
    chips = list_column(CHIPS, "name")
    fabrics = list_column(FABRICS, "kind")
    device_kinds = []
    for chip in CHIPS:
        device_kinds.extend(chip.device_kinds)

    for names in (chips, fabrics, device_kinds):
        assert len(set(names)) == len(names)


@pytest.mark.parametrize("chip", CHIPS, ids=lambda chip: chip.name)
def test_numbers_of_chips_have_their_units(chip):
    # The ridge of the roofline: a slipped power of ten in either number leaves this range.
    ridge = chip.peak_bf16_flops / chip.memory_bandwidth_bytes_per_second

    assert 10e12 < chip.peak_bf16_flops < 3e15
    assert 8 * 2**30 <= chip.memory_bytes < 512 * 2**30
    assert 0.3e12 <= chip.memory_bandwidth_bytes_per_second < 10e12
    assert 20 < ridge < 1000
    assert chip.source


@pytest.mark.parametrize("fabric", FABRICS, ids=lambda fabric: fabric.kind)
def test_numbers_of_fabrics_have_their_units(fabric):
    chip = find_chip(fabric.device_kind)

    assert 0.9 < fabric.usable_bytes / chip.memory_bytes < 1.02
    assert fabric.network_bytes_per_second < fabric.link_bytes_per_second
    assert fabric.link_bytes_per_second < chip.memory_bandwidth_bytes_per_second
    assert fabric.source


def test_a_tpu_v3_chip_is_two_devices():
    chip = find_chip("TPU v3")

    assert chip.peak_bf16_flops == 61.5e12
    assert chip.memory_bytes == 16 * 2**30


@pytest.mark.parametrize(
    ("kind", "units", "side"),
    [
        ("v4", 8, 128),
        ("v5e", 4, 128),
        ("v5p", 8, 128),
        ("v6e", 4, 256),
    ],
)
def test_the_clock_makes_the_peak(kind, units, side):
    fabric = find_fabric(kind)
    expected = find_chip(fabric.device_kind).peak_bf16_flops

    flops_per_cycle = units * side**2 * 2

    assert flops_per_cycle * fabric.clock_hertz == pytest.approx(expected, rel=0.005)


RING = Group((16,), (True,))

TORUS = Group((16, 16), (True, True))

LINE = Group((4,), (False,))

EVERY_SECOND_CHIP = Group((8,), (True,), stride=2)

TWO_SLICES = Group((16,), (True,), num_slices=2)

NODE = Group(num_switched=8)

FOUR_NODES = Group(num_switched=8, num_slices=4)


@pytest.mark.parametrize(
    ("kind", "operation", "group", "seconds"),
    [
        # 1 GB around a ring of 16 at 2 x 50 GB/s: 15/16 of it passes, twice for a sum; 8 hops each
        # time.
        ("v5e", "all-gather", RING, 0.9375 / 100 + 8 * HOP_SECONDS),
        ("v5e", "reduce-scatter", RING, 0.9375 / 100 + 8 * HOP_SECONDS),
        ("v5e", "all-reduce", RING, 2 * 0.9375 / 100 + 16 * HOP_SECONDS),
        # Both axes of a torus at once; and a line, which has one link at its end.
        ("v5e", "all-gather", TORUS, 255 / 256 / 200 + 16 * HOP_SECONDS),
        ("v5e", "all-gather", LINE, 0.75 / 50 + 3 * HOP_SECONDS),
        # With every second chip two groups share the links.
        ("v5e", "all-gather", EVERY_SECOND_CHIP, 0.875 / 50 + 4 * HOP_SECONDS),
        ("v5e", "all-to-all", RING, 0.25 * 0.9375 / 100 + 8 * HOP_SECONDS),
        ("v5e", "collective-permute", RING, 1 / 50 + HOP_SECONDS),
        # One chip alone.
        ("v5e", "all-reduce", Group(), 0.0),
        # Two slices of 16: each chip takes a sixteenth to the other slice and back, half of which
        # it has already.
        (
            "v5e",
            "all-reduce",
            TWO_SLICES,
            2 * 0.9375 / 100 + 16 * HOP_SECONDS + 2 * (1 / 16) * 0.5 / 3.125 + 2 * NETWORK_SECONDS,
        ),
        # GPUs behind a switch, and four nodes of them.
        ("h100", "all-reduce", NODE, 2 * 7 / 8 / 450 + 2 * HOP_SECONDS),
        (
            "h100",
            "all-reduce",
            FOUR_NODES,
            2 * 7 / 8 / 450 + 2 * HOP_SECONDS + 2 * (1 / 8) * 0.75 / 50 + 2 * NETWORK_SECONDS,
        ),
    ],
)
def test_seconds_of_a_gigabyte(kind, operation, group, seconds):
    actual = collective_seconds(operation, 1e9, group, find_fabric(kind))

    assert actual == pytest.approx(seconds)
