"""How good a network is where an image may have several labels: each class is a question of its own.

Legend: B global batch, K classes, N images that count.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from vit_jax.arrays import Batch
from vit_jax.evals.sums import Results, Split, counted_rows, results_of

THRESHOLD = 0.5  # the probability from which on a class is answered


def score(logits_BK: jax.Array, batch: Batch) -> Results:
    """The probability of each class, and the loss of each example: sigmoid cross-entropy, summed over classes."""
    return {
        "probability_BK": jax.nn.sigmoid(logits_BK),
        "label_BK": batch.label_B,
        "loss_B": optax.sigmoid_binary_cross_entropy(logits_BK, batch.label_BK(logits_BK.shape[1])).sum(axis=-1),
        "mask_B": batch.mask_B,
    }


class PerClass(NamedTuple):
    """Figures of each class, (K,); of one without an image all but the first are not numbers, for they say nothing."""

    images: np.ndarray
    average_precision: np.ndarray
    precision: np.ndarray
    recall: np.ndarray
    f1: np.ndarray


class Scores:
    """The scores of a split, kept as they come; what follows from them needs all.

    Attributes:
      images: so many.
      loss: the sum over them.
    """

    def __init__(self, num_classes: int) -> None:
        self.images, self.loss = 0, 0.0
        self._per_class: PerClass | None = None  # of all that came
        self._probabilities, self._labels = [np.zeros((0, num_classes), np.float32)], [np.zeros((0, num_classes), bool)]

    def add(self, rows: Mapping[str, np.ndarray]) -> None:
        """Takes what `score` gave for images that count."""
        self._probabilities.append(rows["probability_BK"])
        self._labels.append(rows["label_BK"] > 0)
        self.images, self._per_class = self.images + len(rows["loss_B"]), None
        self.loss += float(rows["loss_B"].astype(np.float64).sum())

    def results(self) -> Iterator[tuple[str, float]]:
        """Yields "mean_average_precision", "f1_micro" and "f1_macro"; means over the classes that have images.

        Raises:
          ValueError: no image has a label.
        """
        per_class = self.per_class()
        if not per_class.images.any():
            raise ValueError("No image that could be read has a label: there is nothing to find.")
        right, answered, true = self._counts()
        yield "mean_average_precision", float(np.nanmean(per_class.average_precision))
        yield "f1_micro", float(2 * right.sum() / (answered.sum() + true.sum()))
        yield "f1_macro", float(np.nanmean(per_class.f1))

    def per_class(self) -> PerClass:
        """The figures of each class, its answers those of probability `THRESHOLD` or more.

        Precision is not a number where nothing was answered.
        """
        if self._per_class is not None:
            return self._per_class
        right, answered, true = self._counts()
        known = np.where(true > 0, 1.0, np.nan)
        with np.errstate(invalid="ignore"):
            precision, recall, f1 = right / answered * known, right / true, 2 * right / (answered + true) * known
        average = average_precisions(np.concatenate(self._labels), np.concatenate(self._probabilities))
        self._per_class = PerClass(true, average, precision, recall, f1)
        return self._per_class

    def rows(self) -> Iterator[dict[str, int | float]]:
        """`per_class`, class by class."""
        per_class = self.per_class()
        for row in zip(*(figures.tolist() for figures in per_class), strict=True):
            yield dict(zip(per_class._fields, row, strict=True))

    def table(self, class_names: Sequence[str]) -> Iterator[list[Any]]:
        """Yield the header, then for each class name and figures; empty cells for what is not a number."""
        yield ["class", *PerClass._fields]
        for name, (images, *figures) in zip(class_names, (row.values() for row in self.rows()), strict=True):
            yield [name, images, *("" if np.isnan(figure) else f"{figure:.6f}" for figure in figures)]

    def _counts(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Images of each class, (K,): answered rightly, answered, and true."""
        is_answered, is_true = np.concatenate(self._probabilities) >= THRESHOLD, np.concatenate(self._labels)
        return (is_answered & is_true).sum(axis=0), is_answered.sum(axis=0), is_true.sum(axis=0)


def average_precisions(is_true_NK: np.ndarray, score_NK: np.ndarray) -> np.ndarray:
    """For each class the mean, over the images that have it, of the precision down to and with that image, (K,).

    Images are ordered by their score; those of one score are answered together, so that their order does not matter:
    sum over thresholds of (recall - recall before) times precision, without interpolation. Not a number for a class
    without an image.
    """
    found = np.full(is_true_NK.shape[1], np.nan)
    for k in np.flatnonzero(is_true_NK.any(axis=0)):
        order = np.argsort(-score_NK[:, k], kind="stable")
        score_N, is_true_N = score_NK[order, k], is_true_NK[order, k]
        last = np.append(np.flatnonzero(np.diff(score_N)), len(score_N) - 1)  # of each score
        right = np.cumsum(is_true_N)[last]
        found[k] = (np.diff(right, prepend=0) * right / (last + 1)).sum() / right[-1]
    return found


class MultilabelEvaluator:
    """Mean average precision, F1 and mean loss over a full split.

    Args:
      split: the examples.
      step: (state, batch) -> the objective's sums "loss" and "weight", and the fields of `score`.
    """

    def __init__(self, split: Split, step: Callable[[Any, Batch], Results]):
        self._split, self._step = split, step

    def run(self, state: Any) -> Iterator[tuple[str, float]]:
        """Yields "loss", per example, what `Scores.results` yields, and "images", the number of examples.

        Raises:
          ValueError: not one image of the split could be read, or none has a label.
        """
        scores, loss = Scores(len(self._split.class_names)), 0.0
        for results in results_of(self._split.open_batches, self._step, state):
            loss += float(results["loss"])
            scores.add(counted_rows(results))
        if not scores.images:
            raise ValueError(f"No image of the {self._split.name} split could be read: there is nothing to evaluate.")
        yield "loss", loss / scores.images
        yield from scores.results()
        yield "images", float(scores.images)
