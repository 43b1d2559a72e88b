"""Predictions of linear classifiers on frozen features, and their metrics.

Legend: N images, K classes.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import scipy.special

from vit_jax.config.metric_names import list_metrics
from vit_jax.evals.calibration import Calibration
from vit_jax.evals.features import Features
from vit_jax.evals.intervals import wilson_interval
from vit_jax.evals.label_counts import LabelCounts, describe_classes
from vit_jax.evals.least_squares import LinearClassifier
from vit_jax.evals.logistic import LogisticClassifier
from vit_jax.storage.files import JsonObject

Classifier = LogisticClassifier | LinearClassifier


@dataclasses.dataclass(frozen=True)
class ClassPredictions:
    """Predictions of images with known labels.

    Attributes:
      label_N: the labels.
      class_N: the predicted classes.
      confidence_N: probabilities of the predicted classes; None for a classifier without
        probabilities.
      loss_N: cross-entropies; None as `confidence_N`.
    """

    label_N: np.ndarray
    class_N: np.ndarray
    confidence_N: np.ndarray | None
    loss_N: np.ndarray | None

    @property
    def headline(self) -> float:
        """Accuracy: the fraction of right predictions."""
        return float((self.class_N == self.label_N).mean())

    def test_metrics(self) -> JsonObject:
        """Return "accuracy", "interval" and "test_images", and the metrics of probabilities."""
        num_images = len(self.label_N)
        interval = wilson_interval(self.headline * num_images, num_images)
        return {
            "accuracy": self.headline,
            "interval": interval,
            "test_images": num_images,
            **self.probability_metrics(),
        }

    def probability_metrics(self) -> dict[str, float]:
        """Return "loss" and "calibration_error"; {} for a classifier without probabilities."""
        if self.confidence_N is None or self.loss_N is None:
            return {}

        calibration = Calibration()
        is_right_N = self.class_N == self.label_N
        calibration.add(self.confidence_N, is_right_N)
        return {
            "loss": float(self.loss_N.mean()),
            "calibration_error": calibration.error,
        }

    def describe(self, num_classes: int) -> JsonObject:
        """Return the metrics, "images" and "correct" of each class, and "confusion".

        "confusion" has a row for each class, with its images by predicted class.
        """
        confusion_KK = np.zeros((num_classes, num_classes), np.int64)
        np.add.at(confusion_KK, (self.label_N, self.class_N), 1)
        return {
            "accuracy": self.headline,
            **self.probability_metrics(),
            "images": confusion_KK.sum(axis=1).tolist(),
            "correct": confusion_KK.diagonal().tolist(),
            "confusion": confusion_KK.tolist(),
        }


@dataclasses.dataclass(frozen=True)
class LabelPredictions:
    """Predictions of images that may have several labels.

    Attributes:
      label_NK: 0 or 1.
      logit_NK: logits of the classes.
    """

    label_NK: np.ndarray
    logit_NK: np.ndarray

    @property
    def loss_N(self) -> np.ndarray:
        """Cross-entropy of each image, summed over the classes."""
        losses_NK = np.logaddexp(0.0, self.logit_NK) - self.logit_NK * self.label_NK
        return np.asarray(losses_NK.sum(axis=1))

    @property
    def headline(self) -> float:
        """Mean average precision."""
        return self._count().mean_average_precision

    def test_metrics(self) -> JsonObject:
        """Return the metrics, and "test_images"."""
        counts = self._count()
        metrics: JsonObject = {}
        for name in list_metrics("several"):
            metrics[name] = getattr(counts, name)
        metrics["test_images"] = len(self.label_NK)
        return metrics

    def describe(self, num_classes: int) -> JsonObject:
        """Return the metrics, and "classes": the metrics of each class, in their order."""
        metrics = self.test_metrics()
        del metrics["test_images"]

        class_names = [str(number) for number in range(num_classes)]
        per_class = self._count().per_class()
        metrics["classes"] = describe_classes(class_names, per_class)
        return metrics

    def _count(self) -> LabelCounts:
        counts = LabelCounts(self.label_NK.shape[1])
        probability_NK = scipy.special.expit(self.logit_NK).astype(np.float32)
        rows = {
            "probability_BK": probability_NK,
            "label_BK": self.label_NK,
            "loss_B": self.loss_N,
        }
        counts.add(rows)
        return counts


def predict_features(classifier: Classifier, test: Features) -> ClassPredictions | LabelPredictions:
    """Return the predictions of a classifier on readable images."""
    if isinstance(classifier, LinearClassifier):
        return ClassPredictions(
            label_N=test.label_N,
            class_N=classifier.predict(test.feature_ND),
            confidence_N=None,
            loss_N=None,
        )
    if classifier.has_several_labels:
        logit_NK = classifier.logits(test.feature_ND)
        return LabelPredictions(test.label_N, logit_NK)

    log_NK = classifier.log_probabilities(test.feature_ND)
    rows = np.arange(len(test))
    class_N = log_NK.argmax(axis=1)
    return ClassPredictions(
        label_N=test.label_N,
        class_N=class_N,
        confidence_N=np.exp(log_NK[rows, class_N]),
        loss_N=-log_NK[rows, test.label_N],
    )


def join_predictions(
    parts: Sequence[ClassPredictions | LabelPredictions],
) -> ClassPredictions | LabelPredictions:
    """Return the predictions of several parts, all of one kind, as one."""
    kind: Any = type(parts[0])
    joined: dict[str, np.ndarray | None] = {}
    for field in dataclasses.fields(kind):
        arrays = [getattr(part, field.name) for part in parts]
        joined[field.name] = None
        if arrays[0] is not None:
            joined[field.name] = np.concatenate(arrays)

    predictions: ClassPredictions | LabelPredictions = kind(**joined)
    return predictions
