"""Threads and workers change nothing but the speed; errors and dead workers shorten no stream."""

import collections
import itertools
import multiprocessing
import os
import signal
import threading

import jax
import numpy as np
import pytest

from tests.rejections import rejects
from vit_jax.data.kinds.in_memory import MemorySource
from vit_jax.data.pipeline import LostWorker, open_batches
from vit_jax.data.stream import EvaluationStream, HostBatch, TrainStream
from vit_jax.data.transforms import TrainTransform
from vit_jax.data.unreadable import UnreadableLog
from vit_jax.data.workers import Parallelism

STEPS = 9
BATCH = 12


@pytest.fixture
def train(random_source, make_config):
    """Return a function that makes a training stream: 9 steps of 12 random images by default."""

    def make(source=random_source, start_step=0, num_steps=STEPS, **fields):
        config = make_config(
            randaugment_layers=1,
            randaugment_magnitude=5,
            **fields,
        )
        return TrainStream(
            source,
            TrainTransform(config),
            seed=7,
            global_batch=BATCH,
            global_rows=np.arange(BATCH),
            start_step=start_step,
            num_steps=num_steps,
        )

    return make


@pytest.fixture
def evaluate(random_source, evaluation_transform):
    """Return a function from a source to a stream of its records, four at a time."""

    def make(source=random_source):
        return EvaluationStream(
            source,
            evaluation_transform(),
            4,
            np.arange(4),
        )

    return make


def exhaust(batches):
    collections.deque(batches, maxlen=0)


def assert_equal_batches(batches, stream):
    """Compare batches with the first ones of a stream."""
    for i, batch in enumerate(batches):
        for array, expected in zip(batch, stream[i], strict=True):
            assert np.array_equal(array, expected)


@pytest.mark.parametrize(
    ("threads", "start_step"),
    [
        (1, 0),
        (4, 0),
        (1, STEPS),
    ],
)
def test_the_stream_comes_through_in_order(
    train,
    evaluate,
    threads,
    start_step,
):
    for stream in (train(start_step=start_step), evaluate()):
        with open_batches(stream, Parallelism(0, threads)) as opened:
            batches = list(opened)

        assert len(batches) == len(stream)
        assert_equal_batches(batches, stream)


def test_memory_of_batches_is_used_again_but_not_while_anything_refers_to_it(
    train,
    broken,
    monkeypatch,
):
    """One of three batches is dropped, one has a view, and one an array on the device."""
    stream = train(broken, num_steps=30)
    shapes = []
    empty = np.empty

    def record_empty(shape, *rest):
        shapes.append(shape)
        return empty(shape, *rest)

    monkeypatch.setattr(np, "empty", record_empty)
    part = (
        slice(None),
        slice(2, None),
        slice(None, None, -1),
    )

    kept = {}
    with open_batches(stream) as batches:
        for i, batch in enumerate(batches):
            if i % 3 == 1:
                kept[i] = batch.image[part]
            elif i % 3 == 2:
                kept[i] = jax.device_put(batch.image)[part]

    assert shapes.count((BATCH, 8, 8, 3)) < 30
    assert len(kept) == 20
    for i, pixels in kept.items():
        assert np.array_equal(pixels, stream[i].image[part])


@pytest.mark.slow
def test_workers_deliver_the_same_and_end_with_an_error_of_the_run(
    train,
    tmp_path,
    monkeypatch,
):
    """The augmentation is a lambda, which cannot be pickled by itself."""
    (tmp_path / "own.py").write_text("darker = lambda image, rng: image // 2")
    monkeypatch.syspath_prepend(tmp_path)
    stream = train(
        start_step=4,
        num_steps=10**6,
        augmentations=("own:darker",),
    )
    before = set(multiprocessing.active_children())
    started = set()

    def run():
        with open_batches(stream, Parallelism(2, 2)) as batches:
            assert_equal_batches(itertools.islice(batches, 6), stream)
            started.update(set(multiprocessing.active_children()) - before)
            raise KeyError("on purpose")

    with pytest.raises(KeyError):
        run()

    assert len(started) == 2
    assert not any(child.is_alive() for child in started)


@pytest.mark.parametrize("start_step", [STEPS + 1, -1])
def test_steps_outside_the_run_are_rejected(train, start_step):
    with pytest.raises(ValueError, match="give 0 to 9"):
        train(start_step=start_step)


def test_sources_without_records_are_rejected(train, evaluate):
    empty = MemorySource(
        np.zeros((0, 8, 8, 3), np.uint8),
        np.zeros(0, np.int32),
        ("a", "b"),
    )

    for stream in (train(empty), evaluate(empty)):
        with pytest.raises(ValueError, match="no records"), open_batches(stream):
            pass


def test_unreadable_images_count_once(train, broken, caplog):
    log = UnreadableLog(broken, max_unreadable=2)

    with open_batches(train(broken)) as batches:
        num_batches = len(list(log.watch(batches)))

    assert num_batches == STEPS
    assert sorted(log.met) == [5, 8]
    named = [record.getMessage().rpartition(" ")[2] for record in caplog.records]
    assert sorted(named) == ["file-5.jpg", "file-8.jpg"]


def test_an_error_is_that_of_the_record(broken, evaluate):
    broken.fatal = OSError
    with open_batches(evaluate(broken)) as batches:
        next(batches)
        with pytest.raises(OSError, match="the disk is gone"):
            exhaust(batches)


def test_closed_is_not_the_end(evaluate):
    with open_batches(evaluate()) as batches:
        next(batches)

    with pytest.raises(ValueError, match="closed"):
        next(batches)


def test_too_many_unreadable_images_stop_the_run(train, broken):
    log = UnreadableLog(broken, max_unreadable=1)

    with (
        open_batches(train(broken)) as batches,
        rejects("max_unreadable=1", r"file-\d.jpg \(.*format.*\), file-\d.jpg"),
    ):
        exhaust(log.watch(batches))


def test_an_error_about_many_unreadable_images_names_some(broken):
    log = UnreadableLog(broken, max_unreadable=0)
    batch = HostBatch(
        None,
        None,
        np.zeros(13, np.float32),
        np.array([*range(12), -1]),
    )

    with rejects("max_unreadable", r"file-2.jpg \([^)]*\) and 9 more"):
        log.update(batch)


def test_a_premature_end_is_fatal(evaluate, broken):
    """grain takes a StopIteration of the source for the end of a stream, as when a worker dies."""
    broken.fatal = StopIteration

    with (
        open_batches(evaluate(broken)) as batches,
        pytest.raises(LostWorker, match="died with 9 batches to come"),
    ):
        exhaust(batches)


@pytest.mark.slow
def test_a_killed_worker_is_an_error_and_no_end(train):
    before = set(multiprocessing.active_children())

    with open_batches(train(num_steps=10**6), Parallelism(2, 1)) as batches:
        next(batches)
        started = set(multiprocessing.active_children()) - before
        assert len(started) == 2

        os.kill(next(iter(started)).pid, signal.SIGKILL)
        with pytest.raises(LostWorker, match="A data worker died"):
            exhaust(batches)

    assert not any(child.is_alive() for child in started)


@pytest.mark.slow
def test_signals_to_workers_that_start_end_none(train):
    """A terminal's Ctrl-C, or a launcher's SIGTERM, reaches the whole process group."""
    before = set(multiprocessing.active_children())
    is_done = threading.Event()
    sent = collections.Counter()

    def send_signals():
        while not is_done.wait(0.001):
            for child in set(multiprocessing.active_children()) - before:
                for number in (signal.SIGTERM, signal.SIGINT):
                    os.kill(child.pid, number)
                    sent[child.pid] += 1

    stream = train(num_steps=10**6)
    thread = threading.Thread(target=send_signals)
    with open_batches(stream, Parallelism(2, 1)) as batches:
        thread.start()
        try:
            assert_equal_batches(itertools.islice(batches, 4), stream)
        finally:
            is_done.set()
            thread.join()

    assert len(sent) == 2
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    assert blocked.isdisjoint({signal.SIGTERM, signal.SIGINT})
