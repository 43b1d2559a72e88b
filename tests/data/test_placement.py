"""Global arrays on eight devices, made from the rows that a process holds."""

import types

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from vit_jax.data import placement
from vit_jax.data.stream import HostBatch

BATCH = 16


@pytest.fixture(
    params=[
        PartitionSpec(("replica", "data")),
        PartitionSpec(("data",)),
        PartitionSpec(),
    ],
    ids=["both", "data", "whole"],
)
def sharding(request):
    """The batch over 8, 4 or 1 parts; further devices hold copies."""
    if jax.device_count() < 8:
        pytest.skip("needs eight devices")

    devices = np.array(jax.devices()[:8]).reshape(2, 4)
    mesh = jax.sharding.Mesh(devices, ("replica", "data"))
    return NamedSharding(mesh, request.param)


def test_arrays_are_global_and_equal(sharding):
    rng = np.random.default_rng(0)
    images = rng.integers(
        256,
        size=(BATCH, 4, 5, 3),
        dtype=np.uint8,
    )
    local = HostBatch(
        image=images,
        label=np.arange(BATCH, dtype=np.int32),
        mask=np.ones(BATCH, np.float32),
        record_index=np.arange(BATCH),
    )

    with jax.transfer_guard("disallow"):
        batch = placement.place(local, sharding, BATCH)

    arrays = [
        (batch.image_BHWC, local.image),
        (batch.label_B, local.label),
        (batch.mask_B, local.mask),
    ]
    for found, expected in arrays:
        assert found.dtype == expected.dtype
        assert found.shape == expected.shape
        assert found.sharding.is_equivalent_to(sharding, found.ndim)
        assert np.array_equal(found, expected)


def test_one_process_has_all_rows(sharding):
    rows = placement.find_local_rows(sharding, BATCH)

    assert rows.tolist() == list(range(BATCH))


@pytest.mark.parametrize(
    ("slices", "expected"),
    [
        ([slice(12, 16), slice(0, 4)], [*range(4), *range(12, 16)]),
        ([slice(4, 8), slice(4, 8)], range(4, 8)),
        ([slice(None)], range(16)),
    ],
)
def test_rows_of_one_process_of_several(slices, expected):
    """A process sees some devices of the sharding, and the slices of the batch that they hold."""
    indices = {}
    for device, part in enumerate(slices):
        indices[device] = (part,)
    sharding = types.SimpleNamespace(
        addressable_devices_indices_map=lambda shape: indices,
    )

    rows = placement.find_local_rows(sharding, BATCH)

    assert rows.tolist() == list(expected)


def test_prefetch_keeps_order_and_stays_ahead():
    placed = []

    def place(number):
        placed.append(number)
        return number * 10

    batches = placement.prefetch(range(5), place, size=2)

    assert next(batches) == 0
    assert placed == [0, 1]
    assert list(batches) == [10, 20, 30, 40]


@pytest.mark.parametrize(
    ("count", "options"),
    [
        (0, {}),
        (3, {"size": 9}),
    ],
)
def test_prefetch_of_few_batches(count, options):
    batches = placement.prefetch(
        range(count),
        lambda number: number,
        **options,
    )

    assert list(batches) == list(range(count))
