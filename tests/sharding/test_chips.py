"""Chips and their networks: tables whose numbers agree with each other, and collectives worked out by hand."""

import pytest

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
        ("cpu", None),
        ("NVIDIA ", None),
        ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", None),  # a part of a chip
        ("NVIDIA GeForce RTX 3090 Ti", None),
    ],
)
def test_found_by_what_jax_prints(device_kind, name):
    chip = find_chip(device_kind)
    assert (None if chip is None else chip.name) == name


def test_names_and_kinds_are_unique():
    kinds = [kind for chip in CHIPS for kind in chip.device_kinds]
    for names in ([chip.name for chip in CHIPS], kinds, [fabric.kind for fabric in FABRICS]):
        assert len(set(names)) == len(names)


def test_numbers_have_their_units():
    for chip in CHIPS:
        assert 10e12 < chip.peak_bf16_flops < 3e15
        assert 8 * 2**30 <= chip.memory_bytes < 512 * 2**30
        assert 0.3e12 <= chip.memory_bandwidth_bytes_per_second < 10e12
        # The ridge of the roofline: a slipped power of ten in either number leaves this range.
        assert 20 < chip.peak_bf16_flops / chip.memory_bandwidth_bytes_per_second < 1000

    for fabric in FABRICS:
        chip = find_chip(fabric.device_kind)
        assert 0.9 < fabric.usable_bytes / chip.memory_bytes < 1.02
        assert (
            fabric.network_bytes_per_second
            < fabric.link_bytes_per_second
            < chip.memory_bandwidth_bytes_per_second
        )

    assert all(entry.source for entry in (*CHIPS, *FABRICS))

    v3 = find_chip("TPU v3")  # two devices a chip
    assert (v3.peak_bf16_flops, v3.memory_bytes) == (61.5e12, 16 * 2**30)


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
    peak = find_chip(fabric.device_kind).peak_bf16_flops
    assert units * side**2 * 2 * fabric.clock_hertz == pytest.approx(peak, rel=0.005)


@pytest.mark.parametrize(
    ("kind", "operation", "group", "seconds"),
    [
        # 1 GB around a ring of 16 at 2 x 50 GB/s: 15/16 of it passes, twice for a sum; 8 hops each
        # time
        ("v5e", "all-gather", Group((16,), (True,)), 0.9375 / 100 + 8 * HOP_SECONDS),
        ("v5e", "reduce-scatter", Group((16,), (True,)), 0.9375 / 100 + 8 * HOP_SECONDS),
        ("v5e", "all-reduce", Group((16,), (True,)), 2 * 0.9375 / 100 + 16 * HOP_SECONDS),
        # both axes of a torus at once; and a line, which has one link at its end
        ("v5e", "all-gather", Group((16, 16), (True, True)), 255 / 256 / 200 + 16 * HOP_SECONDS),
        ("v5e", "all-gather", Group((4,), (False,)), 0.75 / 50 + 3 * HOP_SECONDS),
        # every second chip: two groups share the links
        ("v5e", "all-gather", Group((8,), (True,), stride=2), 0.875 / 50 + 4 * HOP_SECONDS),
        ("v5e", "all-to-all", Group((16,), (True,)), 0.25 * 0.9375 / 100 + 8 * HOP_SECONDS),
        ("v5e", "collective-permute", Group((16,), (True,)), 1 / 50 + HOP_SECONDS),
        ("v5e", "all-reduce", Group(), 0.0),  # nobody else
        # two slices of 16: each chip takes a sixteenth to the other slice and back, half of it its
        # own
        (
            *("v5e", "all-reduce", Group((16,), (True,), num_slices=2)),
            2 * 0.9375 / 100 + 16 * HOP_SECONDS + 2 * (1 / 16) * 0.5 / 3.125 + 2 * NETWORK_SECONDS,
        ),
        # GPUs behind a switch, and four nodes of them
        ("h100", "all-reduce", Group(num_switched=8), 2 * 7 / 8 / 450 + 2 * HOP_SECONDS),
        (
            *("h100", "all-reduce", Group(num_switched=8, num_slices=4)),
            2 * 7 / 8 / 450 + 2 * HOP_SECONDS + 2 * (1 / 8) * 0.75 / 50 + 2 * NETWORK_SECONDS,
        ),
    ],
)
def test_a_gigabyte(kind, operation, group, seconds):
    assert collective_seconds(operation, 1e9, group, find_fabric(kind)) == pytest.approx(seconds)
