"""Metrics of classifiers whose images may have several labels: each class is a yes-no question.

Legend: B global batch, K classes, N images that count.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from vit_jax.arrays import Batch
from vit_jax.config.evaluators import metric_text
from vit_jax.data.kinds.table import BETWEEN
from vit_jax.evals.runner import Results, Rows, Split, counted, require_images, results_of
from vit_jax.evals.single_label import CONFUSED_SHOWN

THRESHOLD = 0.5  # least probability of a predicted class


class PerClass(NamedTuple):
    """Metrics of each class, (K,). All but the first are NaN for a class without images."""

    images: np.ndarray
    average_precision: np.ndarray
    precision: np.ndarray
    recall: np.ndarray
    f1: np.ndarray


class MultilabelMetrics:
    """Metrics of probabilities, which are kept as they come: average precision needs all of them.

    Attributes:
      images: number of images.
      loss: sum over them.
    """

    probabilities = "probability_BK"  # in the rows of `score_classes`

    def __init__(self, class_names: Sequence[str]) -> None:
        self.images = 0
        self.loss = 0.0
        self._class_names = class_names
        self.image_columns = ("labels", "answers", "is_right", *class_names)  # of `image_rows`
        self._per_class: PerClass | None = None  # of all images so far
        shape = 0, len(class_names)
        self._probabilities = [np.zeros(shape, np.float32)]
        self._labels = [np.zeros(shape, bool)]

    def add(self, rows: Rows) -> None:
        """Add the rows of `score_classes` for images that count."""
        self._probabilities.append(rows["probability_BK"])
        self._labels.append(rows["label_BK"] > 0)
        self.images = self.images + len(rows["loss_B"])
        self._per_class = None
        self.loss += float(rows["loss_B"].astype(np.float64).sum())

    def values(self) -> dict[str, float]:
        """Return "mean_average_precision", "f1_micro" and "f1_macro", means over the classes with images, and "loss".

        Raises:
          ValueError: no image has a label.
        """
        per_class = self.per_class()
        if not per_class.images.any():
            raise ValueError("No readable image has a label: there is nothing to evaluate.")
        right, predicted, true = self._counts()
        return {
            "mean_average_precision": float(np.nanmean(per_class.average_precision)),
            "f1_micro": float(2 * right.sum() / (predicted.sum() + true.sum())),
            "f1_macro": float(np.nanmean(per_class.f1)),
            "loss": self.loss / self.images,
        }

    def shown(self) -> dict[str, str]:
        """Return `values` as text."""
        return {name: metric_text(name, value) for name, value in self.values().items()}

    def details(self) -> dict[str, Any]:
        """Return the metrics of each class, None for NaN."""
        rows = (dict(zip(PerClass._fields, row, strict=True)) for row in self._rows())
        named = zip(self._class_names, rows, strict=True)
        return {
            "classes": [
                {"class": n, **{k: None if x != x else x for k, x in row.items()}}
                for n, row in named
            ]
        }

    def worst(self) -> dict[str, str]:
        """Return the classes of the lowest average precision as a line of text, by its name."""
        known = [one for one in self.details()["classes"] if one["images"]]
        ranked = sorted((one["average_precision"], one["class"]) for one in known)[:CONFUSED_SHOWN]
        return {"lowest_precision": ", ".join(f"{name} {value:.2%}" for value, name in ranked)}

    def per_class(self) -> PerClass:
        """Return the metrics of each class; classes of probability `THRESHOLD` or more are predicted.

        Precision is NaN if a class is never predicted.
        """
        if self._per_class is None:
            right, predicted, true = self._counts()
            known = np.where(true > 0, 1.0, np.nan)
            with np.errstate(invalid="ignore"):
                precision = right / predicted * known
                recall = right / true
                f1 = 2 * right / (predicted + true) * known
            average = average_precisions(
                np.concatenate(self._labels), np.concatenate(self._probabilities)
            )
            self._per_class = PerClass(true, average, precision, recall, f1)
        return self._per_class

    def image_rows(self, rows: Rows) -> Iterator[list[object]]:
        """Yield for each image labels, predicted labels, whether they are equal, and probabilities of all classes."""
        for is_true_K, probability_K in zip(
            rows["label_BK"] > 0, rows["probability_BK"], strict=True
        ):
            true = self._joined(is_true_K)
            predicted = self._joined(probability_K >= THRESHOLD)
            yield [true, predicted, int(true == predicted), *(f"{p:.6f}" for p in probability_K)]

    def _joined(self, is_class_K: np.ndarray) -> str:
        return BETWEEN.join(self._class_names[k] for k in np.flatnonzero(is_class_K).tolist())

    def tables(self) -> dict[str, list[list[object]]]:
        """Return tables for files by name: "classes"."""
        return {"classes": [*self.class_rows()]}

    def class_rows(self) -> Iterator[list[object]]:
        """Yield the header, then for each class name and metrics; empty cells for NaN."""
        yield ["class", *PerClass._fields]
        for name, (images, *values) in zip(self._class_names, self._rows(), strict=True):
            yield [name, images, *("" if np.isnan(value) else f"{value:.6f}" for value in values)]

    def _rows(self) -> Iterator[tuple[Any, ...]]:
        return zip(*(values.tolist() for values in self.per_class()), strict=True)

    def _counts(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the images of each class, (K,): rightly predicted, predicted, and labelled."""
        is_predicted = np.concatenate(self._probabilities) >= THRESHOLD
        is_true = np.concatenate(self._labels)
        return (is_predicted & is_true).sum(axis=0), is_predicted.sum(axis=0), is_true.sum(axis=0)


def average_precisions(is_true_NK: np.ndarray, score_NK: np.ndarray) -> np.ndarray:
    """Return the average precision of each class, (K,), without interpolation; NaN for a class without an image."""
    from sklearn.metrics import (
        average_precision_score,  # here, because scikit-learn takes a second to load
    )

    score_NK = np.nan_to_num(score_NK, nan=-1.0)  # of a diverged network; scikit-learn rejects NaN
    average_K = np.full(is_true_NK.shape[1], np.nan)
    for k in np.flatnonzero(is_true_NK.any(axis=0)):
        average_K[k] = average_precision_score(is_true_NK[:, k], score_NK[:, k])
    return average_K


@dataclasses.dataclass(frozen=True)
class MultilabelEvaluator:
    """Mean average precision, F1 and mean loss over a split.

    Attributes:
      split: the examples.
      step: (state, batch) -> the objective's sums "loss" and "weight", and the results of `score_classes`.
    """

    split: Split
    step: Callable[[Any, Batch], Results]

    def run(self, state: Any) -> Iterator[tuple[str, float]]:
        """Yield the values of `MultilabelMetrics`, with the objective's loss, and "images", the number of examples.

        Raises:
          ValueError: no image of the split is readable, or none has a label.
        """
        metrics = MultilabelMetrics(self.split.class_names)
        loss = 0.0
        for results in results_of(self.split.open_batches, self.step, state):
            loss += float(results["loss"])
            metrics.add(counted(results))
        require_images(metrics.images, self.split.name)
        first = {"loss": loss / metrics.images}
        yield from (first | metrics.values() | first).items()
        yield "images", float(metrics.images)
