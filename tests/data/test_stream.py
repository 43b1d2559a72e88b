"""The stream is a pure function of (seed, step, global batch), for any hosts and restarts."""

import collections
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vit_jax.config.schema import InputConfig
from vit_jax.data import order
from vit_jax.data.decoding import images
from vit_jax.data.kinds.in_memory import MemorySource
from vit_jax.data.order import UniformOrder
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
IMAGES = np.random.default_rng(0).integers(
    256,
    size=(RECORDS, 10, 12, 3),
    dtype=np.uint8,
)
SOURCE = MemorySource(
    IMAGES,
    np.arange(RECORDS) % 5,
    tuple("abcde"),
)


def make_stream(source=SOURCE, batch=BATCH, rows=None, **options):
    """Return the training stream of a host that has these rows of a batch, all by default."""
    if rows is None:
        rows = range(batch)
    options = {"start_step": 0, "num_steps": STEPS} | options

    return TrainStream(
        source,
        TRAIN,
        seed=7,
        global_batch=batch,
        global_rows=np.asarray(rows),
        **options,
    )


def read_all(stream):
    return [stream[i] for i in range(len(stream))]


def make_blank_source(labels, num_classes):
    """Return a source of black images with these labels."""
    shape = (len(labels), 1, 1, 3)
    pixels = np.zeros(shape, np.uint8)
    names = tuple(map(str, range(num_classes)))
    return MemorySource(pixels, labels, names)


def select_rows(batches, rows):
    """Return these rows of each batch."""
    selected = []
    for batch in batches:
        arrays = [array[rows] for array in batch]
        selected.append(HostBatch(*arrays))
    return selected


def concatenate(batches, field):
    """Return a field of all batches as one array."""
    return np.concatenate([getattr(batch, field) for batch in batches])


def concatenate_indices(batches):
    return concatenate(batches, "record_index")


def count_different(rows):
    """Return the number of different rows."""
    return len(np.unique(rows, axis=0))


def assert_same(found, expected):
    for one, other in zip(found, expected, strict=True):
        for array, truth in zip(one, other, strict=True):
            assert array.dtype == truth.dtype
            assert np.array_equal(array, truth)


@pytest.fixture(scope="module")
def batches():
    return read_all(make_stream())


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
    stream = make_stream(rows=rows, num_steps=9)

    expected = select_rows(batches[:9], rows)
    assert_same(read_all(stream), expected)


@pytest.mark.parametrize("start_step", [1, STEPS - 1, STEPS])
def test_same_after_a_restart(batches, start_step):
    stream = make_stream(start_step=start_step)

    assert_same(read_all(stream), batches[start_step:])


def test_late_steps_cost_nothing():
    stream = make_stream(start_step=10**9, num_steps=10**9 + 1)

    found = read_all(stream)

    assert len(found) == 1


def test_every_epoch_holds_every_record_once_in_a_new_order(batches):
    epochs = concatenate_indices(batches).reshape(-1, RECORDS)

    assert len(epochs) == BATCH
    assert count_different(epochs) == len(epochs)
    for epoch in epochs:
        assert sorted(epoch) == list(range(RECORDS))


def test_batches_have_labels_a_mask_and_new_augmentation_in_every_epoch(batches):
    images_of_record = collections.defaultdict(list)
    for batch in batches:
        assert batch.image.shape == (BATCH, 8, 8, 3)
        assert batch.image.dtype == np.uint8
        assert batch.label.dtype == np.int32
        assert batch.mask.dtype == np.float32
        assert batch.record_index.dtype == np.int64

        expected = SOURCE.labels[batch.record_index]
        assert np.array_equal(batch.label, expected)
        assert batch.mask.tolist() == [1.0] * BATCH

        for index, image in zip(batch.record_index, batch.image, strict=True):
            images_of_record[index].append(image.tobytes())

    for augmented in images_of_record.values():
        num_different = len(set(augmented))
        assert num_different > len(augmented) // 2


@pytest.fixture(scope="module")
def uneven():
    """A source with 20, 0, 3 and 14 images of its four classes."""
    labels = np.repeat([0, 2, 3], [20, 3, 14])
    return MemorySource(IMAGES, labels, tuple("abcd"))


@pytest.fixture(scope="module")
def balanced(uneven):
    """Return 30 balanced batches of the source of uneven classes: 120 turns of three classes."""
    stream = make_stream(
        uneven,
        num_steps=30,
        is_balanced=True,
    )
    return read_all(stream)


def test_balanced_classes_come_equally_often(uneven, balanced):
    """Each turn has every class that has images once, in any order."""
    index = concatenate_indices(balanced)
    turns = uneven.labels[index].reshape(-1, 3)

    for classes in turns:
        assert sorted(classes) == [0, 2, 3]
    assert len(turns) == 120
    assert count_different(turns) == 6


@pytest.mark.parametrize(
    ("label", "size"),
    [
        (0, 20),
        (2, 3),
        (3, 14),
    ],
)
def test_balanced_records_of_a_class_come_equally_often(
    uneven,
    balanced,
    label,
    size,
):
    """Each pass over a class has all its records once, mostly in a new order."""
    index = concatenate_indices(balanced)
    records_of_class = index[uneven.labels[index] == label]
    num_complete = 120 // size * size
    passes = records_of_class[:num_complete].reshape(-1, size)

    expected = np.flatnonzero(uneven.labels == label)
    for records in passes:
        assert np.array_equal(np.sort(records), expected)

    assert count_different(passes) > min(len(passes), size) // 2


def test_balanced_batches_are_augmented_anew_and_pure_in_the_position(uneven, balanced):
    """A record of a rare class comes often; any rows and any restart give the same batches."""
    rare = []
    for batch in balanced:
        for image in batch.image[batch.record_index == 20]:
            rare.append(image.tobytes())

    assert len(rare) == 40
    assert len(set(rare)) > 30

    rows = [5, 0, 11]
    stream = make_stream(
        uneven,
        rows=rows,
        start_step=9,
        num_steps=30,
        is_balanced=True,
    )
    expected = select_rows(balanced[9:], rows)

    assert_same(read_all(stream), expected)


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
def test_balanced_sampling_costs_little_for_any_number_of_classes(
    num_classes,
    size,
    monkeypatch,
):
    """grain's `index_shuffle`, which is slow for few elements, shuffles many elements only."""
    shuffled = []
    shuffle = order.index_shuffle

    def record_shuffle(*arguments, **options):
        shuffled.append(options)
        return shuffle(*arguments, **options)

    monkeypatch.setattr(order, "index_shuffle", record_shuffle)
    classes = np.arange(num_classes)
    labels = np.repeat(classes, size)
    turns = min(size, 20)
    stream = make_stream(
        make_blank_source(labels, num_classes),
        batch=num_classes,
        num_steps=turns,
        is_balanced=True,
    )

    batches = read_all(stream)

    index = concatenate_indices(batches)
    num_different = len(np.unique(index))

    assert num_different == index.size, "each record once in one pass over its class"
    for batch in batches:
        assert np.array_equal(np.sort(batch.label), classes)
    for options in shuffled:
        assert options["max_index"] >= 1023
    assert len(shuffled) <= 2 * 2 * index.size


def test_balanced_orders_of_classes_and_of_the_first_class_differ():
    """There are as many classes as images of the first class, enough to tell the orders apart."""
    labels = np.repeat(np.arange(30), 30)
    source = make_blank_source(labels, 30)

    stream = make_stream(
        source,
        batch=900,
        num_steps=1,
        is_balanced=True,
    )
    batch = stream[0]

    order_of_classes = batch.label[:30]
    order_of_records = batch.record_index[batch.label == 0]

    assert not np.array_equal(order_of_classes, order_of_records)


def list_order(seed, epoch, num_records, length=None):
    """Return the first records of an epoch, all by default."""
    if length is None:
        length = num_records

    uniform = UniformOrder(seed, num_records)
    records = []
    for offset in range(length):
        record, found_epoch = uniform.find(epoch * num_records + offset)
        assert found_epoch == epoch
        records.append(record)
    return records


@settings(derandomize=True, deadline=None, max_examples=15)
@given(
    num_records=st.integers(1, 200),
    seed=st.integers(0, 2**32 - 1),
)
def test_orders_are_permutations(num_records, seed):
    """Orders differ by seed and by epoch, also where seed + epoch is equal."""
    orders = [
        list_order(seed, 0, num_records),
        list_order(seed, 1, num_records),
        list_order(seed + 1, 0, num_records),
    ]

    for records in orders:
        assert sorted(records) == list(range(num_records))
    if num_records >= 10:
        assert count_different(orders) == 3


def test_an_order_that_grain_gets_wrong():
    """grain 0.2.18 repeats a record where the last index is 65,536.

    Orders of this length are not stored.
    """
    records = list_order(3, 1, 65_537)

    assert sorted(records) == list(range(65_537))

    next_epoch = list_order(3, 0, 65_537, length=9)
    next_seed = list_order(4, 0, 65_537, length=9)
    beginnings = [records[:9], next_epoch, next_seed]

    assert count_different(beginnings) == 3


@settings(derandomize=True, deadline=None, max_examples=40)
@given(
    global_batch=st.integers(1, 50),
    num_hosts=st.integers(1, 5),
)
def test_evaluation_holds_every_record_exactly_once(global_batch, num_hosts):
    """Padding is masked, has no record and black pixels."""
    num_hosts = min(num_hosts, global_batch)
    parts = np.array_split(np.arange(global_batch), num_hosts)
    num_batches = math.ceil(RECORDS / global_batch)

    batches = []
    for rows in parts:
        stream = EvaluationStream(
            SOURCE,
            EVALUATION,
            global_batch,
            rows,
        )
        assert len(stream) == num_batches
        batches += read_all(stream)

    is_record = concatenate(batches, "mask") == 1
    index = concatenate_indices(batches)
    records = index[is_record]
    labels = concatenate(batches, "label")[is_record]
    padding = concatenate(batches, "image")[~is_record]

    assert sorted(records) == list(range(RECORDS))
    assert np.array_equal(labels, SOURCE.labels[records])
    assert np.all(index[~is_record] == -1)
    assert not padding.any()


@pytest.mark.parametrize(
    "stream",
    [
        make_stream(batch=5, num_steps=1),
        EvaluationStream(SOURCE, EVALUATION, 5, np.arange(5)),
    ],
    ids=["train", "evaluation"],
)
def test_all_rows_are_read_before_the_first_is_decoded(stream, monkeypatch):
    """Alternating reads and decodes takes Python four times as long (LOG of bench, Input)."""
    calls = []
    read = MemorySource.image_of
    decode = images.decode

    def record_read(*arguments):
        calls.append("read")
        return read(*arguments)

    def record_decode(*arguments):
        calls.append("decode")
        return decode(*arguments)

    monkeypatch.setattr(MemorySource, "image_of", record_read)
    monkeypatch.setattr(images, "decode", record_decode)

    stream[0]

    assert calls == ["read"] * 5 + ["decode"] * 5


@pytest.mark.parametrize("is_balanced", [False, True])
def test_repeated_augmentation(is_balanced):
    """A batch has each chosen record three times, differently augmented."""
    options = {"is_balanced": is_balanced, "repeats": 3}
    stream = make_stream(batch=BATCH // 3, is_balanced=is_balanced)
    once = read_all(stream)
    repeated = read_all(make_stream(**options))

    all_images = set()
    for batch, single in zip(repeated, once, strict=True):
        copies = batch.record_index.reshape(3, -1)
        for indices in copies:
            assert np.array_equal(indices, single.record_index), "neighbours are different records"

        images_of_copies = batch.image.reshape(3, BATCH // 3, -1)
        first, second, _ = images_of_copies
        is_equal = (first == second).all(axis=1)
        assert not is_equal.any()

        for image in batch.image:
            all_images.add(image.tobytes())

    assert len(all_images) > 0.99 * BATCH * STEPS

    resumed = make_stream(start_step=5, **options)
    assert_same(read_all(resumed), repeated[5:])

    rows = np.arange(5, 9)
    of_host = make_stream(rows=rows, **options)
    expected = select_rows(repeated, rows)

    assert_same(read_all(of_host), expected)


def test_copies_of_a_batch_that_repeats_do_not_divide_go_on_in_the_next():
    """Three batches of 4 hold four records three times; any row alone is the same."""
    stream = make_stream(batch=4, repeats=3)
    a, b, c, d = list_order(7, 0, len(SOURCE), length=4)

    expected = [
        [a, b, a, a],
        [b, c, b, c],
        [c, d, d, d],
    ]
    for step, records in enumerate(expected):
        assert stream[step].record_index.tolist() == records

    after_one_batch = make_stream(
        batch=4,
        start_step=5,
        repeats=3,
        first_sample=4,
    )
    assert_same([after_one_batch[0]], [stream[1]])

    third_row = make_stream(
        batch=4,
        rows=[2],
        start_step=1,
        repeats=3,
    )
    expected = select_rows([stream[1]], [2])

    assert_same([third_row[0]], expected)


def test_unreadable_images_are_masked_and_keep_their_place(broken):
    stream = make_stream(broken, num_steps=9)

    for batch in read_all(stream):
        is_unreadable = np.isin(batch.record_index, [5, 8])

        unreadable_images = batch.image[is_unreadable]
        labels = broken.labels[batch.record_index]
        assert np.array_equal(batch.mask == 0, is_unreadable)
        assert not unreadable_images.any()
        assert np.array_equal(batch.label, labels)


def test_other_errors_are_not_swallowed():
    wrong = MemorySource(
        SOURCE.images,
        SOURCE.labels,
        SOURCE.class_names,
    )
    wrong.images = IMAGES.astype(np.float32)
    stream = make_stream(wrong)

    with pytest.raises(ValueError, match="uint8"):
        read_all(stream)
