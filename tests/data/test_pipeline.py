"""Threads and workers change nothing but the speed; an error or a dead worker is never a shorter stream."""

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
    """Returns a function from what differs from 9 steps of 12 random images to a stream."""

    def make(source=random_source, start_step=0, num_steps=STEPS, **fields):
        transform = TrainTransform(
            make_config(randaugment_layers=1, randaugment_magnitude=5, **fields)
        )
        return TrainStream(source, transform, 7, BATCH, np.arange(BATCH), start_step, num_steps)

    return make


@pytest.fixture
def evaluate(random_source, evaluation_transform):
    """Returns a function from a source to a stream of its records, four at a time."""
    return lambda source=random_source: EvaluationStream(
        source,
        evaluation_transform(),
        4,
        np.arange(4),
    )


def exhaust(batches):
    collections.deque(batches, maxlen=0)


def assert_comes_through(batches, stream):
    for i, batch in enumerate(batches):
        assert all(
            np.array_equal(array, truth) for array, truth in zip(batch, stream[i], strict=True)
        )


@pytest.mark.parametrize(
    ("threads", "start_step"),
    [
        (1, 0),
        (4, 0),
        (1, STEPS),
    ],
)
def test_the_stream_comes_through_in_order(train, evaluate, threads, start_step):
    for stream in (train(start_step=start_step), evaluate()):
        with open_batches(stream, Parallelism(0, threads)) as batches:
            found = list(batches)

        assert len(found) == len(stream)
        assert_comes_through(found, stream)


def test_memory_of_batches_is_used_again_but_not_while_anything_refers_to_it(
    train, broken, monkeypatch
):
    stream = train(broken, num_steps=30)
    shapes = []
    empty = np.empty
    monkeypatch.setattr(
        np,
        "empty",
        lambda shape, *rest: shapes.append(shape) or empty(shape, *rest),
    )

    with open_batches(stream) as batches:
        part = (slice(None), slice(2, None), slice(None, None, -1))
        referring = [
            lambda image: None,
            lambda image: image[part],
            lambda image: jax.device_put(image)[part],
        ]
        kept = [referring[i % 3](batch.image) for i, batch in enumerate(batches)]

    assert shapes.count((BATCH, 8, 8, 3)) < 30

    for i, pixels in enumerate(kept):
        assert pixels is None or np.array_equal(pixels, stream[i].image[part])


@pytest.mark.slow
def test_workers_deliver_the_same_and_end_with_an_error_of_the_run(train, tmp_path, monkeypatch):
    (tmp_path / "own.py").write_text(
        "darker = lambda image, rng: image // 2"
    )  # cannot be pickled by itself
    monkeypatch.syspath_prepend(tmp_path)
    stream = train(start_step=4, num_steps=10**6, augmentations=("own:darker",))
    before = set(multiprocessing.active_children())
    started = set()

    def run():
        with open_batches(stream, Parallelism(2, 2)) as batches:
            assert_comes_through(itertools.islice(batches, 6), stream)

            started.update(set(multiprocessing.active_children()) - before)
            raise KeyError("on purpose")

    with pytest.raises(KeyError):
        run()

    assert [child.is_alive() for child in started] == [False, False]


def test_steps_outside_the_run_and_no_records(train, evaluate):
    for start_step in (STEPS + 1, -1):
        with pytest.raises(ValueError, match="give 0 to 9"):
            train(start_step=start_step)

    empty = MemorySource(np.zeros((0, 8, 8, 3), np.uint8), np.zeros(0, np.int32), ("a", "b"))
    for stream in (train(empty), evaluate(empty)):
        with pytest.raises(ValueError, match="no records"), open_batches(stream):
            pass


def test_unreadable_images_count_once_and_too_many_stop_the_run(train, broken, caplog):
    log = UnreadableLog(broken, max_unreadable=2)
    with open_batches(train(broken)) as batches:
        assert len(list(log.watch(batches))) == STEPS

    assert sorted(log.met) == [5, 8]

    expected = ["file-5.jpg", "file-8.jpg"]
    assert sorted(record.getMessage().rpartition(" ")[2] for record in caplog.records) == expected

    with (
        open_batches(train(broken)) as batches,
        rejects("max_unreadable=1", r"file-\d.jpg \(.*format.*\), file-\d.jpg"),
    ):
        exhaust(UnreadableLog(broken, max_unreadable=1).watch(batches))

    batch = HostBatch(None, None, np.zeros(13, np.float32), np.r_[np.arange(12), -1])
    with rejects("max_unreadable", r"file-2.jpg \([^)]*\) and 9 more"):
        UnreadableLog(broken, max_unreadable=0).update(batch)


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


def test_a_premature_end_is_fatal(evaluate, broken):
    """As when grain ends a stream early because a worker died: it takes a StopIteration of the source for the end."""
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
        started = [child for child in multiprocessing.active_children() if child not in before]

        assert len(started) == 2

        os.kill(started[0].pid, signal.SIGKILL)
        with pytest.raises(LostWorker, match="A data worker died"):
            exhaust(batches)

    assert not [child for child in started if child.is_alive()]


@pytest.mark.slow
def test_signals_to_workers_that_start_end_none(train):
    """As from a terminal's Ctrl-C, or a launcher that sends SIGTERM to the process group."""
    before = set(multiprocessing.active_children())
    is_done = threading.Event()
    sent = collections.Counter()

    def hammer():
        while not is_done.wait(0.001):
            for child in set(multiprocessing.active_children()) - before:
                for number in (signal.SIGTERM, signal.SIGINT):
                    os.kill(child.pid, number)
                    sent[child.pid] += 1

    stream = train(num_steps=10**6)
    thread = threading.Thread(target=hammer)

    with open_batches(stream, Parallelism(2, 1)) as batches:
        thread.start()
        try:
            assert_comes_through(itertools.islice(batches, 4), stream)
        finally:
            is_done.set()
            thread.join()

    assert len(sent) == 2
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()).isdisjoint({signal.SIGTERM, signal.SIGINT})
