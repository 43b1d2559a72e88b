"""Names of machines, their devices in name only, and the groups that collectives form on them."""

import pytest

from tests.columns import list_column
from vit_jax.sharding.fabrics import Group
from vit_jax.tools.plan.topology import build_group, parse_topology

SQUARE = [
    (0, 0, 0),
    (1, 0, 0),
    (0, 1, 0),
    (1, 1, 0),
]


def check_squares_and_slices(devices):
    """The four chips of a host are a square, and slices follow each other."""
    slices = list_column(devices, "slice_index")

    for device in devices:
        if device.process_index == 0:
            assert device.coords in SQUARE
    assert slices == sorted(slices)


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
    processes = list_column(devices, "process_index")
    kinds = list_column(devices, "device_kind")
    ids = list_column(devices, "id")
    positions = {(device.slice_index, device.coords) for device in devices}

    assert topology.num_chips == chips
    assert len(devices) == chips
    assert set(processes) == set(range(hosts))
    assert set(kinds) == {device_kind}
    assert ids == list(range(chips))
    assert len(positions) == chips

    if topology.is_tpu:
        check_squares_and_slices(devices)


@pytest.mark.parametrize(
    ("name", "usual"),
    [
        ("v5e-16", "v5e:4x4"),
        ("V5litepod-256", "v5e:16x16"),
        ("2*v6e-8", "2*v6e:2x4"),
        ("v5p-384", "v5p:4x4x12"),
        ("v4-32", "v4:2x2x4"),
        ("h100", "h100:1"),
        ("8xH100", "h100:8"),
        ("16xh100", "2*h100:8"),
        ("2*8xH100", "2*h100:8"),
        ("A100-80GB", "a100-80gb:1"),
        ("8xA100-SXM4-40GB", "a100-40gb:8"),
        ("2*NVIDIA H100 80GB HBM3:8", "2*h100:8"),
        ("RTX 4090", "rtx4090:1"),
    ],
)
def test_other_names_of_machines(name, usual):
    machine = parse_topology(name)
    expected = parse_topology(usual)

    assert machine.fabric is expected.fabric
    assert machine.shape == expected.shape
    assert machine.num_slices == expected.num_slices


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("v5e", "must be KIND:SHAPE (v5e:16x16"),
        ("v5e:", "is not a machine"),
        ("v5litepod-7", "Use v5litepod-4 or v5litepod-8."),
        ("v5litepod-17", "Use v5litepod-8 or v5litepod-16."),
        ("v5e-512", "Use v5e-128 or v5e-256."),
        ("v5p-33", "or a shape such as v5p:4x4x12"),
        ("v4-16384", "there is no slice of this size"),
        ("8xa100", "Did you mean a100-40gb:8 or a100-80gb:8?"),
        ("h100-8", "Did you mean h100:8?"),
        ("12xH100", "with 1 to 8 GPUs of a node"),
        ("0xH100", "is not a machine"),
        ("h100:16", "2*h100:8 for two nodes"),
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
def test_invalid_names_are_rejected(name, message):
    with pytest.raises(ValueError, match="--topology=") as error:
        parse_topology(name)

    assert message in str(error.value)


def test_two_numbers_of_slices_are_rejected():
    message = "--slices=2 both say how many slices"

    with pytest.raises(ValueError, match=message):
        parse_topology("2*v5e:4x4", num_slices=2)


def is_any(device):
    return True


def is_in_column(device):
    return device.coords[0] == 3


def is_in_quarter_column(device):
    x, y, _ = device.coords
    return x == 3 and y < 4


def is_every_fourth_in_column(device):
    x, y, _ = device.coords
    return x == 3 and y % 4 == 1


def is_in_plane(device):
    return device.coords[2] == 0


def is_at_origin(device):
    return device.coords == (0, 0, 0)


def is_on_diagonal(device):
    return sum(device.coords) == 3


def is_at_one(device):
    return device.coords == (1, 1, 0)


def is_in_slice_2(device):
    return device.slice_index == 2


@pytest.mark.parametrize(
    ("name", "keep", "group"),
    [
        ("v5e:16x16", is_any, Group((16, 16), (True, True))),
        ("v5e:16x16", is_in_column, Group((16,), (True,))),
        ("v5e:16x16", is_in_quarter_column, Group((4,), (False,))),
        ("v5e:16x16", is_every_fourth_in_column, Group((4,), (True,), stride=4)),
        ("v5e:4x4", is_any, Group((4, 4), (False, False))),
        ("v5e:8x16", is_any, Group((8, 16), (False, True))),
        # Three axes are closed together, or none of them.
        ("v4:2x4x4", is_any, Group((2, 4, 4), (False, False, False))),
        ("v4:4x4x8", is_any, Group((4, 4, 8), (True, True, True))),
        ("v4:4x4x8", is_in_plane, Group((4, 4), (True, True))),
        ("v4:4x4x8", is_at_origin, Group()),
        # A diagonal is no box.
        ("v5e:4x4", is_on_diagonal, Group((4,), (False,))),
        ("2*v5e:4x4", is_any, Group((4, 4), (False, False), num_slices=2)),
        ("2*v5e:4x4", is_at_one, Group(num_slices=2)),
        ("4*h100:8", is_any, Group(num_switched=8, num_slices=4)),
        ("4*h100:8", is_in_slice_2, Group(num_switched=8)),
    ],
)
def test_groups(name, keep, group):
    topology = parse_topology(name)
    devices = []
    for device in topology.stand_ins():
        if keep(device):
            devices.append(device)

    assert build_group(devices, topology) == group


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
    expected = parse_topology(shape)

    assert topology.shape == expected.shape
    assert topology.fabric == expected.fabric
    assert topology.name == name
    assert topology.num_chips == chips
    assert topology.num_hosts == hosts
