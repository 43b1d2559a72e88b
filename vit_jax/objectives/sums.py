"""Sums over the examples of a batch, and the metrics that follow from them.

A step returns sums, not means: micro-batches, processes and padded batches are added before one
division.

Legend: B global batch, K classes.
"""

from collections.abc import Mapping
from typing import TypeVar

import jax
import numpy as np
import optax

from vit_jax.arrays import Batch

A = TypeVar("A", jax.Array, np.ndarray)

Sums = dict[str, jax.Array]
"""Float32 totals over a batch by name.

Each but "weight" and "images" becomes a metric, divided by "weight".

* "weight": number of examples that count, or of patches where patches are predicted.
* "images": number of images that count; only where it is not the weight.
* "loss": loss.
* "correct": correct predictions. Missing for several labels an image, where no single prediction is
  correct.
* "majority": correct predictions of a network that always predicts the commonest class of the
  batch.
"""

METRIC_OF_SUM = {"correct": "accuracy", "majority": "majority_accuracy"}
"""Names of metrics that are not named like their sum."""
COUNTS = ("weight", "images")
"""Sums that are no metrics."""


def compute_means(sums: Mapping[str, A]) -> dict[str, A]:
    """Return metrics by name: each sum divided by the sum "weight"."""
    metrics = {}
    for name, total in sums.items():
        if name not in COUNTS:
            metrics[METRIC_OF_SUM.get(name, name)] = total / sums["weight"]
    return metrics


def count_images(totals: Mapping[str, A]) -> float:
    """Return the number of images that count: "images", or the weight, where that counts images.

    Without totals it is 0: no batch has been read.
    """
    if not totals:
        return 0.0
    return float(totals.get("images", totals["weight"]))


def score_classes(logits_BK: jax.Array, batch: Batch) -> dict[str, jax.Array]:
    """Return rows for metrics of images with several labels.

    The loss of an example is sigmoid cross-entropy, summed over classes.
    """
    probability_BK = jax.nn.sigmoid(logits_BK)
    label_BK = batch.label_BK(logits_BK.shape[1])
    loss_BK = optax.sigmoid_binary_cross_entropy(logits_BK, label_BK)
    return {
        "probability_BK": probability_BK,
        "label_BK": batch.label_B,
        "loss_B": loss_BK.sum(axis=-1),
        "mask_B": batch.mask_B,
    }
