"""Evaluation by hand: top-1, top-5, loss and the table of classes against loops over single examples."""

import contextlib
import csv
import io

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vit_jax.arrays import Batch
from vit_jax.evals import ClassificationEvaluator, Split
from vit_jax.evals.per_class import PerClassResult, evaluate_per_class, per_class_sums


def make_batch(labels, mask, images=None):
    """A batch without pixels; the steps below take what stands in their place."""
    return Batch(image_BHWC=images, label_B=jnp.asarray(labels, jnp.int32), mask_B=jnp.asarray(mask, jnp.float32))


def by_hand(logits, labels, mask):
    """Sums in double precision, one example after the other; the place of a class by sorting."""
    classes = logits.shape[1]
    sums = {"loss": 0.0, **{name: np.zeros(classes) for name in ("images_K", "top1_K", "top5_K")}}
    for row, label, counts in zip(logits.astype(np.float64), labels, mask, strict=True):
        if not counts:
            continue
        place = sorted(range(classes), key=lambda k: (-row[k], k)).index(label)
        sums["loss"] += np.log(np.sum(np.exp(row - row.max()))) + row.max() - row[label]
        sums["images_K"][label] += 1
        sums["top1_K"][label] += place == 0
        sums["top5_K"][label] += place < 5
    return sums


def sample(num_classes, rows=60, seed=0):
    """Logits of five values, so that most examples have ties; the last class has no images; some do not count."""
    rng = np.random.default_rng(seed)
    logits = rng.integers(-2, 3, (rows, num_classes)).astype(np.float32)
    return logits, rng.integers(0, num_classes - 1, rows), rng.integers(0, 2, rows).astype(np.float32)


@pytest.mark.parametrize("num_classes", [2, 4, 5, 6, 13])
def test_sums_with_ties_and_masked_examples(num_classes):
    logits, labels, mask = sample(num_classes)
    found = jax.jit(per_class_sums)(jnp.asarray(logits), make_batch(labels, mask))
    expected = by_hand(logits, labels, mask)
    for name in ("images_K", "top1_K", "top5_K"):
        assert np.array_equal(found[name], expected[name]), name
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-5)
    assert found["images_K"][-1] == 0
    if num_classes <= 5:
        assert np.array_equal(found["top5_K"], found["images_K"])
    else:
        assert found["top5_K"].sum() < found["images_K"].sum()


def test_what_is_no_number_is_not_seen_in_padding_and_not_correct():
    logits = jnp.array([[1.0, 2, 3], [jnp.nan, jnp.nan, jnp.nan], [-jnp.inf, 0, 0]])
    found = per_class_sums(logits, make_batch([2, 0, 0], [1, 0, 0]))
    assert found["loss"] == pytest.approx(np.log(1 + np.exp(-1) + np.exp(-2)), rel=1e-6)
    assert found["images_K"].tolist() == found["top1_K"].tolist() == [0, 0, 1]
    logits = jnp.array([[jnp.nan] * 6, [0, 0, 0, 0, 0, jnp.nan], [jnp.nan, 0, 0, 0, 0, 1]])
    found = per_class_sums(logits, make_batch([0, 5, 5], [1, 1, 1]))
    assert found["top1_K"].sum() == 0
    assert found["top5_K"].tolist() == [0, 0, 0, 0, 0, 1], "in the last row one other could be before it"
    assert np.isnan(found["loss"])


def evaluate(batches):
    """Each batch comes with its logits in the place of the images."""
    step = jax.jit(lambda scale, batch: per_class_sums(batch.image_BHWC * scale, batch))
    return evaluate_per_class(lambda: contextlib.nullcontext(iter(batches)), step, jnp.float32(1))


def test_a_split_in_batches_of_which_the_last_is_padded():
    logits, labels, mask = sample(7, rows=64)
    mask[60:] = 0
    parts = [slice(0, 20), slice(20, 40), slice(40, 64)]
    found = evaluate([make_batch(labels[part], mask[part], jnp.asarray(logits[part])) for part in parts])
    expected, images = by_hand(logits, labels, mask), mask.sum()
    assert dict(found.values()) == {
        "images": images,
        "top1_accuracy": pytest.approx(expected["top1_K"].sum() / images),
        "top5_accuracy": pytest.approx(expected["top5_K"].sum() / images),
        "loss": pytest.approx(expected["loss"] / images, rel=1e-5),
    }
    for name in ("images_K", "top1_K", "top5_K"):
        assert np.array_equal(getattr(found, name), expected[name]), name


def classify(batches):
    """Losses stand in the place of the images, whether an answer is right in that of the labels."""

    @jax.jit
    def step(scale, batch):
        terms = {"loss": batch.image_BHWC * scale, "correct": batch.label_B.astype(jnp.float32), "weight": 1.0}
        return {name: jnp.sum(term * batch.mask_B) for name, term in terms.items()}

    split = Split("test", (), 3, lambda: contextlib.nullcontext(iter(batches)))
    return dict(ClassificationEvaluator(split, step).run(jnp.float32(2)))


def test_loss_and_accuracy_by_hand():
    """Three examples count: losses 2 x (1 + 2 + 6) over 3, two of them right; the padding's 100 is not seen."""
    batches = [make_batch([1, 0], [1, 1], jnp.float32([1, 2])), make_batch([1, 1], [1, 0], jnp.float32([6, 100]))]
    assert classify(batches) == {"loss": pytest.approx(6.0), "accuracy": pytest.approx(2 / 3), "images": 3}


@pytest.mark.parametrize("num_batches", [0, 2])
def test_nothing_to_evaluate(num_batches):
    with pytest.raises(ValueError, match="No image of the split could be read"):
        evaluate([make_batch([0, 0], [0, 0], jnp.zeros((2, 3)))] * num_batches)
    with pytest.raises(ValueError, match="No image of the test split could be read"):
        classify([make_batch([0, 0], [0, 0], jnp.zeros(2))] * num_batches)


def test_the_table_of_classes():
    """Three of four right is 0.75; a class without images has no accuracy, and a comma stays inside its name."""
    result = PerClassResult(0.5, np.array([4.0, 0, 3]), np.array([3.0, 0, 1]), np.array([4.0, 0, 2]))
    text = result.to_csv(["cat", "dog, wet", 'the "best"'])
    assert list(csv.reader(io.StringIO(text))) == [
        ["class", "images", "top1_correct", "top1_accuracy", "top5_accuracy"],
        ["cat", "4", "3", "0.750000", "1.000000"],
        ["dog, wet", "0", "0", "", ""],
        ['the "best"', "3", "1", "0.333333", "0.666667"],
    ]
    with pytest.raises(ValueError, match="zip"):
        result.to_csv(["cat", "dog"])
