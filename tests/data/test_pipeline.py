"""The stream is a function of (seed, step, global batch): the same for any workers, threads, hosts and restarts."""

import collections
import multiprocessing
import os
import signal

import numpy as np
import pytest

from vit_jax.data.memory import MemorySource
from vit_jax.data.pipeline import evaluation_batches, train_batches
from vit_jax.data.stream import HostBatch
from vit_jax.data.transforms import build_evaluation_transform, build_train_transform
from vit_jax.data.unreadable import UnreadableLog
from vit_jax.data.workers import Parallelism

STEPS, BATCH = 9, 12  # 108 examples of 37: three epochs, whose ends lie inside batches


@pytest.fixture
def train(random_source, make_config):
    """Returns a function that runs the pipeline and returns its batches."""
    transform = build_train_transform(make_config(randaugment_layers=1, randaugment_magnitude=5))

    def run(rows=None, workers=0, threads=1, start_step=0, seed=7, num_steps=STEPS, source=random_source):
        rows = np.arange(BATCH) if rows is None else rows
        arguments = {"seed": seed, "global_batch": BATCH, "start_step": start_step, "num_steps": num_steps}
        parallelism = Parallelism(workers, threads)
        with train_batches(source, transform, rows=rows, parallelism=parallelism, **arguments) as batches:
            return [HostBatch(*(array.copy() for array in batch)) for batch in batches]

    return run


def assert_same(found, expected):
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        for array, truth in zip(one, other, strict=True):
            assert array.dtype == truth.dtype
            assert np.array_equal(array, truth)


def test_batches_are_as_promised(train, random_source):
    batch = train()[0]
    assert batch.image.shape == (BATCH, 8, 8, 3)
    assert batch.image.dtype == np.uint8
    assert (batch.label.dtype, batch.mask.dtype, batch.record_index.dtype) == (np.int32, np.float32, np.int64)
    assert np.array_equal(batch.label, random_source.labels[batch.record_index])
    assert batch.mask.tolist() == [1.0] * BATCH


@pytest.mark.parametrize(("workers", "threads"), [(0, 1), (0, 4), (1, 1), (2, 1), (2, 2)])
def test_same_for_any_workers_and_threads(train, workers, threads):
    assert_same(train(workers=workers, threads=threads), train())


@pytest.mark.parametrize(
    "parts",
    [
        np.array_split(np.arange(BATCH), 3),
        [np.arange(h, BATCH, 2) for h in range(2)],
        [np.array([5, 0, 11]), np.array([4])],
    ],
    ids=["blocks", "strided", "any"],
)
def test_same_for_any_hosts(train, parts):
    whole = train()
    for rows in parts:
        assert_same(train(rows=rows), [HostBatch(*(array[rows] for array in batch)) for batch in whole])


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("start_step", [1, 4, STEPS - 1, STEPS])
def test_same_after_a_restart(train, workers, start_step):
    if workers and start_step != 4:
        pytest.skip("one start with workers is enough")
    assert_same(train(start_step=start_step, workers=workers), train()[start_step:])


def test_far_steps_cost_nothing(train):
    assert len(train(start_step=10**9, num_steps=10**9 + 1)) == 1


def test_every_epoch_holds_every_record_once_in_a_new_order(train, random_source):
    stream = np.concatenate([batch.record_index for batch in train(num_steps=3 * 37)])
    epochs = stream.reshape(-1, 37)
    assert np.array_equal(np.sort(epochs, axis=1), np.tile(np.arange(37), (len(epochs), 1)))
    assert len({epoch.tobytes() for epoch in epochs}) == len(epochs)


def test_augmentation_differs_between_epochs(train):
    batches = train(num_steps=3 * 37)
    seen = {}
    for batch in batches:
        for index, image in zip(batch.record_index, batch.image, strict=True):
            seen.setdefault(int(index), []).append(image.tobytes())
    assert all(len(set(images)) > len(images) // 2 for images in seen.values())


def test_seeds_give_streams_of_their_own(train):
    indices = [np.concatenate([b.record_index for b in train(seed=seed, num_steps=3 * 37)]) for seed in (0, 1)]
    assert not np.array_equal(*indices)
    assert not np.array_equal(indices[0][37:74], indices[1][:37])  # seed + epoch would make these equal


@pytest.mark.parametrize("fields", [{"seed": -1}, {"seed": 2**32}, {"start_step": STEPS + 1}, {"start_step": -1}])
def test_numbers_outside_their_range(train, fields):
    with pytest.raises(ValueError, match="give 0 to"):
        train(**fields)


@pytest.mark.parametrize("rows", [[], [BATCH], [-1], [[0]]])
def test_rows_outside_the_batch(train, rows):
    with pytest.raises(ValueError, match="give positions from 0 to 11"):
        train(rows=np.array(rows, np.int64))


def test_no_records(train):
    empty = MemorySource(np.zeros((0, 8, 8, 3), np.uint8), np.zeros(0, np.int32), ("a", "b"))
    with pytest.raises(ValueError, match="no records"):
        train(source=empty)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("global_batch", [1, 8, 37, 40])
@pytest.mark.parametrize("hosts", [1, 2, 5])
def test_evaluation_counts_every_record_once(random_source, make_config, workers, global_batch, hosts):
    if hosts > global_batch or (workers and (global_batch, hosts) != (8, 2)):
        pytest.skip("no rows for every host, or workers tried already")
    transform = build_evaluation_transform(make_config())
    seen, lengths = [], set()
    for rows in np.array_split(np.arange(global_batch), hosts):
        parallelism = Parallelism(workers, 1)
        arguments = {"global_batch": global_batch, "rows": rows, "parallelism": parallelism}
        with evaluation_batches(random_source, transform, **arguments) as batches:
            batches = list(batches)
        lengths.add(len(batches))
        for batch in batches:
            assert np.array_equal(batch.mask == 1, batch.record_index >= 0)
            assert not batch.image[batch.mask == 0].any()
            seen += batch.record_index[batch.mask == 1].tolist()
    assert sorted(seen) == list(range(37))
    assert lengths == {-(-37 // global_batch)}


class Broken(MemorySource):
    """A source whose record 5 holds rubbish, and whose record 6, if `fatal`, cannot be read at all."""

    fatal = False

    def __getitem__(self, index):
        if index == 6 and self.fatal:
            raise OSError("the disk is gone")
        record = super().__getitem__(index)
        return record._replace(image=b"rubbish") if index in (5, 8) else record

    def name_of(self, index):
        return f"file-{index}.jpg"


@pytest.fixture
def broken(random_source):
    return Broken(random_source.images, random_source.labels, random_source.class_names)


def test_unreadable_images_are_masked_and_keep_their_place(train, broken):
    for batch in train(source=broken):
        rubbish = np.isin(batch.record_index, [5, 8])
        assert np.array_equal(batch.mask == 0, rubbish)
        assert not batch.image[rubbish].any()
        assert np.array_equal(batch.label, broken.labels[batch.record_index])


def test_unreadable_images_count_once(train, broken, caplog):
    log = UnreadableLog(broken, max_unreadable=2)
    for batch in train(source=broken):
        log.update(batch)
    assert log.count == 2
    assert sorted(record.getMessage().rpartition(" ")[2] for record in caplog.records) == ["file-5.jpg", "file-8.jpg"]


def test_too_many_unreadable_images_stop_the_run(train, broken):
    log = UnreadableLog(broken, max_unreadable=1)
    message = r"2 images cannot be decoded, max_unreadable is 1: file-\d.jpg, file-\d.jpg"
    with pytest.raises(ValueError, match=message):
        collections.deque(map(log.update, train(source=broken)), maxlen=0)


def test_only_ten_names_are_shown(broken):
    log = UnreadableLog(broken, max_unreadable=0)
    batch = HostBatch(None, None, np.zeros(13, np.float32), np.r_[np.arange(12), -1])
    with pytest.raises(ValueError, match=r"file-9.jpg and 2 more\."):
        log.update(batch)


def test_an_error_ends_the_iteration_for_good(broken, make_config):
    broken.fatal = True
    transform = build_evaluation_transform(make_config())
    with evaluation_batches(broken, transform, global_batch=4, rows=np.arange(4)) as batches:
        next(batches)
        with pytest.raises(OSError, match="the disk is gone"):
            next(batches)
        with pytest.raises(RuntimeError, match="failed before"):
            next(batches)


def test_closed_is_not_the_end(random_source, make_config):
    batches = evaluation_batches(
        random_source, build_evaluation_transform(make_config()), global_batch=4, rows=np.arange(4)
    )
    next(batches)
    batches.close()
    batches.close()
    with pytest.raises(RuntimeError, match="closed with 9 batches to come"):
        next(batches)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_killed_worker_is_an_error_and_no_end(random_source, make_config, workers):
    transform = build_train_transform(make_config())
    arguments = {"seed": 0, "global_batch": 4, "rows": np.arange(4), "start_step": 0, "num_steps": 10**6}
    before = set(multiprocessing.active_children())
    with train_batches(random_source, transform, parallelism=Parallelism(workers, 1), **arguments) as batches:
        next(batches)
        started = [child for child in multiprocessing.active_children() if child not in before]
        assert len(started) == workers
        os.kill(started[0].pid, signal.SIGKILL)
        with pytest.raises(RuntimeError, match="A data worker died"):
            collections.deque(batches, maxlen=0)
        with pytest.raises(RuntimeError, match="failed before"):
            next(batches)
    assert not [child for child in started if child.is_alive()]
