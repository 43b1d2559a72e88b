"""Scores of images that may have several labels, by hand."""

import jax.numpy as jnp
import numpy as np
import pytest

from vit_jax.arrays import Batch
from vit_jax.evals import MultilabelEvaluator, Split
from vit_jax.evals.label_counts import average_precisions
from vit_jax.evals.multilabel import MultilabelMetrics
from vit_jax.objectives.sums import score_classes

NAN = float("nan")


def test_average_precision_by_hand():
    """Of five images in the order of their scores the first, third and fourth have class 0: (1/1 + 2/3 + 3/4) / 3.

    The second and third image have the same score for class 1: both are answered at once, and 1 of
    3 is right then, and 2 of 4 later. All have class 2, and none has class 3.
    """
    score_NK = (
        np.array([[9, 9, 1, 1], [8, 5, 2, 2], [7, 5, 3, 3], [6, 4, 4, 4], [5, 1, 5, 5]], np.float32)
        / 10
    )
    is_true_NK = np.array(
        [[1, 0, 1, 0], [0, 0, 1, 0], [1, 1, 1, 0], [1, 1, 1, 0], [0, 0, 1, 0]],
        bool,
    )

    expected = [(1 + 2 / 3 + 3 / 4) / 3, (1 / 3 + 2 / 4) / 2, 1, NAN]
    order = np.array([3, 0, 4, 1, 2])  # which must not matter

    for rows in (slice(None), order, order[::-1]):
        np.testing.assert_allclose(
            average_precisions(is_true_NK[rows], score_NK[rows]),
            expected,
            rtol=1e-12,
        )

    constant = average_precisions(is_true_NK, np.zeros_like(score_NK))

    np.testing.assert_allclose(
        constant,
        [0.6, 0.4, 1, NAN],
        rtol=1e-12,
        err_msg="the share of the class",
    )


PROBABILITY = np.array(
    [[0.9, 0.2, 0.6], [0.5, 0.1, 0.2], [0.3, 0.4, 0.9], [0.1, 0.3, 0.4]],
    np.float32,
)
LABEL = np.array([[1, 0, 0], [0, 1, 0], [1, 1, 0], [0, 0, 0]])


def batches():
    """The images in two batches, the second with a row of padding that would be wrong in all classes."""
    logits = np.log(PROBABILITY / (1 - PROBABILITY))
    logits = np.r_[logits, 9 * np.ones((2, 3))]
    label = np.r_[LABEL, np.zeros((2, 3), int)].astype(np.int32)
    mask = np.array([1, 1, 1, 1, 0, 0], np.float32)

    for part in (slice(0, 3), slice(3, 6)):
        yield (
            jnp.asarray(logits[part], jnp.float32),
            Batch(None, jnp.asarray(label[part]), jnp.asarray(mask[part])),
        )


@pytest.fixture
def scores():
    found = MultilabelMetrics(("a", "b", "c"))
    found.add(
        {
            "probability_BK": PROBABILITY,
            "label_BK": LABEL,
            "loss_B": np.array([1, 2, 3, 4], np.float32),
        }
    )

    return found


def test_metrics_by_hand(scores):
    """Answers of class 0 are images 0 and 1, of which 0 is right; none of class 1; two of class 2, which none has."""
    per_class = scores.counts.per_class()

    assert per_class.images.tolist() == [2, 2, 0]
    np.testing.assert_allclose(per_class.precision, [1 / 2, NAN, NAN])
    np.testing.assert_allclose(per_class.recall, [1 / 2, 0, NAN])
    np.testing.assert_allclose(per_class.f1, [1 / 2, 0, NAN])
    np.testing.assert_allclose(per_class.average_precision, [(1 + 2 / 3) / 2, (1 + 2 / 4) / 2, NAN])
    assert scores.values() == {
        "mean_average_precision": pytest.approx((5 / 6 + 3 / 4) / 2),
        "f1_micro": pytest.approx(
            2 * 1 / (2 * 1 + 3 + 3)
        ),  # one right, three too many, three missed
        "f1_macro": pytest.approx(1 / 4),
        "loss": 2.5,
    }

    header, *rows = scores.class_rows()

    expected_header = ["class", "images", "average_precision", "precision", "recall", "f1"]
    assert header == expected_header
    assert rows[1] == ["b", 2, "0.750000", "", "0.000000", "0.000000"]
    assert rows[2] == ["c", 0, "", "", "", ""]


def test_an_evaluator_counts_every_example_once(scores):
    """Padding does not count; the loss is the objective's."""

    class Opened:
        def __enter__(self):
            return batches()

        def __exit__(self, *_):
            pass

    def step(_, batch):
        logits, labelled = batch
        return score_classes(logits, labelled) | {
            "loss": labelled.mask_B.sum() * 2.5,
            "weight": labelled.mask_B.sum(),
        }

    split = Split("test", ("a", "b", "c"), 4, Opened)
    results = dict(MultilabelEvaluator(split, step).run(None))

    expected_results = {k: pytest.approx(v) for k, v in scores.values().items()} | {"images": 4.0}
    assert results == expected_results

    (logits, batch), _ = batches()
    cross_entropy = -(LABEL * np.log(PROBABILITY) + (1 - LABEL) * np.log(1 - PROBABILITY)).sum(
        axis=1
    )

    np.testing.assert_allclose(score_classes(logits, batch)["loss_B"], cross_entropy[:3], rtol=1e-5)


def test_a_split_without_any_label_is_an_error():
    empty = MultilabelMetrics(("a", "b"))
    rows = {
        "probability_BK": np.ones((2, 2)),
        "label_BK": np.zeros((2, 2)),
        "loss_B": np.zeros(2, np.float32),
    }
    empty.add(rows)

    with pytest.raises(ValueError, match="No readable image has a label"):
        empty.values()
