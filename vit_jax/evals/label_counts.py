"""Predictions of images that may have several labels, and the metrics that follow from them.

Each class is a yes-no question. All probabilities are kept: average precision needs them.

Legend: K classes, N images that count.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from vit_jax.evals.calibration import Calibration
from vit_jax.evals.step_results import Rows
from vit_jax.storage.files import JsonObject

THRESHOLD = 0.5  # least probability of a predicted class


class PerClass(NamedTuple):
    """Metrics of each class, (K,). All but the first are NaN for a class without images."""

    images: np.ndarray
    average_precision: np.ndarray
    precision: np.ndarray
    recall: np.ndarray
    f1: np.ndarray


class LabelTotals(NamedTuple):
    """Numbers of images of each class, (K,): rightly predicted, predicted, and labelled."""

    right: np.ndarray
    predicted: np.ndarray
    labelled: np.ndarray


class LabelCounts:
    """Probabilities and labels of images. Its properties are their metrics.

    Attributes:
      images: number of images.
      loss_sum: sum of the losses of the images.
    """

    def __init__(self, num_classes: int) -> None:
        self.images = 0
        self.loss_sum = 0.0
        self._probabilities = [np.zeros((0, num_classes), np.float32)]
        self._labels = [np.zeros((0, num_classes), bool)]
        self._per_class: PerClass | None = None  # the metrics of all images so far

    def add(self, rows: Rows) -> None:
        """Add the rows of `score_classes` for images that count."""
        self._probabilities.append(rows["probability_BK"])
        self._labels.append(rows["label_BK"] > 0)
        self._per_class = None
        self.images += len(rows["loss_B"])
        self.loss_sum += float(rows["loss_B"].astype(np.float64).sum())

    @property
    def mean_average_precision(self) -> float:
        """Mean of the average precisions of the classes with images.

        Raises:
          ValueError: no image has a label.
        """
        if not self.count().labelled.any():
            raise ValueError("No readable image has a label: there is nothing to evaluate.")
        return float(np.nanmean(self.per_class().average_precision))

    @property
    def f1_micro(self) -> float:
        """F1 of all predicted classes of all images."""
        totals = self.count()
        return float(2 * totals.right.sum() / (totals.predicted.sum() + totals.labelled.sum()))

    @property
    def f1_macro(self) -> float:
        """Mean of F1 over the classes with images."""
        return float(np.nanmean(self.per_class().f1))

    @property
    def loss(self) -> float:
        """Mean of the losses of the images."""
        return self.loss_sum / self.images

    @property
    def calibration_error(self) -> float:
        """Expected calibration error of the probabilities, each the answer to a yes-no question."""
        calibration = Calibration()
        probability_NK = np.concatenate(self._probabilities)
        label_NK = np.concatenate(self._labels)
        calibration.add(probability_NK.ravel(), label_NK.ravel())
        return calibration.error

    def per_class(self) -> PerClass:
        """Return the metrics of each class.

        Classes of probability `THRESHOLD` or more are predicted.

        Precision is NaN if a class is never predicted.
        """
        if self._per_class is None:
            self._per_class = self._compute_per_class()
        return self._per_class

    def _compute_per_class(self) -> PerClass:
        right_K, predicted_K, labelled_K = self.count()
        known_K = np.where(labelled_K > 0, 1.0, np.nan)
        with np.errstate(invalid="ignore"):
            precision_K = right_K / predicted_K * known_K
            recall_K = right_K / labelled_K
            f1_K = 2 * right_K / (predicted_K + labelled_K) * known_K
        label_NK = np.concatenate(self._labels)
        probability_NK = np.concatenate(self._probabilities)
        average_K = average_precisions(label_NK, probability_NK)
        return PerClass(labelled_K, average_K, precision_K, recall_K, f1_K)

    def count(self) -> LabelTotals:
        """Return the numbers of images of each class."""
        is_predicted_NK = np.concatenate(self._probabilities) >= THRESHOLD
        is_labelled_NK = np.concatenate(self._labels)
        return LabelTotals(
            right=(is_predicted_NK & is_labelled_NK).sum(axis=0),
            predicted=is_predicted_NK.sum(axis=0),
            labelled=is_labelled_NK.sum(axis=0),
        )


def describe_classes(class_names: Sequence[str], per_class: PerClass) -> list[JsonObject]:
    """Return name and metrics of each class for JSON, None for NaN."""
    descriptions = []
    for k, class_name in enumerate(class_names):
        description: JsonObject = {"class": class_name}
        for metric, values_K in per_class._asdict().items():
            value = values_K[k].item()
            description[metric] = None if math.isnan(value) else value
        descriptions.append(description)
    return descriptions


def average_precisions(is_true_NK: np.ndarray, score_NK: np.ndarray) -> np.ndarray:
    """Return the average precision of each class, (K,), without interpolation.

    NaN for a class without an image.
    """
    from sklearn.metrics import average_precision_score  # takes a second to load

    score_NK = np.nan_to_num(score_NK, nan=-1.0)  # scikit-learn rejects NaN
    average_K = np.full(is_true_NK.shape[1], np.nan)
    for k in np.flatnonzero(is_true_NK.any(axis=0)):
        average_K[k] = average_precision_score(is_true_NK[:, k], score_NK[:, k])
    return average_K
