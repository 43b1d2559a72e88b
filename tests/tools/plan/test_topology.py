"""Names of machines, their devices in name only, and the groups that collectives form on them."""

import pytest

from vit_jax.sharding.fabrics import Group
from vit_jax.tools.plan.topology import build_group, parse_topology

SQUARE = [(0, 0, 0), (1, 0, 0), (0, 1, 0), (1, 1, 0)]


@pytest.mark.parametrize(
    ("name", "chips", "hosts", "device_kind"),
    [
        ("v5e:16x16", 256, 64, "TPU v5 lite"),
        ("v5e:1x1", 1, 1, "TPU v5 lite"),
        ("v4:4x4x8", 128, 32, "TPU v4"),
        ("v5p:8x8x8", 512, 128, "TPU v5"),
        ("v5p:2x2x1", 4, 1, "TPU v5"),
        ("v6e:2x4", 8, 2, "TPU v6 lite"),
        ("2*v5e:4x4", 32, 8, "TPU v5 lite"),
        ("h100:8", 8, 1, "H100 80GB HBM3"),
        ("4*a100-80gb:8", 32, 4, "A100-SXM4-80GB"),
        ("rtx4090:4", 4, 1, "GeForce RTX 4090"),
        ("2*l4:4", 8, 2, "L4"),
    ],
)
def test_sizes(name, chips, hosts, device_kind):
    topology = parse_topology(name)
    devices = topology.stand_ins()

    assert topology.num_chips == chips == len(devices)
    assert {device.process_index for device in devices} == set(range(hosts))
    assert {device.device_kind for device in devices} == {device_kind}
    assert [device.id for device in devices] == list(range(chips))
    assert len({(device.slice_index, device.coords) for device in devices}) == chips

    if topology.is_tpu:  # four chips of a host are a square; slices follow each other
        assert {device.coords for device in devices if not device.process_index} <= set(SQUARE)
        assert [device.slice_index for device in devices] == sorted(
            device.slice_index for device in devices
        )


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("v5e", "must be KIND:SHAPE (v5e:16x16"),
        ("v5e:", "is not a machine"),
        ("v5litepod-7", "or a type of Google Cloud (v5litepod-256)"),
        ("v5x:4x4", "Did you mean v5"),
        ("tpu:4x4", "Kinds: v4, v5e"),
        ("v5e:3x3", "one of 1x1, 2x2"),
        ("v5e:16x32", "8x16, 16x16"),
        ("v5e:4x4x4", "a slice of v5e must be one of"),
        ("v4:4x4", "AxBxC with A <= B <= C"),
        ("v4:4x8x4", "AxBxC with A <= B <= C"),
        ("v4:4x4x6", "multiple of 4"),
        ("v4:16x16x20", "at most 4096 chips"),
        ("h100:9", "N with 1 to 8 GPUs"),
        ("h100:2x4", "must be h100:N"),
        ("0*v5e:4x4", "must be 1 or more"),
    ],
)
def test_names_that_are_none(name, message):
    with pytest.raises(ValueError, match="--topology=") as error:
        parse_topology(name)

    assert message in str(error.value)
    with pytest.raises(ValueError, match="--slices=2 both say how many slices"):
        parse_topology("2*v5e:4x4", num_slices=2)


@pytest.mark.parametrize(
    ("name", "keep", "group"),
    [
        ("v5e:16x16", lambda d: True, Group((16, 16), (True, True))),
        ("v5e:16x16", lambda d: d.coords[0] == 3, Group((16,), (True,))),
        ("v5e:16x16", lambda d: d.coords[0] == 3 and d.coords[1] < 4, Group((4,), (False,))),
        (
            "v5e:16x16",
            lambda d: d.coords[0] == 3 and d.coords[1] % 4 == 1,
            Group((4,), (True,), stride=4),
        ),
        ("v5e:4x4", lambda d: True, Group((4, 4), (False, False))),
        ("v5e:8x16", lambda d: True, Group((8, 16), (False, True))),
        (
            "v4:2x4x4",
            lambda d: True,
            Group((2, 4, 4), (False,) * 3),
        ),  # three axes close together or not at all
        ("v4:4x4x8", lambda d: True, Group((4, 4, 8), (True, True, True))),
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
    topology = parse_topology(name)
    assert (
        build_group([device for device in topology.stand_ins() if keep(device)], topology) == group
    )


@pytest.mark.parametrize(
    ("name", "shape", "chips", "hosts"),
    [
        ("v5litepod-256", "v5e:16x16", 256, 64),
        ("2*v5litepod-16", "2*v5e:4x4", 32, 8),
        ("v6e-8", "v6e:2x4", 8, 2),
        ("v4-32", "v4:2x2x4", 16, 4),
        ("v5p-2048", "v5p:8x8x16", 1024, 256),
    ],
)
def test_types_of_google_cloud(name, shape, chips, hosts):
    topology = parse_topology(name)

    assert (topology.shape, topology.fabric) == (
        parse_topology(shape).shape,
        parse_topology(shape).fabric,
    )
    assert (topology.name, topology.num_chips, topology.num_hosts) == (name, chips, hosts)
