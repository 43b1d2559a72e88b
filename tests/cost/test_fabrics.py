"""Networks: numbers that agree with each other, and collectives worked out by hand."""

import pytest

from vit_jax.cost.chips import find_chip
from vit_jax.cost.fabrics import FABRICS, HOP_SECONDS, NETWORK_SECONDS, Group, collective_seconds, find_fabric

V5E = find_fabric("v5e")
H100 = find_fabric("h100")
FLOPS_A_CYCLE = {  # matrix units x side^2 x 2, of all cores of a chip
    "v4": 8 * 128**2 * 2,
    "v5e": 4 * 128**2 * 2,
    "v5p": 8 * 128**2 * 2,
    "v6e": 4 * 256**2 * 2,
}


@pytest.mark.parametrize("fabric", FABRICS, ids=lambda fabric: fabric.kind)
def test_chips_are_known_and_memory_is_near_the_nominal(fabric):
    chip = find_chip(fabric.device_kind)
    assert 0.9 < fabric.usable_bytes / chip.memory_bytes < 1.02
    assert fabric.source
    assert fabric.network_bytes_per_second < fabric.link_bytes_per_second < chip.memory_bandwidth_bytes_per_second


@pytest.mark.parametrize("kind", FLOPS_A_CYCLE)
def test_the_clock_makes_the_peak(kind):
    fabric = find_fabric(kind)
    peak = find_chip(fabric.device_kind).peak_bf16_flops
    assert FLOPS_A_CYCLE[kind] * fabric.clock_hertz == pytest.approx(peak, rel=0.005)


def test_kinds_are_unique_and_others_unknown():
    assert len({fabric.kind for fabric in FABRICS}) == len(FABRICS)
    assert find_fabric("v9") is None


@pytest.mark.parametrize(
    ("operation", "group", "seconds"),
    [
        # 1 GB around a ring of 16 at 2 x 50 GB/s: 15/16 of it passes, twice for a sum; 8 hops each time
        ("all-gather", Group((16,), (True,)), 0.9375 / 100 + 8 * HOP_SECONDS),
        ("reduce-scatter", Group((16,), (True,)), 0.9375 / 100 + 8 * HOP_SECONDS),
        ("all-reduce", Group((16,), (True,)), 2 * 0.9375 / 100 + 16 * HOP_SECONDS),
        # both axes of a torus at once; and a line, which has one link at its end
        ("all-gather", Group((16, 16), (True, True)), 255 / 256 / 200 + 16 * HOP_SECONDS),
        ("all-gather", Group((4,), (False,)), 0.75 / 50 + 3 * HOP_SECONDS),
        # every second chip: two groups share the links
        ("all-gather", Group((8,), (True,), stride=2), 0.875 / 50 + 4 * HOP_SECONDS),
        ("all-to-all", Group((16,), (True,)), 0.25 * 0.9375 / 100 + 8 * HOP_SECONDS),
        ("collective-permute", Group((16,), (True,)), 1 / 50 + HOP_SECONDS),
        ("all-reduce", Group(), 0.0),  # nobody else
        # two slices of 16: each chip takes a sixteenth to the other slice and back, half of it its own
        (
            "all-reduce",
            Group((16,), (True,), num_slices=2),
            2 * 0.9375 / 100 + 16 * HOP_SECONDS + 2 * (1 / 16) * 0.5 / 3.125 + 2 * NETWORK_SECONDS,
        ),
    ],
)
def test_a_gigabyte_on_v5e(operation, group, seconds):
    assert collective_seconds(operation, 1e9, group, V5E) == pytest.approx(seconds)


def test_a_gigabyte_between_gpus():
    inside = 2 * 7 / 8 / 450 + 2 * HOP_SECONDS
    assert collective_seconds("all-reduce", 1e9, Group(num_switched=8), H100) == pytest.approx(inside)
    across = 2 * (1 / 8) * 0.75 / 50 + 2 * NETWORK_SECONDS
    both = collective_seconds("all-reduce", 1e9, Group(num_switched=8, num_slices=4), H100)
    assert both == pytest.approx(inside + across)
