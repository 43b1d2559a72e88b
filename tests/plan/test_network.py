"""Where the members of a collective lie to each other."""

import pytest

from vit_jax.cost.fabrics import Group, collective_seconds
from vit_jax.plan.network import group_of, make_collective_seconds
from vit_jax.plan.topology import parse_topology


def members(name, keep):
    topology = parse_topology(name)
    return [device for device in topology.stand_ins() if keep(device)], topology


@pytest.mark.parametrize(
    ("name", "keep", "group"),
    [
        ("v5e:16x16", lambda d: True, Group((16, 16), (True, True))),
        ("v5e:16x16", lambda d: d.coords[0] == 3, Group((16,), (True,))),
        ("v5e:16x16", lambda d: d.coords[0] == 3 and d.coords[1] < 4, Group((4,), (False,))),
        ("v5e:16x16", lambda d: d.coords[0] == 3 and d.coords[1] % 4 == 1, Group((4,), (True,), stride=4)),
        ("v5e:4x4", lambda d: True, Group((4, 4), (False, False))),
        ("v4:4x4x8", lambda d: d.coords[2] == 0, Group((4, 4), (True, True))),
        ("v4:4x4x8", lambda d: d.coords == (0, 0, 0), Group()),
        ("v5e:4x4", lambda d: sum(d.coords) == 3, Group((4,), (False,))),  # a diagonal is no box
        ("2*v5e:4x4", lambda d: True, Group((4, 4), (False, False), num_slices=2)),
        ("2*v5e:4x4", lambda d: d.coords == (1, 1, 0), Group(num_slices=2)),
        ("4*h100:8", lambda d: True, Group(num_switched=8, num_slices=4)),
        ("4*h100:8", lambda d: d.slice_index == 2, Group(num_switched=8)),
    ],
)
def test_groups(name, keep, group):
    assert group_of(*members(name, keep)) == group


def test_seconds_of_positions_in_a_mesh():
    topology = parse_topology("v5e:4x4")
    devices = list(reversed(topology.stand_ins()))
    seconds = make_collective_seconds(devices, topology)("all-gather", 10**9, (0, 1))  # neighbours of one row
    assert seconds == collective_seconds("all-gather", 10**9, Group((2,), (False,)), topology.fabric)
