"""Threads and workers change nothing but the speed; errors and dead workers are never the end of the data."""

import collections
import itertools
import multiprocessing
import os
import signal

import numpy as np
import pytest

from vit_jax.data.memory import MemorySource
from vit_jax.data.pipeline import LostWorker, evaluation_batches, train_batches
from vit_jax.data.stream import EvaluationStream, HostBatch, TrainStream
from vit_jax.data.transforms import build_evaluation_transform, build_train_transform
from vit_jax.data.unreadable import UnreadableLog
from vit_jax.data.workers import Parallelism

STEPS, BATCH = 9, 12
ROWS = np.arange(BATCH)


@pytest.fixture
def train(random_source, make_config):
    """Returns a function that runs the pipeline and returns its batches."""
    transform = build_train_transform(make_config(randaugment_layers=1, randaugment_magnitude=5))

    def run(threads=1, start_step=0, source=random_source):
        numbers = {"seed": 7, "global_batch": BATCH, "rows": ROWS, "start_step": start_step, "num_steps": STEPS}
        stream = TrainStream(source, transform, **numbers)
        with train_batches(source, transform, parallelism=Parallelism(0, threads), **numbers) as batches:
            return [HostBatch(*(array.copy() for array in batch)) for batch in batches], stream

    return run


@pytest.fixture
def evaluate(random_source, make_config):
    """Returns a function that starts an evaluation and returns its batches, four rows each."""
    transform = build_evaluation_transform(make_config())

    def start(source=random_source):
        return evaluation_batches(source, transform, global_batch=4, rows=np.arange(4))

    return start


def assert_comes_through(found, stream):
    for i, batch in enumerate(found):
        assert all(np.array_equal(array, truth) for array, truth in zip(batch, stream[i], strict=True))


@pytest.mark.parametrize(("threads", "start_step"), [(1, 0), (4, 0), (1, STEPS)])
def test_the_stream_comes_through_in_order(train, threads, start_step):
    found, stream = train(threads, start_step)
    assert len(found) == STEPS - start_step
    assert_comes_through(found, stream)


def test_workers_deliver_the_same_and_end_with_an_error_of_the_run(random_source, make_config, tmp_path, monkeypatch):
    (tmp_path / "own.py").write_text("darker = lambda image, rng: image // 2")  # cannot be pickled by itself
    monkeypatch.syspath_prepend(tmp_path)
    transform = build_train_transform(make_config(randaugment_layers=1, augmentations=("own:darker",)))
    numbers = {"seed": 7, "global_batch": BATCH, "rows": ROWS, "start_step": 4, "num_steps": 10**6}
    before, started = set(multiprocessing.active_children()), set()

    def run():
        with train_batches(random_source, transform, parallelism=Parallelism(2, 2), **numbers) as batches:
            assert_comes_through(itertools.islice(batches, 6), TrainStream(random_source, transform, **numbers))
            started.update(set(multiprocessing.active_children()) - before)
            raise KeyError("on purpose")

    with pytest.raises(KeyError):
        run()
    assert [child.is_alive() for child in started] == [False, False]


def test_evaluation_comes_through(evaluate, random_source, make_config):
    stream = EvaluationStream(random_source, build_evaluation_transform(make_config()), 4, np.arange(4))
    with evaluate() as batches:
        found = list(batches)
    assert [batch.record_index.tolist() for batch in found] == [stream[i].record_index.tolist() for i in range(10)]


@pytest.mark.parametrize("start_step", [STEPS + 1, -1])
def test_steps_outside_the_run(train, start_step):
    with pytest.raises(ValueError, match="give 0 to 9"):
        train(start_step=start_step)


def test_no_records(train, evaluate):
    empty = MemorySource(np.zeros((0, 8, 8, 3), np.uint8), np.zeros(0, np.int32), ("a", "b"))
    for start in (train, evaluate):
        with pytest.raises(ValueError, match="no records"):
            start(source=empty)


def test_unreadable_images_count_once(train, broken, caplog):
    log = UnreadableLog(broken, max_unreadable=2)
    assert len(list(log.watch(train(source=broken)[0]))) == STEPS
    assert log.count == 2
    assert sorted(record.getMessage().rpartition(" ")[2] for record in caplog.records) == ["file-5.jpg", "file-8.jpg"]


def test_too_many_unreadable_images_stop_the_run(train, broken):
    log = UnreadableLog(broken, max_unreadable=1)
    message = r"2 images cannot be decoded, max_unreadable is 1: file-\d.jpg, file-\d.jpg"
    with pytest.raises(ValueError, match=message):
        collections.deque(log.watch(train(source=broken)[0]), maxlen=0)


def test_only_ten_names_are_shown(broken):
    log = UnreadableLog(broken, max_unreadable=0)
    batch = HostBatch(None, None, np.zeros(13, np.float32), np.r_[np.arange(12), -1])
    with pytest.raises(ValueError, match=r"file-9.jpg and 2 more\."):
        log.update(batch)


def test_an_error_ends_the_iteration_for_good(broken, evaluate):
    broken.fatal = True
    with evaluate(broken) as batches:
        next(batches)
        with pytest.raises(OSError, match="the disk is gone"):
            next(batches)
        with pytest.raises(RuntimeError, match="failed before"):
            next(batches)


def test_closed_is_not_the_end(evaluate):
    batches = evaluate()
    next(batches)
    batches.close()
    batches.close()
    with pytest.raises(RuntimeError, match="closed with 9 batches to come"):
        next(batches)


def test_a_premature_end_is_fatal(evaluate):
    with evaluate() as batches:
        batches._remaining += 3  # as when grain ends a stream early because a worker died
        with pytest.raises(LostWorker, match="died with 3 batches to come"):
            collections.deque(batches, maxlen=0)


def test_a_killed_worker_is_an_error_and_no_end(random_source, make_config):
    arguments = {"seed": 0, "global_batch": 4, "rows": np.arange(4), "start_step": 0, "num_steps": 10**6}
    before = set(multiprocessing.active_children())
    transform = build_train_transform(make_config())
    with train_batches(random_source, transform, parallelism=Parallelism(2, 1), **arguments) as batches:
        next(batches)
        started = [child for child in multiprocessing.active_children() if child not in before]
        assert len(started) == 2
        os.kill(started[0].pid, signal.SIGKILL)
        with pytest.raises(LostWorker, match="A data worker died"):
            collections.deque(batches, maxlen=0)
        with pytest.raises(RuntimeError, match="failed before"):
            next(batches)
    assert not [child for child in started if child.is_alive()]
