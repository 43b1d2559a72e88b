"""The stream is a pure function of (seed, step, global batch), and covers every epoch."""

import numpy as np
import pytest

from vit_jax.data import stream
from vit_jax.data.memory import MemorySource
from vit_jax.data.stream import EvaluationStream, TrainStream, record_at
from vit_jax.data.transforms import EvaluationTransform, TrainTransform

TRAIN = TrainTransform((8, 8), "inception", (0.05, 1.0), "tf", 0, True, 1, 10)
EVALUATION = EvaluationTransform((8, 8), "direct", 1.0)
NUM_RECORDS, GLOBAL_BATCH, NUM_STEPS = 37, 12, 10


def train_stream(source, *, seed=0, rows=None, start_step=0, global_batch=GLOBAL_BATCH, num_steps=NUM_STEPS):
    rows = np.arange(global_batch) if rows is None else np.asarray(rows)
    return TrainStream(source, TRAIN, seed, global_batch, rows, start_step, num_steps)


def batches_of(items):
    return [items[i] for i in range(len(items))]


def test_epochs_are_covered_across_batches(random_source):
    stream_ = train_stream(random_source, num_steps=2 * NUM_RECORDS)
    indices = np.concatenate([batch.record_index for batch in batches_of(stream_)])
    epochs = indices[: len(indices) // NUM_RECORDS * NUM_RECORDS].reshape(-1, NUM_RECORDS)
    assert len(epochs) == 24
    assert np.array_equal(np.sort(epochs, axis=1), np.tile(np.arange(NUM_RECORDS), (24, 1)))


@pytest.mark.parametrize("stored", [True, False])
@pytest.mark.parametrize("num_records", [1, 2, 3, 37, 257, 1000])
def test_orders_are_permutations(monkeypatch, stored, num_records):
    if not stored:
        monkeypatch.setattr(stream, "_FEW_RECORDS", 0)
    orders = [[record_at(0, epoch, i, num_records) for i in range(num_records)] for epoch in (0, 1)]
    assert [sorted(order) for order in orders] == [list(range(num_records))] * 2
    assert num_records < 10 or orders[0] != orders[1]


@pytest.mark.parametrize("global_batch", [1, 5, 12, 37, 50])
@pytest.mark.parametrize("num_hosts", [1, 2, 3])
def test_evaluation_holds_every_record_exactly_once(random_source, global_batch, num_hosts):
    if num_hosts > global_batch:
        num_hosts = 1
    parts = [np.arange(host, global_batch, num_hosts) for host in range(num_hosts)]
    hosts = [batches_of(EvaluationStream(random_source, EVALUATION, global_batch, rows)) for rows in parts]
    assert {len(batches) for batches in hosts} == {-(-NUM_RECORDS // global_batch)}
    everything = [batch for batches in hosts for batch in batches]
    index = np.concatenate([batch.record_index for batch in everything])
    mask = np.concatenate([batch.mask for batch in everything])
    assert sorted(index[mask == 1]) == list(range(NUM_RECORDS))
    assert np.all(index[mask == 0] == -1)
    assert all(np.all(batch.image[batch.mask == 0] == 0) for batch in everything)


def test_other_errors_are_not_swallowed(random_source):
    broken = MemorySource(random_source.images, random_source.labels, random_source.class_names)
    broken.images = broken.images.astype(np.float32)
    with pytest.raises(ValueError, match="uint8"):
        train_stream(broken)[0]


def test_an_order_that_grain_gets_wrong():
    """grain 0.2.18 repeats a record where the last index is 65,536."""
    order = [record_at(3, 1, offset, 65_537) for offset in range(65_537)]
    assert sorted(order) == list(range(65_537))
