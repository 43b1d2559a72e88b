"""Meshes of made-up devices: the order of slices, and compiler options."""

import dataclasses
import itertools

import jax
import numpy as np
import pytest

from vit_jax.config import ShardingConfig
from vit_jax.sharding import build_mesh, compiler_options
from vit_jax.sharding.mesh import CPU_UNIT_OPTIONS, GPU_OPTIONS, KIND_OPTIONS, TPU_OPTIONS


@dataclasses.dataclass(frozen=True)
class Chip:
    """The attributes of a device that mesh_utils reads."""

    id: int
    slice_index: int
    coords: tuple[int, int, int]
    core_on_chip: int = 0
    process_index: int = 0
    platform: str = "tpu"
    device_kind: str = "TPU v4"
    client: object = None


def slices(count, side=2, **changes):
    """Return the chips of slices of `side` x `side` chips."""
    chips = []
    for slice_index in range(count):
        for y, x in itertools.product(range(side), range(side)):
            chip = Chip(len(chips), slice_index, (x, y, 0), **changes)
            chips.append(chip)
    return chips


@pytest.mark.parametrize(
    ("num_slices", "config", "shape"),
    [
        # The data axis takes the remaining chips.
        (1, ShardingConfig(num_replicas=2), (2, 2, 1)),
        (
            1,
            ShardingConfig(num_replicas=2, num_model_shards=2),
            (2, 1, 2),
        ),
        (2, ShardingConfig(), (2, 4, 1)),
        (4, ShardingConfig(num_model_shards=2), (4, 2, 2)),
        (2, ShardingConfig(num_replicas=4), (4, 2, 1)),
        (2, ShardingConfig(num_replicas=1), (1, 8, 1)),
    ],
)
def test_slices_are_never_mixed_along_model_and_outermost_elsewhere(
    num_slices,
    config,
    shape,
):
    chips = slices(num_slices)

    mesh = build_mesh(chips, config)
    slice_indices = np.vectorize(lambda chip: chip.slice_index)(mesh.devices)

    assert mesh.devices.shape == shape
    ids = sorted(chip.id for chip in mesh.devices.flat)
    assert ids == list(range(len(chips)))
    # One slice holds all shards of a model.
    assert (slice_indices == slice_indices[:, :, :1]).all()
    # The chips of a slice are neighbours in the batch.
    assert (np.diff(slice_indices.reshape(-1)) >= 0).all()


def test_options_are_those_of_the_chip():
    v4 = build_mesh(slices(1))
    v5e = build_mesh(slices(1, device_kind="TPU v5 lite"))

    assert compiler_options(v5e) == TPU_OPTIONS | KIND_OPTIONS["TPU v5 lite"]
    assert compiler_options(v4) == TPU_OPTIONS


@pytest.mark.parametrize(("has_units", "expected"), [(True, CPU_UNIT_OPTIONS), (False, None)])
def test_residual_units_on_cpus_have_options(has_units, expected):
    mesh = build_mesh(jax.devices("cpu"))

    assert compiler_options(mesh, has_units) == expected


@pytest.fixture
def gpus():
    """Two nodes of four GPUs."""
    return slices(
        2,
        platform="gpu",
        device_kind="NVIDIA H100 80GB HBM3",
    )


def test_nodes_of_gpus_are_replicas_and_have_options_of_their_own(gpus):
    mesh = build_mesh(gpus)

    assert mesh.devices.shape == (2, 4, 1)
    assert compiler_options(mesh) == GPU_OPTIONS


def test_the_shards_of_a_model_divide_a_slice(gpus):
    message = "num_model_shards=8: must divide the 4 devices of a slice"

    with pytest.raises(ValueError, match=message):
        build_mesh(gpus, ShardingConfig(num_model_shards=8))


def test_replicas_divide_the_slices():
    message = "num_replicas=4: must divide the 6 slices"

    with pytest.raises(ValueError, match=message):
        build_mesh(slices(6), ShardingConfig(num_replicas=4))
