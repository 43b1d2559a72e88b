"""Loss, top-1 and top-5 over a full split, with a table of the classes; every example exactly once.

Legend: B global batch, K classes.
"""

import csv
import dataclasses
import io
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.arrays import Batch
from vit_jax.evals.sums import OpenBatches, Sums, sum_over


def per_class_sums(logits_BK: jax.Array, batch: Batch) -> Sums:
    """Sums over the examples that count, of a batch and the float32 logits computed from it.

    Returns:
      Scalar "loss" (softmax cross-entropy); "images_K", "top1_K" and "top5_K", each by true class. With equal logits
      the lower class number ranks first; with five classes or fewer everything is in the top 5. A logit that is not a
      number beats no other.
    """
    label_B1 = batch.label_B[:, None]
    loss_B = -jnp.take_along_axis(jax.nn.log_softmax(logits_BK), label_B1, axis=1)[:, 0]
    true_B1 = jnp.take_along_axis(logits_BK, label_B1, axis=1)
    is_higher = jnp.arange(logits_BK.shape[1])[None] > label_B1
    is_beaten = (logits_BK < true_B1) | ((logits_BK == true_B1) & is_higher)
    rank_B = logits_BK.shape[1] - 1 - jnp.sum(is_beaten, axis=1)
    one_hot_BK = jax.nn.one_hot(batch.label_B, logits_BK.shape[1]) * batch.mask_B[:, None]
    return {
        "loss": jnp.sum(jnp.where(batch.mask_B > 0, loss_B, 0.0)),
        "images_K": one_hot_BK.sum(axis=0),
        "top1_K": jnp.sum(one_hot_BK * (rank_B < 1)[:, None].astype(jnp.float32), axis=0),
        "top5_K": jnp.sum(one_hot_BK * (rank_B < 5)[:, None].astype(jnp.float32), axis=0),
    }


@dataclasses.dataclass(frozen=True)
class PerClassResult:
    """What an evaluation found.

    Attributes:
      loss: mean softmax cross-entropy.
      images_K, top1_K, top5_K: images of each class, and how many of them had it first, or among the first five.
    """

    loss: float
    images_K: np.ndarray
    top1_K: np.ndarray
    top5_K: np.ndarray

    def values(self) -> Iterator[tuple[str, float]]:
        """Yields "images", "top1_accuracy", "top5_accuracy" and "loss"."""
        images = float(self.images_K.sum())
        yield "images", images
        yield "top1_accuracy", float(self.top1_K.sum()) / images
        yield "top5_accuracy", float(self.top5_K.sum()) / images
        yield "loss", self.loss

    def to_csv(self, class_names: Sequence[str]) -> str:
        """A line for each class: name, images, correct, and accuracies, empty for a class without images."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(["class", "images", "top1_correct", "top1_accuracy", "top5_accuracy"])
        for name, images, top1, top5 in zip(class_names, self.images_K, self.top1_K, self.top5_K, strict=True):
            accuracies = [f"{top1 / images:.6f}", f"{top5 / images:.6f}"] if images else ["", ""]
            writer.writerow([name, int(images), int(top1), *accuracies])
        return text.getvalue()


def evaluate_per_class(open_batches: OpenBatches, step: Callable[[Any, Batch], Sums], model: Any) -> PerClassResult:
    """Evaluates a model on a split; `step` takes (model, batch) and gives sums as `per_class_sums`.

    Raises:
      ValueError: not one image of the split could be read.
    """
    totals = sum_over(open_batches, step, model)
    images = float(totals["images_K"].sum()) if totals else 0.0
    if not images:
        raise ValueError("No image of the split could be read, so there is nothing to evaluate.")
    return PerClassResult(float(totals["loss"]) / images, totals["images_K"], totals["top1_K"], totals["top5_K"])
