"""Scores of images that may have several labels, by hand."""

import contextlib

import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose

from vit_jax.arrays import Batch, StepResults
from vit_jax.evals import MultilabelEvaluator, Split
from vit_jax.evals.label_counts import average_precisions
from vit_jax.evals.multilabel import MultilabelMetrics
from vit_jax.objectives.sums import score_classes

NAN = float("nan")


def test_average_precision_by_hand():
    """Five images are in the order of their scores: the first, third and fourth have class 0.

    Its average precision is (1/1 + 2/3 + 3/4) / 3. The second and third image have the same score
    for class 1: both are predicted at once, and 1 of 3 is right then, and 2 of 4 later. All
    images have class 2, and none has class 3.
    """
    score_NK = np.array(
        [
            [0.9, 0.9, 0.1, 0.1],
            [0.8, 0.5, 0.2, 0.2],
            [0.7, 0.5, 0.3, 0.3],
            [0.6, 0.4, 0.4, 0.4],
            [0.5, 0.1, 0.5, 0.5],
        ],
        np.float32,
    )
    is_true_NK = np.array(
        [
            [1, 0, 1, 0],
            [0, 0, 1, 0],
            [1, 1, 1, 0],
            [1, 1, 1, 0],
            [0, 0, 1, 0],
        ],
        bool,
    )

    first = (1 + 2 / 3 + 3 / 4) / 3
    second = (1 / 3 + 2 / 4) / 2
    expected = [first, second, 1, NAN]
    order = np.array([3, 0, 4, 1, 2])  # which must not matter
    for rows in (slice(None), order, order[::-1]):
        found = average_precisions(is_true_NK[rows], score_NK[rows])
        assert_allclose(found, expected, rtol=1e-12)

    equal_scores_NK = np.zeros_like(score_NK)
    constant = average_precisions(is_true_NK, equal_scores_NK)
    share_of_class = [0.6, 0.4, 1, NAN]

    assert_allclose(constant, share_of_class, rtol=1e-12)


PROBABILITY = np.array(
    [
        [0.9, 0.2, 0.6],
        [0.5, 0.1, 0.2],
        [0.3, 0.4, 0.9],
        [0.1, 0.3, 0.4],
    ],
    np.float32,
)
LABEL = np.array(
    [
        [1, 0, 0],
        [0, 1, 0],
        [1, 1, 0],
        [0, 0, 0],
    ]
)


def iterate_batches():
    """Yield logits and labels in two batches.

    The second has two rows of padding, which would be wrong in all classes.
    """
    logits = np.full((6, 3), 9, np.float32)
    logits[:4] = np.log(PROBABILITY / (1 - PROBABILITY))
    label = np.zeros((6, 3), np.int32)
    label[:4] = LABEL
    mask = np.array([1, 1, 1, 1, 0, 0], np.float32)

    for rows in (slice(0, 3), slice(3, 6)):
        batch = Batch(
            None,
            jnp.asarray(label[rows]),
            jnp.asarray(mask[rows]),
        )
        yield jnp.asarray(logits[rows]), batch


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
    """One label is right, three are too many, and three are missed."""
    expected = {
        "mean_average_precision": (5 / 6 + 3 / 4) / 2,
        "f1_micro": 2 * 1 / (2 * 1 + 3 + 3),
        "f1_macro": 1 / 4,
        "loss": 2.5,
    }
    assert scores.values() == pytest.approx(expected)


def test_an_evaluator_counts_every_example_once(scores):
    """Padding does not count; the loss is that of the step."""

    def step(_, batch):
        logits, labelled = batch
        images = labelled.mask_B.sum()
        sums = {"loss": images * 2.5, "weight": images}
        return StepResults(sums, score_classes(logits, labelled))

    split = Split(
        "test",
        ("a", "b", "c"),
        4,
        lambda: contextlib.nullcontext(iterate_batches()),
    )

    evaluator = MultilabelEvaluator(split, step)

    results = dict(evaluator.run(None))

    expected = scores.values() | {"images": 4.0}
    assert results == pytest.approx(expected)


def test_the_loss_is_the_cross_entropy_of_all_classes():
    (logits, batch), _ = iterate_batches()

    losses = score_classes(logits, batch)["loss_B"]

    of_truth = np.where(LABEL, PROBABILITY, 1 - PROBABILITY)
    expected = -np.log(of_truth).sum(axis=1)

    assert_allclose(losses, expected[:3], rtol=1e-5)


def test_a_split_without_any_label_is_an_error():
    empty = MultilabelMetrics(("a", "b"))
    empty.add(
        {
            "probability_BK": np.ones((2, 2)),
            "label_BK": np.zeros((2, 2)),
            "loss_B": np.zeros(2, np.float32),
        }
    )

    with pytest.raises(ValueError, match="No readable image has a label"):
        empty.values()
