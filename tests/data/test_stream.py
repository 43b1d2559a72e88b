"""The stream is a pure function of (seed, step, global batch): the same for any hosts and restarts."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vit_jax.config.schema import InputConfig
from vit_jax.data import order
from vit_jax.data.decoding import images
from vit_jax.data.kinds.in_memory import MemorySource
from vit_jax.data.order import pick_record
from vit_jax.data.stream import EvaluationStream, HostBatch, TrainStream
from vit_jax.data.transforms import EvaluationTransform, TrainTransform

CONFIG = InputConfig(
    train_split="train",
    test_split="test",
    image_size=(8, 8),
    randaugment_layers=1,
)
TRAIN = TrainTransform(CONFIG)
EVALUATION = EvaluationTransform((8, 8), "direct", 1.0)
RECORDS = 37
BATCH = 12
STEPS = 37  # twelve epochs, whose ends are inside batches
IMAGES = np.random.default_rng(0).integers(256, size=(RECORDS, 10, 12, 3), dtype=np.uint8)
SOURCE = MemorySource(IMAGES, np.arange(RECORDS) % 5, tuple("abcde"))


def run(*, seed=7, rows=None, start_step=0, num_steps=STEPS, source=SOURCE):
    rows = np.arange(BATCH) if rows is None else np.asarray(rows)
    batches = TrainStream(source, TRAIN, seed, BATCH, rows, start_step, num_steps)

    return [batches[i] for i in range(len(batches))]


@pytest.fixture(scope="module")
def batches():
    return run()


def assert_same(found, expected):
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        for array, truth in zip(one, other, strict=True):
            assert array.dtype == truth.dtype
            assert np.array_equal(array, truth)


@pytest.mark.parametrize(
    "rows",
    [
        np.arange(4, 8),
        np.arange(1, BATCH, 2),
        [5, 0, 11],
    ],
    ids=["block", "strided", "any"],
)
def test_same_for_any_hosts(batches, rows):
    assert_same(
        run(rows=rows, num_steps=9),
        [HostBatch(*(array[rows] for array in batch)) for batch in batches[:9]],
    )


@pytest.mark.parametrize("start_step", [1, STEPS - 1, STEPS])
def test_same_after_a_restart(batches, start_step):
    assert_same(run(start_step=start_step), batches[start_step:])
    assert len(run(start_step=10**9, num_steps=10**9 + 1)) == 1  # far steps cost nothing


def test_every_epoch_holds_every_record_once_in_a_new_order_and_augmented_anew(batches):
    epochs = np.concatenate([batch.record_index for batch in batches]).reshape(-1, RECORDS)

    assert np.array_equal(np.sort(epochs, axis=1), np.tile(np.arange(RECORDS), (len(epochs), 1)))
    assert len({epoch.tobytes() for epoch in epochs}) == len(epochs) == BATCH

    seen = {}
    for batch in batches:
        assert batch.image.shape == (BATCH, 8, 8, 3)
        assert [array.dtype for array in batch] == [np.uint8, np.int32, np.float32, np.int64]
        assert np.array_equal(batch.label, SOURCE.labels[batch.record_index])
        assert batch.mask.tolist() == [1.0] * BATCH

        for index, image in zip(batch.record_index.tolist(), batch.image, strict=True):
            seen.setdefault(index, []).append(image.tobytes())

    assert all(len(set(images)) > len(images) // 2 for images in seen.values())


def test_balanced_classes_come_equally_often_and_so_do_the_records_of_each():
    """Three of one class, none of another: pure in the position, as any order."""
    labels = np.array([0] * 20 + [2] * 3 + [3] * 14)
    source = MemorySource(IMAGES, labels, tuple("abcd"))

    def balanced(rows, start_step, num_steps):
        stream = TrainStream(
            source,
            TRAIN,
            7,
            BATCH,
            np.asarray(rows),
            start_step,
            num_steps,
            is_balanced=True,
        )
        return [stream[i] for i in range(len(stream))]

    batches = balanced(range(BATCH), 0, 30)
    index = np.concatenate([batch.record_index for batch in batches])
    turns = labels[index].reshape(-1, 3)

    assert np.array_equal(np.sort(turns, axis=1), np.tile([0, 2, 3], (120, 1)))
    assert len({*map(tuple, turns.tolist())}) == 6

    for label, size in ((0, 20), (2, 3), (3, 14)):
        epochs = index[labels[index] == label][: 120 // size * size].reshape(-1, size)

        assert np.array_equal(
            np.sort(epochs, axis=1),
            np.tile(np.flatnonzero(labels == label), (len(epochs), 1)),
        )
        assert len({*map(tuple, epochs.tolist())}) > min(len(epochs), size) // 2

    rare = [
        batch.image[i].tobytes()
        for batch in batches
        for i in np.flatnonzero(batch.record_index == 20)
    ]

    assert len(rare) == 40
    assert len({*rare}) > 30, "augmented anew each time"
    assert_same(
        balanced([5, 0, 11], 9, 30),
        [HostBatch(*(array[[5, 0, 11]] for array in one)) for one in batches[9:]],
    )


@pytest.mark.parametrize(
    ("num_classes", "size"),
    [
        (1, 3),
        (2, 40),
        (10, 4),
        (300, 5),
        (1030, 2),
        (2, 1100),
    ],
)
def test_balanced_sampling_costs_little_for_any_number_of_classes(num_classes, size, monkeypatch):
    """grain's `index_shuffle`, which is slow for few elements, shuffles many elements only."""
    shuffled = []
    shuffle = order.index_shuffle
    monkeypatch.setattr(
        order,
        "index_shuffle",
        lambda *a, **options: shuffled.append(options) or shuffle(*a, **options),
    )
    labels = np.repeat(np.arange(num_classes), size)
    source = MemorySource(
        np.zeros((len(labels), 1, 1, 3), np.uint8),
        labels,
        tuple(map(str, range(num_classes))),
    )
    turns = min(size, 20)
    one = TrainStream(
        source,
        TRAIN,
        7,
        num_classes,
        np.arange(num_classes),
        0,
        turns,
        is_balanced=True,
    )
    index = np.stack([one[turn].record_index for turn in range(turns)])

    assert len(np.unique(index)) == index.size, "each record once in one pass over its class"
    assert np.array_equal(np.sort(labels[index]), np.tile(np.arange(num_classes), (turns, 1)))
    assert all(options["max_index"] >= 1023 for options in shuffled)
    assert len(shuffled) <= 2 * 2 * index.size


def test_balanced_orders_of_classes_and_of_the_first_class_differ():
    """With as many classes as images of the first one, and more than enough places to tell them apart."""
    source = MemorySource(
        np.zeros((900, 1, 1, 3), np.uint8),
        np.repeat(np.arange(30), 30),
        tuple(map(str, range(30))),
    )
    index = TrainStream(source, TRAIN, 7, 900, np.arange(900), 0, 1, is_balanced=True)[
        0
    ].record_index

    assert not np.array_equal(source.labels[index[:30]], index[source.labels[index] == 0])


@settings(derandomize=True, deadline=None, max_examples=15)
@given(num_records=st.integers(1, 200), seed=st.integers(0, 2**32 - 1))
def test_orders_are_permutations(num_records, seed):
    which = ((seed, 0), (seed, 1), (seed + 1, 0))  # seed + epoch would make the last two equal
    orders = [[pick_record(*one, i, num_records) for i in range(num_records)] for one in which]

    assert [sorted(order) for order in orders] == [list(range(num_records))] * 3
    assert num_records < 10 or len({*map(tuple, orders)}) == 3


def test_an_order_that_grain_gets_wrong():
    """grain 0.2.18 repeats a record where the last index is 65,536.

    So many records have no stored order.
    """
    order = [pick_record(3, 1, offset, 65_537) for offset in range(65_537)]

    assert sorted(order) == list(range(65_537))

    others = [
        [pick_record(*which, offset, 65_537) for offset in range(9)] for which in ((3, 0), (4, 0))
    ]

    assert len({*map(tuple, (order[:9], *others))}) == 3


@settings(derandomize=True, deadline=None, max_examples=40)
@given(global_batch=st.integers(1, 50), num_hosts=st.integers(1, 5))
def test_evaluation_holds_every_record_exactly_once(global_batch, num_hosts):
    parts = np.array_split(np.arange(global_batch), min(num_hosts, global_batch))
    streams = [EvaluationStream(SOURCE, EVALUATION, global_batch, rows) for rows in parts]

    assert {len(items) for items in streams} == {-(-RECORDS // global_batch)}

    found = [items[i] for items in streams for i in range(len(items))]
    index, mask, label = (
        np.concatenate([getattr(b, name) for b in found])
        for name in ("record_index", "mask", "label")
    )

    assert sorted(index[mask == 1]) == list(range(RECORDS))
    assert np.array_equal(label[mask == 1], SOURCE.labels[index[mask == 1]])
    assert np.all(index[mask == 0] == -1)
    assert not any(batch.image[batch.mask == 0].any() for batch in found)


def test_all_rows_are_read_before_the_first_is_decoded(monkeypatch):
    """In turns, Python takes four times as long (LOG of bench, Input)."""
    did = []
    read = MemorySource.image_of
    decode = images.decode
    monkeypatch.setattr(MemorySource, "image_of", lambda *given: did.append("read") or read(*given))
    monkeypatch.setattr(images, "decode", lambda *given: did.append("decode") or decode(*given))

    for items in (
        TrainStream(SOURCE, TRAIN, 7, 5, np.arange(5), 0, 1),
        EvaluationStream(SOURCE, EVALUATION, 5, np.arange(5)),
    ):
        did.clear()
        items[0]

        assert did == ["read"] * 5 + ["decode"] * 5


@pytest.mark.parametrize("is_balanced", [False, True])
def test_repeated_augmentation(is_balanced):
    """A batch has each chosen record three times, differently augmented."""

    def batches(repeats, rows=None, start_step=0):
        rows = np.arange(BATCH) if rows is None else rows
        size = BATCH if repeats == 3 else BATCH // 3
        stream = TrainStream(
            SOURCE,
            TRAIN,
            7,
            size,
            rows[:size],
            start_step,
            STEPS,
            is_balanced,
            repeats,
        )

        return [stream[i] for i in range(len(stream))]

    repeated = batches(3)
    once = batches(1)

    for batch, single in zip(repeated, once, strict=True):
        copies = batch.record_index.reshape(3, -1)

        assert np.array_equal(
            copies,
            np.tile(single.record_index, (3, 1)),
        )  # so neighbours are different records

        images = batch.image.reshape(3, BATCH // 3, -1)

        assert not (images[0] == images[1]).all(axis=1).any()

    assert (
        len({image.tobytes() for batch in repeated for image in batch.image}) > 0.99 * BATCH * STEPS
    )
    assert_same(batches(3, start_step=5), repeated[5:])
    assert_same(
        batches(3, rows=np.arange(5, 9)),
        [HostBatch(*(a[5:9] for a in batch)) for batch in repeated],
    )


def test_copies_of_a_batch_that_repeats_do_not_divide_go_on_in_the_next():
    """Three batches of 4 hold four records three times; any row alone is the same."""
    stream = TrainStream(SOURCE, TRAIN, 7, 4, np.arange(4), 0, STEPS, repeats=3)
    order = [pick_record(7, 0, offset, len(SOURCE)) for offset in range(4)]
    a, b, c, d = order

    assert [batch.record_index.tolist() for batch in (stream[0], stream[1], stream[2])] == [
        [a, b, a, a],
        [b, c, b, c],
        [c, d, d, d],
    ]

    shifted = TrainStream(SOURCE, TRAIN, 7, 4, np.arange(4), 5, STEPS, repeats=3, first_image=4)

    assert_same([shifted[0]], [stream[1]])  # as after one batch of 4
    assert_same(
        [TrainStream(SOURCE, TRAIN, 7, 4, np.array([2]), 1, STEPS, repeats=3)[0]],
        [HostBatch(*(x[2:3] for x in stream[1]))],
    )


def test_unreadable_images_are_masked_and_keep_their_place(broken):
    for batch in run(source=broken, num_steps=9):
        rubbish = np.isin(batch.record_index, [5, 8])

        assert np.array_equal(batch.mask == 0, rubbish)
        assert not batch.image[rubbish].any()
        assert np.array_equal(batch.label, broken.labels[batch.record_index])


def test_other_errors_are_not_swallowed():
    wrong = MemorySource(SOURCE.images, SOURCE.labels, SOURCE.class_names)
    wrong.images = wrong.images.astype(np.float32)

    with pytest.raises(ValueError, match="uint8"):
        run(source=wrong)
