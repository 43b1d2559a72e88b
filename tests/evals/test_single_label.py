"""Metrics of images with one label against NumPy: ties, padding, confusions, intervals and calibration."""

import contextlib
import csv
import dataclasses
import io
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vit_jax.arrays import Batch
from vit_jax.data.kinds.in_memory import MemorySource
from vit_jax.evals import ClassificationEvaluator, Split
from vit_jax.evals.calibration import BINS, Calibration
from vit_jax.evals.class_counts import predict
from vit_jax.evals.intervals import wilson_interval
from vit_jax.evals.label_map import Labelled, identity_map
from vit_jax.evals.runner import iterate_rows, keep_counted
from vit_jax.evals.single_label import ClassMetrics
from vit_jax.text.tables import to_csv


def make_batch(labels, mask, images=None):
    """A batch without pixels; the steps below take what stands in their place."""
    return Batch(
        image_BHWC=images,
        label_B=jnp.asarray(labels, jnp.int32),
        mask_B=jnp.asarray(mask, jnp.float32),
    )


def by_hand(logits, labels, mask):
    """Loss and places in double precision, one example after the other; the place of a class by sorting."""
    classes = logits.shape[1]
    sums = {"loss": 0.0, **{name: np.zeros(classes) for name in ("images_L", "top1_L", "top5_L")}}

    for row, label, counts in zip(logits.astype(np.float64), labels, mask, strict=True):
        if not counts:
            continue

        place = sorted(range(classes), key=lambda k: (-row[k], k)).index(label)
        sums["loss"] += np.log(np.sum(np.exp(row - row.max()))) + row.max() - row[label]
        sums["images_L"][label] += 1
        sums["top1_L"][label] += place == 0
        sums["top5_L"][label] += place < 5

    return sums


def sample(num_classes, rows=60, seed=0):
    """Logits of five values, so that most examples have ties; the last class has no images; some do not count."""
    rng = np.random.default_rng(seed)
    logits = rng.integers(-2, 3, (rows, num_classes)).astype(np.float32)

    return (
        logits,
        rng.integers(0, num_classes - 1, rows),
        rng.integers(0, 2, rows).astype(np.float32),
    )


def answers_of(batches, num_outputs, is_allowed=None, output=None):
    """Answers to batches that come with their logits in the place of the images."""
    allowed = jnp.ones(num_outputs, bool) if is_allowed is None else jnp.asarray(is_allowed)
    outputs = jnp.arange(num_outputs) if output is None else jnp.asarray(output)
    step = jax.jit(lambda scale, batch: predict(batch.image_BHWC * scale, batch, allowed, outputs))
    num_examples = sum(len(batch.mask_B) for batch in batches)
    parts = iterate_rows(
        lambda: contextlib.nullcontext(iter(batches)),
        step,
        jnp.float32(1),
        num_examples,
    )

    return list(map(keep_counted, parts))


def metrics_of(num_classes, **changes):
    """Metrics of as many classes as outputs, named by their numbers."""
    names = tuple(map(str, range(num_classes)))
    source = MemorySource(np.zeros((1, 1, 1, 3), np.uint8), np.zeros(1, int), names)

    return ClassMetrics(
        Labelled(source, "", [], dataclasses.replace(identity_map(names), **changes))
    )


def summed(batches, num_classes):
    metrics = metrics_of(num_classes)
    for rows in answers_of(batches, num_classes):
        metrics.add(rows)

    return metrics


@pytest.mark.parametrize("num_classes", [2, 4, 5, 6, 13])
def test_a_split_with_ties_in_batches_of_which_the_last_is_padded(num_classes):
    logits, labels, mask = sample(num_classes, rows=64)
    mask[60:] = 0
    parts = [slice(0, 20), slice(20, 40), slice(40, 64)]
    batches = [make_batch(labels[part], mask[part], jnp.asarray(logits[part])) for part in parts]
    found = summed(batches, num_classes)

    expected = by_hand(logits, labels, mask)
    for name in ("images_L", "top1_L", "top5_L"):
        assert np.array_equal(getattr(found.counts, name), expected[name]), name

    assert found.counts.loss == pytest.approx(expected["loss"], rel=1e-5)
    assert found.counts.images_L[-1] == 0

    values = found.values()
    images = int(mask.sum())
    top1 = int(found.counts.top1_L.sum())
    top5 = int(found.counts.top5_L.sum())

    assert values["accuracy"] == top1 / images
    assert values["accuracy_interval"] == [*wilson_interval(top1, images)]
    assert values["top5_accuracy"] == top5 / images
    assert values["top5_interval"] == [*wilson_interval(top5, images)]
    assert (values["top5_accuracy"] == 1) == (num_classes <= 5)

    records = np.concatenate([rows["record_B"] for rows in answers_of(batches, num_classes)])

    assert np.array_equal(records, np.flatnonzero(mask)), "the numbers are those in the split"


def test_answers_of_some_outputs_only_are_those_of_a_network_without_the_others():
    """Outputs 1, 4 and 6 are allowed; classes 0, 1, 2 of the data are outputs 4, 1, 6."""
    logits = np.random.default_rng(3).normal(size=(30, 8)).astype(np.float32)
    labels = np.random.default_rng(4).integers(0, 3, 30)
    output = np.array([4, 1, 6])
    is_allowed = np.isin(np.arange(8), output)
    (found,) = answers_of(
        [make_batch(labels, np.ones(30), jnp.asarray(logits))],
        8,
        is_allowed,
        output,
    )
    kept = logits[:, [1, 4, 6]].astype(np.float64)
    probabilities = np.exp(kept) / np.exp(kept).sum(axis=1, keepdims=True)
    order = np.argsort(-kept, axis=1)

    assert np.array_equal(found["class_BT"][:, :3], np.array([1, 4, 6])[order])
    assert found["probability_BT"][:, :3] == pytest.approx(
        np.take_along_axis(probabilities, order, 1),
        rel=1e-5,
    )
    assert not found["probability_BT"][:, 3:].any()

    places = np.array([1, 0, 2])[labels]  # of the classes among 1, 4, 6

    assert found["loss_B"] == pytest.approx(-np.log(probabilities[np.arange(30), places]), rel=1e-4)


def test_what_is_no_number_is_seen_in_images_and_not_in_padding():
    logits = jnp.array([[1.0, 2, 3], [jnp.nan, 0, 0], [-jnp.inf, 0, 0]])
    (found,) = answers_of([make_batch([2, 0, 0], [1, 0, 1], logits)], 3)

    assert np.isfinite(found["probability_BT"]).all()
    assert found["loss_B"][0] == pytest.approx(np.log(1 + np.exp(-1) + np.exp(-2)), rel=1e-6)

    for odd in (jnp.nan, jnp.inf):
        (found,) = answers_of([make_batch([2], [1], logits[:1].at[0, 1].set(odd))], 3)
        assert not np.isfinite(found["probability_BT"]).any()


def add(metrics, labels, classes, confidence):
    """Add images whose most probable outputs are `classes`, one or several each."""
    classes = np.asarray(classes).reshape(len(labels), -1)
    num = len(labels)
    rows = {
        "record_B": np.arange(num),
        "label_B": np.asarray(labels),
        "class_BT": classes,
        "loss_B": np.zeros(num),
    }
    metrics.add(rows | {"probability_BT": np.asarray(confidence, np.float32)[:, None]})


def test_confusions_and_mistakes_by_hand():
    """Classes 0 to 2; outputs 2, 5 and 7 may be answers, and class k is output (2, 5, 7)[k]."""
    output_L = np.array([2, 5, 7])
    names = tuple(map(str, range(8)))
    changes = {
        "output_names": names,
        "is_allowed_K": np.isin(np.arange(8), output_L),
        "output_L": output_L,
    }
    metrics = metrics_of(3, **changes)
    labels = [0, 0, 0, 1, 1, 2, 2, 2]
    first = [2, 5, 5, 5, 2, 7, 2, 2]
    confidence = [0.9, 0.4, 0.8, 0.5, 0.8, 0.6, 0.3, 0.7]
    add(metrics, labels, first, confidence)

    assert metrics.confusion_2LA[1].tolist() == [[1, 0, 0], [0, 1, 0], [0, 0, 1]]
    assert metrics.confusion_2LA[0].tolist() == [[0, 2, 0], [1, 0, 0], [2, 0, 0]]

    shown = [(one["class"], one["answer"], one["images"], one["of"]) for one in metrics.confused(2)]

    assert shown == [("0", "5", 2, 3), ("2", "2", 2, 3)]
    assert len(metrics.confused(9)) == 3

    found = [(one.record, one.label, one.predicted) for one in metrics.wrong]

    assert found == [(2, 0, 5), (4, 1, 2), (7, 2, 2), (1, 0, 5), (6, 2, 2)], (
        "by confidence, then in their order"
    )
    assert metrics.wrong[0].probability == pytest.approx(0.8)


def test_memory_is_bounded():
    """The most confident mistakes of many batches are kept and no more; a matrix of 21,843 squared is not made."""
    metrics = metrics_of(21_843)
    rng = np.random.default_rng(0)

    assert metrics.confusion_2LA is None

    confidences = rng.random((10, 50))
    for confidence in confidences:
        add(metrics, [7] * 50, [3] * 50, confidence)

    worst = sorted(confidences.ravel(), reverse=True)[: len(metrics.wrong)]

    assert [one.probability for one in metrics.wrong] == pytest.approx(worst)
    assert 0 < len(metrics.wrong) < 50
    assert metrics.confused(5) == []
    assert metrics.images == 500


def classify(batches):
    """Losses stand in the place of the images, whether an answer is right in that of the labels."""

    @jax.jit
    def step(scale, batch):
        terms = {
            "loss": batch.image_BHWC * scale,
            "correct": batch.label_B.astype(jnp.float32),
            "weight": 1.0,
        }
        return {name: jnp.sum(term * batch.mask_B) for name, term in terms.items()}

    split = Split("test", (), 3, lambda: contextlib.nullcontext(iter(batches)))
    return dict(ClassificationEvaluator(split, step).run(jnp.float32(2)))


def test_loss_and_accuracy_by_hand():
    """Three examples count: losses 2 x (1 + 2 + 6) over 3, two of them right; the padding's 100 is not seen."""
    batches = [
        make_batch([1, 0], [1, 1], jnp.float32([1, 2])),
        make_batch([1, 1], [1, 0], jnp.float32([6, 100])),
    ]

    assert classify(batches) == {
        "loss": pytest.approx(6.0),
        "accuracy": pytest.approx(2 / 3),
        "images": 3,
    }


@pytest.mark.parametrize("num_batches", [0, 2])
def test_nothing_to_evaluate(num_batches):
    with pytest.raises(ValueError, match="test: no image could be read"):
        classify([make_batch([0, 0], [0, 0], jnp.zeros(2))] * num_batches)


def test_the_table_of_classes():
    """Three of four right is 0.75; a class without images has no accuracy, and a comma stays inside its name."""
    names = ("cat", "dog, wet", 'the "best"', "not listed")
    source = MemorySource(np.zeros((1, 1, 1, 3), np.uint8), np.zeros(1, int), names)
    label_map = dataclasses.replace(identity_map(names), listed=np.arange(3))
    metrics = ClassMetrics(Labelled(source, "", [], label_map))
    classes = [[0, 1], [0, 1], [0, 1], [1, 0], [2, 1], [1, 2], [0, 1]]
    add(metrics, [0, 0, 0, 0, 2, 2, 2], classes, [0.5] * 7)
    text = to_csv(metrics.class_rows())
    header, *rows = csv.reader(io.StringIO(text))
    first = ["accuracy", "accuracy_low", "accuracy_high"]
    first_five = ["top5_accuracy", "top5_low", "top5_high"]

    assert header == ["class", "images", "correct", *first, *first_five]

    shares = ((3, 4), (4, 4), (1, 3), (2, 3))
    cells = [
        [f"{share:.6f}" for share in (right / of, *wilson_interval(right, of))]
        for right, of in shares
    ]
    cat = ["cat", "4", "3", *cells[0], *cells[1]]
    best = ['the "best"', "3", "1", *cells[2], *cells[3]]

    assert rows == [cat, ["dog, wet", "0", "0", *[""] * 6], best]


def test_wilson_by_hand():
    """8 of 10: (0.8 + z²/20 ± z sqrt(0.16/10 + z²/400)) / (1 + z²/10) with z² = 3.841459."""
    assert wilson_interval(8, 10) == pytest.approx((0.490162, 0.943318), abs=1e-6)
    # Without a success the lower end is 0 and the upper one z²/(n + z²).
    assert wilson_interval(0, 20) == pytest.approx((0, 3.841459 / 23.841459), abs=1e-6)
    assert wilson_interval(20, 20) == pytest.approx((20 / 23.841459, 1), abs=1e-6)


@pytest.mark.parametrize(
    ("right", "images"),
    [
        (1, 3),
        (7, 9),
        (30, 41),
        (4000, 5000),
    ],
)
def test_the_ends_are_the_shares_that_a_normal_test_just_does_not_reject(right, images):
    for share in wilson_interval(right, images):
        deviation = math.sqrt(share * (1 - share) / images)
        assert abs(right / images - share) / deviation == pytest.approx(1.959964, abs=1e-6)


def test_calibration_by_hand():
    """Bins of 1/15.

    Two answers of 0.62 and 0.66 share one (9/15 to 10/15), half of them right; 0.98 is wrong; 0.2
    is

    the upper end of its bin (2/15 to 3/15) and right; 0.21 is in the next."""
    calibration = Calibration()
    calibration.add(np.array([0.62, 0.98, 0.2]), np.array([True, False, True]))
    calibration.add(np.array([0.66, 0.21]), np.array([False, False]))

    expected = (2 * abs(0.5 - 0.64) + 0.98 + (1 - 0.2) + 0.21) / 5
    assert calibration.error == pytest.approx(expected)

    filled = {round(one.high * BINS): one for one in calibration.bins() if one.images}

    assert {place: one.images for place, one in filled.items()} == {3: 1, 4: 1, 10: 2, 15: 1}
    assert filled[10].confidence == pytest.approx(0.64)
    assert filled[10].accuracy == 0.5
    assert [one.low for one in calibration.bins()] == [number / 15 for number in range(15)]


def test_confidence_at_the_ends_of_the_scale():
    """A probability of float32 may be 0, 1, or by rounding a little more."""
    calibration = Calibration()
    calibration.add(
        np.array([0.0, 1.0, np.nextafter(np.float32(1), np.float32(2))]),
        np.ones(3, bool),
    )

    assert [one.images for one in calibration.bins()] == [1] + [0] * 13 + [2]
