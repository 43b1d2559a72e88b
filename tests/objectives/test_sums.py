"""Metrics of sums, and rows for images with several labels."""

import jax.numpy as jnp
import numpy as np
from numpy.testing import assert_allclose

from vit_jax.arrays import Batch
from vit_jax.objectives.sums import compute_means, score_classes


def test_counts_are_no_metrics_and_every_other_sum_is_divided_by_the_weight():
    sums = {
        "loss": 6.0,
        "correct": 3.0,
        "majority": 1.0,
        "weight": 4.0,
        "images": 2.0,
    }
    expected = {
        "loss": 1.5,
        "accuracy": 0.75,
        "majority_accuracy": 0.25,
    }

    assert compute_means(sums) == expected


def test_classes_are_scored_one_by_one():
    logits_BK = np.array(
        [
            [0.0, 2.0],
            [-1.0, 1.0],
        ],
        np.float32,
    )
    label_BK = np.array(
        [
            [0, 1],
            [1, 1],
        ],
        np.int32,
    )
    mask_B = np.ones(2, np.float32)
    probability_BK = 1 / (1 + np.exp(-logits_BK))
    likelihood_BK = np.where(label_BK == 1, probability_BK, 1 - probability_BK)
    loss_B = -np.log(likelihood_BK).sum(axis=1)

    rows = score_classes(
        jnp.asarray(logits_BK),
        Batch(None, label_BK, mask_B),
    )

    assert_allclose(rows["probability_BK"], probability_BK, rtol=1e-6)
    assert_allclose(rows["loss_B"], loss_B, rtol=1e-6)
    assert rows["label_BK"] is label_BK
    assert rows["mask_B"] is mask_B
