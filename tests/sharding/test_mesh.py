import dataclasses

import numpy as np
import pytest

from vit_jax.config import ShardingConfig
from vit_jax.sharding import build_mesh, compiler_options
from vit_jax.sharding.mesh import KIND_OPTIONS, TPU_OPTIONS


@dataclasses.dataclass(frozen=True)
class Chip:
    """What mesh_utils asks of a device."""

    id: int
    slice_index: int
    coords: tuple[int, int, int]
    core_on_chip: int = 0
    process_index: int = 0
    platform: str = "tpu"
    device_kind: str = "TPU v4"
    client: object = None


def slices(count, side=2):
    """Slices of `side` x `side` chips."""
    places = [(x, y, 0) for y in range(side) for x in range(side)]
    return [
        Chip(len(places) * s + i, s, place) for s in range(count) for i, place in enumerate(places)
    ]


@pytest.mark.parametrize(
    ("num_slices", "config", "shape"),
    [
        (1, ShardingConfig(num_replicas=2), (2, 2, 1)),  # the data axis takes what is left
        (1, ShardingConfig(num_replicas=2, num_model_shards=2), (2, 1, 2)),
        (2, ShardingConfig(), (2, 4, 1)),
        (4, ShardingConfig(num_model_shards=2), (4, 2, 2)),
        (2, ShardingConfig(num_replicas=4), (4, 2, 1)),
        (2, ShardingConfig(num_replicas=1), (1, 8, 1)),
    ],
)
def test_slices_are_never_mixed_along_model_and_outermost_elsewhere(num_slices, config, shape):
    chips = slices(num_slices)
    mesh = build_mesh(chips, config)

    assert mesh.devices.shape == shape
    assert sorted(chip.id for chip in mesh.devices.flat) == list(range(len(chips)))

    index = np.vectorize(lambda chip: chip.slice_index)(mesh.devices)
    assert (index == index[:, :, :1]).all()  # one slice holds all shards of a model
    assert (np.diff(index.reshape(-1)) >= 0).all()  # a slice's chips are neighbours in the batch


def test_options_are_those_of_the_chip():
    v5e = [dataclasses.replace(chip, device_kind="TPU v5 lite") for chip in slices(1)]
    assert compiler_options(build_mesh(v5e)) == TPU_OPTIONS | KIND_OPTIONS["TPU v5 lite"]
    assert compiler_options(build_mesh(slices(1))) == TPU_OPTIONS


def test_nodes_of_gpus_are_replicas_and_have_no_options_for_tpus():
    gpus = [
        dataclasses.replace(chip, platform="gpu", device_kind="NVIDIA H100 80GB HBM3")
        for chip in slices(2)
    ]

    assert build_mesh(gpus).devices.shape == (2, 4, 1)
    with pytest.raises(
        ValueError, match="num_model_shards=8: must divide the 4 devices of a slice"
    ):
        build_mesh(gpus, ShardingConfig(num_model_shards=8))

    with pytest.raises(ValueError, match="num_replicas=4: must divide the 6 slices"):
        build_mesh(slices(6), ShardingConfig(num_replicas=4))

    assert compiler_options(build_mesh(gpus)) is None
