"""Metrics of single-label images against NumPy: ties, padding, confusions, calibration."""

import contextlib
import csv
import dataclasses
import io
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.evals.samples import softmax
from vit_jax.arrays import Batch, StepResults
from vit_jax.data.kinds.in_memory import MemorySource
from vit_jax.evals import ClassificationEvaluator, Split
from vit_jax.evals.calibration import BINS, Calibration
from vit_jax.evals.class_counts import predict
from vit_jax.evals.intervals import describe_interval, wilson_interval
from vit_jax.evals.label_map import Labelled, build_identity_map
from vit_jax.evals.single_label import ClassMetrics
from vit_jax.evals.step_results import iterate_rows, keep_counted
from vit_jax.text.tables import to_csv


def make_batch(labels, mask, images=None):
    """Return a batch whose images are what the steps below take for their input."""
    if images is not None:
        images = jnp.asarray(images, jnp.float32)
    return Batch(
        image_BHWC=images,
        label_B=jnp.asarray(labels, jnp.int32),
        mask_B=jnp.asarray(mask, jnp.float32),
    )


def count_by_hand(logits, labels, mask):
    """Return loss and counts in float64, one example after the other; ranks come from sorting."""
    num_classes = logits.shape[1]
    loss = 0.0
    images, top1, top5 = np.zeros((3, num_classes))

    for index in np.flatnonzero(mask):
        row = logits[index].astype(np.float64)
        label = labels[index]
        order = np.argsort(-row, kind="stable").tolist()
        rank = order.index(label)

        sum_of_exponentials = np.exp(row).sum()
        loss += np.log(sum_of_exponentials) - row[label]
        images[label] += 1
        top1[label] += rank == 0
        top5[label] += rank < 5

    return loss, {
        "images_L": images,
        "top1_L": top1,
        "top5_L": top5,
    }


def sample_logits(num_classes, rows=60, seed=0):
    """Return logits, labels and a mask of random examples.

    Logits have five values, so that most examples have ties. The last class has no images.
    """
    rng = np.random.default_rng(seed)
    logits = rng.integers(-2, 3, (rows, num_classes))
    labels = rng.integers(0, num_classes - 1, rows)
    mask = rng.integers(0, 2, rows)
    return logits, labels, mask


def open_batches(batches):
    """Return a function that opens these batches."""
    return lambda: contextlib.nullcontext(iter(batches))


def predict_batches(batches, num_outputs, output=None):
    """Return predictions of batches whose images are their logits, without padding.

    Classes are these outputs, and no other output is allowed.
    """
    if output is None:
        output = np.arange(num_outputs)
    is_allowed = np.isin(np.arange(num_outputs), output)

    @jax.jit
    def step(scale, batch):
        logits = batch.image_BHWC * scale
        allowed = jnp.where(is_allowed, logits, -jnp.inf)
        output_of_class = jnp.asarray(output)
        return predict(allowed, batch, output_of_class[batch.label_B])

    num_examples = 0
    for batch in batches:
        num_examples += len(batch.mask_B)
    parts = iterate_rows(
        open_batches(batches),
        step,
        jnp.float32(1),
        num_examples,
    )

    return list(map(keep_counted, parts))


def make_metrics(names, **changes):
    """Return metrics of these classes, which are the outputs if nothing is changed."""
    pixels = np.zeros((1, 1, 1, 3), np.uint8)
    labels = np.zeros(1, int)
    source = MemorySource(pixels, labels, names)
    label_map = build_identity_map(names)
    label_map = dataclasses.replace(label_map, **changes)
    labelled = Labelled(source, "", [], label_map)
    return ClassMetrics(labelled)


def name_by_number(num_classes):
    return tuple(map(str, range(num_classes)))


def measure_batches(batches, num_classes):
    metrics = make_metrics(name_by_number(num_classes))
    predictions = predict_batches(batches, num_classes)
    for rows in predictions:
        metrics.add(rows)

    return metrics


@pytest.fixture(params=[2, 4, 5, 6, 13])
def num_classes(request):
    return request.param


@pytest.fixture
def split_with_ties(num_classes):
    """Logits, labels, mask and batches of a split; the last batch is padded."""
    logits, labels, mask = sample_logits(num_classes, rows=64)
    mask[60:] = 0

    batches = []
    thirds = np.split(np.arange(64), [20, 40])
    for rows in thirds:
        batch = make_batch(
            labels[rows],
            mask[rows],
            logits[rows],
        )
        batches.append(batch)
    return logits, labels, mask, batches


def test_a_split_with_ties(num_classes, split_with_ties):
    logits, labels, mask, batches = split_with_ties

    metrics = measure_batches(batches, num_classes)

    found = metrics.counts
    expected_loss, expected_counts = count_by_hand(logits, labels, mask)
    for name, expected in expected_counts.items():
        counts = getattr(found, name)
        assert np.array_equal(counts, expected), name

    assert found.loss_sum == pytest.approx(expected_loss, rel=1e-5)
    assert found.images_L[-1] == 0

    values = metrics.values()
    images = int(mask.sum())
    top1 = int(found.top1_L.sum())
    top5 = int(found.top5_L.sum())

    top1_interval = wilson_interval(top1, images)
    top5_interval = wilson_interval(top5, images)

    assert values["accuracy"] == top1 / images
    assert values["accuracy_interval"] == list(top1_interval)
    assert values["top5_accuracy"] == top5 / images
    assert values["top5_interval"] == list(top5_interval)
    assert (top5 == images) == (num_classes <= 5)


def test_records_are_the_numbers_in_the_split(num_classes, split_with_ties):
    _, _, mask, batches = split_with_ties

    parts = predict_batches(batches, num_classes)

    records = []
    for rows in parts:
        records += rows["record_B"].tolist()
    counted = np.flatnonzero(mask)

    assert records == counted.tolist()


def test_predictions_ignore_outputs_that_are_not_allowed():
    """Outputs 1, 4 and 6 are allowed; classes 0, 1 and 2 of the data are outputs 4, 1 and 6."""
    rng = np.random.default_rng(3)
    logits = rng.normal(size=(30, 8))
    labels = rng.integers(0, 3, 30)
    output = np.array([4, 1, 6])
    batch = make_batch(labels, np.ones(30), logits)

    (found,) = predict_batches([batch], 8, output)

    allowed = np.sort(output)
    allowed_logits = logits[:, allowed]
    order = np.argsort(-allowed_logits)
    probabilities = softmax(allowed_logits)
    classes = found["class_BT"][:, :3]
    found_probabilities = found["probability_BT"]
    first = found_probabilities[:, :3]
    others = found_probabilities[:, 3:]
    expected = np.take_along_axis(probabilities, order, 1)

    assert np.array_equal(classes, allowed[order])
    assert first == pytest.approx(expected, rel=1e-5)
    assert not others.any()

    numbers = np.arange(30)
    places = np.searchsorted(allowed, output[labels])
    expected_loss = -np.log(probabilities[numbers, places])

    assert found["loss_B"] == pytest.approx(expected_loss, rel=1e-4)


def test_logits_that_are_not_finite_are_seen_in_images_and_not_in_padding():
    logits = [
        [1.0, 2.0, 3.0],
        [np.nan, 0.0, 0.0],
        [-np.inf, 0.0, 0.0],
    ]
    batch = make_batch([2, 0, 0], [1, 0, 1], logits)

    (found,) = predict_batches([batch], 3)

    is_finite = np.isfinite(found["probability_BT"])
    first_loss = found["loss_B"][0]
    expected_loss = np.log(1 + np.exp(-1) + np.exp(-2))
    assert is_finite.all()
    assert first_loss == pytest.approx(expected_loss, rel=1e-6)


@pytest.mark.parametrize("odd", [np.nan, np.inf])
def test_logits_that_are_not_finite_give_no_probability(odd):
    batch = make_batch([2], [1], [[1.0, odd, 3.0]])

    (found,) = predict_batches([batch], 3)

    is_finite = np.isfinite(found["probability_BT"])
    assert not is_finite.any()


def add_predictions(metrics, labels, classes, confidence):
    """Add images whose most probable outputs are `classes`, one or several each."""
    count = len(labels)
    classes = np.reshape(classes, (count, -1))
    probability = np.float32(confidence)[:, None]
    metrics.add(
        {
            "record_B": np.arange(count),
            "label_B": np.array(labels),
            "class_BT": classes,
            "loss_B": np.zeros(count),
            "probability_BT": probability,
        }
    )


@pytest.fixture
def confused_metrics():
    """Metrics of eight images; class k of three is output (2, 5, 7)[k] of eight."""
    output_L = np.array([2, 5, 7])
    outputs = np.arange(8)
    metrics = make_metrics(
        name_by_number(3),
        output_names=name_by_number(8),
        is_allowed_K=np.isin(outputs, output_L),
        output_L=output_L,
    )
    add_predictions(
        metrics,
        labels=[0, 0, 0, 1, 1, 2, 2, 2],
        classes=[2, 5, 5, 5, 2, 7, 2, 2],
        confidence=[0.9, 0.4, 0.8, 0.5, 0.8, 0.6, 0.3, 0.7],
    )
    return metrics


def test_confusions_by_hand(confused_metrics):
    wrong, right = confused_metrics.confusion_2LA

    expected_wrong = [
        [0, 2, 0],
        [1, 0, 0],
        [2, 0, 0],
    ]
    assert np.array_equal(right, np.eye(3))
    assert np.array_equal(wrong, expected_wrong)

    all_confusions = confused_metrics.list_confusions(9)
    assert len(all_confusions) == 3
    assert confused_metrics.list_confusions(2) == [
        {
            "class": "0",
            "answer": "5",
            "images": 2,
            "of": 3,
        },
        {
            "class": "2",
            "answer": "2",
            "images": 2,
            "of": 3,
        },
    ]


def test_mistakes_by_hand(confused_metrics):
    """Mistakes are sorted by confidence, then by their order."""
    mistakes = confused_metrics.most_confident_mistakes

    found = []
    for one in mistakes:
        found.append((one.record, one.label, one.predicted))
    assert found == [
        (2, 0, 5),
        (4, 1, 2),
        (7, 2, 2),
        (1, 0, 5),
        (6, 2, 2),
    ]
    first, *_ = mistakes
    assert first.probability == pytest.approx(0.8)


def test_memory_is_bounded():
    """Only the most confident mistakes of many batches are kept.

    No matrix of 21,843 squared is made.
    """
    metrics = make_metrics(name_by_number(21_843))
    rng = np.random.default_rng(0)
    confidences = rng.random((10, 50))

    assert metrics.confusion_2LA is None

    for confidence in confidences:
        add_predictions(
            metrics,
            [7] * 50,
            [3] * 50,
            confidence,
        )

    found = []
    for one in metrics.most_confident_mistakes:
        found.append(one.probability)
    worst = sorted(confidences.ravel(), reverse=True)

    assert found == pytest.approx(worst[: len(found)])
    assert 0 < len(found) < 50
    assert metrics.list_confusions(5) == []
    assert metrics.images == 500


def evaluate_losses(batches):
    """Evaluate batches whose images are losses, and whose labels tell whether they are right."""

    @jax.jit
    def step(scale, batch):
        mask = batch.mask_B
        losses = batch.image_BHWC * scale
        is_right = batch.label_B.astype(jnp.float32)
        sums = {
            "loss": jnp.sum(losses * mask),
            "correct": jnp.sum(is_right * mask),
            "weight": jnp.sum(mask),
        }
        return StepResults(sums, rows={})

    split = Split("test", (), 3, open_batches(batches))
    evaluator = ClassificationEvaluator(split, step)
    scale = jnp.float32(2)
    return dict(evaluator.run(scale))


def test_loss_and_accuracy_by_hand():
    """Three examples count, with losses 2 x (1 + 2 + 6) / 3, two of them right.

    The loss of the padding, 100, does not count.
    """
    batches = [
        make_batch([1, 0], [1, 1], [1, 2]),
        make_batch([1, 1], [1, 0], [6, 100]),
    ]

    found = evaluate_losses(batches)

    assert found == {
        "loss": pytest.approx(6.0),
        "accuracy": pytest.approx(2 / 3),
        "images": 3,
    }


@pytest.mark.parametrize("num_batches", [0, 2])
def test_nothing_to_evaluate(num_batches):
    padding = make_batch([0, 0], [0, 0], [0, 0])

    with pytest.raises(ValueError, match="test: no image could be read"):
        evaluate_losses([padding] * num_batches)


def format_share(correct, count):
    """Return the cells of a share: its value and its interval."""
    share = correct / count
    low, high = wilson_interval(correct, count)
    return [
        f"{share:.6f}",
        f"{low:.6f}",
        f"{high:.6f}",
    ]


def test_the_table_of_classes():
    """Three of four right is 0.75; a class without images has no accuracy.

    A comma stays inside its name.
    """
    names = ("cat", "dog, wet", 'the "best"', "not listed")
    metrics = make_metrics(names, listed=np.arange(3))
    add_predictions(
        metrics,
        labels=[0] * 4 + [2] * 3,
        classes=[
            [0, 1],
            [0, 1],
            [0, 1],
            [1, 0],
            [2, 1],
            [1, 2],
            [0, 1],
        ],
        confidence=[0.5] * 7,
    )

    text = to_csv(metrics.class_rows())

    header, *rows = csv.reader(io.StringIO(text))
    assert header == [
        "class",
        "images",
        "correct",
        "accuracy",
        "accuracy_low",
        "accuracy_high",
        "top5_accuracy",
        "top5_low",
        "top5_high",
    ]
    assert rows == [
        [
            "cat",
            "4",
            "3",
            *format_share(3, 4),
            *format_share(4, 4),
        ],
        ["dog, wet", "0", "0"] + [""] * 6,
        [
            'the "best"',
            "3",
            "1",
            *format_share(1, 3),
            *format_share(2, 3),
        ],
    ]


def test_wilson_by_hand():
    """8 of 10: (0.8 + z²/20 ± z sqrt(0.16/10 + z²/400)) / (1 + z²/10) with z² = 3.841459.

    Without a success the lower end is 0 and the upper one z²/(n + z²).
    """
    eight_of_ten = wilson_interval(8, 10)
    none = wilson_interval(0, 20)
    all_of_them = wilson_interval(20, 20)

    upper_end_of_none = 3.841459 / 23.841459
    lower_end_of_all = 20 / 23.841459
    assert eight_of_ten == pytest.approx((0.490162, 0.943318), abs=1e-6)
    assert none == pytest.approx((0, upper_end_of_none), abs=1e-6)
    assert all_of_them == pytest.approx((lower_end_of_all, 1), abs=1e-6)


def test_few_images_have_an_interval_in_text():
    assert describe_interval(0.8, 10) == " (95 %: 49.02% to 94.33%)"
    assert describe_interval(0.8, 1_999).startswith(" (95 %: 78.")
    assert describe_interval(0.8, 2_000) == ""
    assert describe_interval(0.8, 0) == ""  # the number of images is not known


@pytest.mark.parametrize(
    ("correct", "images"),
    [
        (1, 3),
        (7, 9),
        (30, 41),
        (4000, 5000),
    ],
)
def test_wilson_ends_are_at_the_limit_of_a_normal_test(correct, images):
    """A test does not quite reject the ends of the interval for the true share."""
    observed_share = correct / images

    for share in wilson_interval(correct, images):
        variance = share * (1 - share) / images
        deviation = math.sqrt(variance)
        z = abs(observed_share - share) / deviation
        assert z == pytest.approx(1.959964, abs=1e-6)


def test_calibration_by_hand():
    """Confidences fall into bins of 1/15.

    0.62 and 0.66 share one (9/15 to 10/15), half of them right; 0.98 is wrong. 0.2 is the upper
    end of its bin (2/15 to 3/15) and right; 0.21 is in the next.
    """
    calibration = Calibration()
    first = np.array([0.62, 0.98, 0.2])
    second = np.array([0.66, 0.21])

    calibration.add(first, np.array([True, False, True]))
    calibration.add(second, np.array([False, False]))

    gaps = [2 * (0.64 - 0.5), 0.98, 1 - 0.2, 0.21]
    assert calibration.error == pytest.approx(sum(gaps) / 5)

    bins = list(calibration.bins())
    images = [one.images for one in bins]
    for number, one in enumerate(bins):
        assert one.low == number / BINS
    assert len(bins) == BINS
    filled = np.flatnonzero(images)
    assert filled.tolist() == [2, 3, 9, 14]
    assert images[9] == 2
    assert sum(images) == 5
    assert bins[9].confidence == pytest.approx(0.64)
    assert bins[9].accuracy == 0.5


def test_confidence_at_the_ends_of_the_scale():
    """A probability of float32 may be 0, 1, or by rounding a little more."""
    one = np.float32(1)
    more_than_1 = np.nextafter(one, 2 * one)
    probabilities = np.array([0.0, 1.0, more_than_1])
    calibration = Calibration()

    calibration.add(probabilities, np.ones(3, bool))

    images = [one.images for one in calibration.bins()]
    assert images == [1] + [0] * 13 + [2]
