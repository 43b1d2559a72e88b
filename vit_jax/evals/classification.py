"""Metrics of classifiers whose images have one label: accuracy by class, loss, calibration, confusion matrix, mistakes.

`predict` runs on the devices; every process gets the predictions of all images and adds them up on the host, so that
memory does not grow with the images.

Legend: B global batch, K outputs of the network, A outputs that may be predicted, L classes of the data, N images of a
batch that count, T most probable outputs: five, or all of fewer.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.arrays import Batch
from vit_jax.evals.runner import Results, Split, means_of, sum_over
from vit_jax.evals.uncertainty import Calibration, wilson

FIRST = 5
LARGEST_CONFUSION = 4_000_000  # classes times outputs, for example 2,000 by 2,000: 64 MB
MOST_MISTAKES = 24  # that are kept


class Predictions(NamedTuple):
    """Predictions of some images, on the host.

    Attributes:
      record_N: numbers of the images in the split.
      label_N: their classes, in the numbering of the data.
      class_NT: numbers of outputs, the most probable first; of equal ones the lower number.
      probability_NT: float32, their softmax probabilities; not finite if a logit is not.
      loss_N: softmax cross-entropy of the output of the class.
    """

    record_N: np.ndarray
    label_N: np.ndarray
    class_NT: np.ndarray
    probability_NT: np.ndarray
    loss_N: np.ndarray

    @classmethod
    def of(cls, record_N: np.ndarray, rows: Mapping[str, np.ndarray]) -> "Predictions":
        """Return the predictions of images from their rows of the results of `predict`."""
        return cls(record_N, *(rows[name] for name in ("label_B", "class_BT", "probability_BT", "loss_B")))


def predict(logits_BK: jax.Array, batch: Batch, is_allowed_K: jax.Array, output_L: jax.Array) -> Results:
    """Return the fields of `Predictions` for a batch, and "mask_B".

    Args:
      logits_BK: float32.
      batch: their images.
      is_allowed_K: bool; other outputs are ignored, as if the network did not have them.
      output_L: the output of each class of the data, for the loss.
    """
    allowed_BK = jnp.where(is_allowed_K, logits_BK, -jnp.inf)
    log_BK = jax.nn.log_softmax(allowed_BK)
    class_BT = jax.lax.top_k(allowed_BK, min(FIRST, logits_BK.shape[1]))[1]
    loss_B1 = -jnp.take_along_axis(log_BK, output_L[batch.label_B][:, None], axis=1)
    return {
        "label_B": batch.label_B,
        "class_BT": class_BT,
        "probability_BT": jnp.exp(jnp.take_along_axis(log_BK, class_BT, axis=1)),
        "loss_B": loss_B1[:, 0],
        "mask_B": batch.mask_B,
    }


class Mistake(NamedTuple):
    """A wrong prediction: record, its class, the predicted output and its probability."""

    record: int
    label: int
    predicted: int
    probability: float


class ClassMetrics:
    """Sums over predictions.

    Attributes:
      images_L, top1_L, top5_L: images of each class, and those with a right prediction first, or among the first five.
      loss: sum of softmax cross-entropy.
      calibration: of the first predictions.
      output_A: the outputs that may be predicted, ascending.
      confusion_2LA: images of each class by first prediction, wrong ones [0] and right ones [1] (an image may have
        several right outputs); None if it would be too large.
      mistakes: the most confident ones, the worst first.
    """

    def __init__(self, num_classes: int, output_A: np.ndarray) -> None:
        self.images_L, self.top1_L, self.top5_L = np.zeros((3, num_classes), np.int64)
        self.loss = 0.0
        self.calibration = Calibration()
        self.output_A = output_A
        is_small = num_classes * len(output_A) <= LARGEST_CONFUSION
        self.confusion_2LA = np.zeros((2, num_classes, len(output_A)), np.int64) if is_small else None
        self.mistakes: list[Mistake] = []

    def add(self, predictions: Predictions, is_right_NT: np.ndarray) -> None:
        """Add predictions; `is_right_NT` is bool."""
        label_N, first_N = predictions.label_N, predictions.class_NT[:, 0]
        is_right_N, confidence_N = is_right_NT[:, 0], predictions.probability_NT[:, 0]
        for counts_L, counted_N in (
            (self.images_L, np.ones(len(label_N), bool)),
            (self.top1_L, is_right_N),
            (self.top5_L, is_right_NT.any(axis=1)),
        ):
            counts_L += np.bincount(label_N[counted_N], minlength=len(counts_L))
        self.loss += float(predictions.loss_N.astype(np.float64).sum())
        self.calibration.add(confidence_N, is_right_N)
        if self.confusion_2LA is not None:
            place_N = np.searchsorted(self.output_A, first_N)
            np.add.at(self.confusion_2LA, (is_right_N.astype(int), label_N, place_N), 1)
        wrong = np.flatnonzero(~is_right_N)
        wrong = wrong[np.argsort(-confidence_N[wrong], kind="stable")][:MOST_MISTAKES]
        rows = zip(predictions.record_N[wrong], label_N[wrong], first_N[wrong], confidence_N[wrong], strict=True)
        new = [Mistake(int(record), int(label), int(one), float(p)) for record, label, one, p in rows]
        self.mistakes = sorted(self.mistakes + new, key=lambda one: (-one.probability, one.record))[:MOST_MISTAKES]

    @property
    def images(self) -> int:
        """Number of images."""
        return int(self.images_L.sum())

    def accuracies(self) -> Iterator[tuple[str, float, tuple[float, float]]]:
        """Yield "top1_accuracy" and "top5_accuracy" with their 95 % intervals."""
        for name, right_L in (("top1_accuracy", self.top1_L), ("top5_accuracy", self.top5_L)):
            right = float(right_L.sum())
            yield name, right / self.images, wilson(right, self.images)

    def confused(self, most: int) -> list[tuple[int, int, int]]:
        """Return the most frequent mistakes as (class, output, images), of equal ones the lower numbers first."""
        if self.confusion_2LA is None:
            return []
        labels, places = np.nonzero(self.confusion_2LA[0])
        counts = self.confusion_2LA[0, labels, places]
        order = np.argsort(-counts, kind="stable")[:most]
        return [(int(labels[i]), int(self.output_A[places[i]]), int(counts[i])) for i in order]

    def table(self, class_names: Sequence[str], listed: Sequence[int]) -> Iterator[list[Any]]:
        """Yield the header, then for each listed class: name, images, right ones, accuracies with intervals.

        Accuracies are empty without images.
        """
        accuracies = [f"top{place}_{end}" for place in (1, 5) for end in ("accuracy", "low", "high")]
        yield ["class", "images", "top1_correct", *accuracies]
        for number in listed:
            images, counts = int(self.images_L[number]), (int(self.top1_L[number]), int(self.top5_L[number]))
            shares = [(count / images, *wilson(count, images)) if images else ("", "", "") for count in counts]
            cells = [f"{share:.6f}" if images else "" for triple in shares for share in triple]
            yield [class_names[number], images, counts[0], *cells]


class ClassificationEvaluator:
    """Accuracy and mean loss over a split.

    Args:
      split: the examples.
      step: (state, batch) -> sums of "loss", "correct" and "weight" over the examples that count, as objectives return
        them; over patches if patches are predicted.
    """

    def __init__(self, split: Split, step: Callable[[Any, Batch], Results]):
        self._split, self._step = split, step

    def run(self, state: Any) -> Iterator[tuple[str, float]]:
        """Yield "loss" and "accuracy", both per example, and "images", the number of examples.

        Raises:
          ValueError: no image of the split is readable.
        """
        totals = sum_over(self._split.open_batches, self._step, state)
        if not totals.get("weight"):
            raise nothing_readable(self._split)
        yield from means_of(totals).items()
        yield "images", float(totals.get("images", totals["weight"]))


def nothing_readable(split: Split) -> ValueError:
    """Return the error for a split without readable images."""
    return ValueError(f"No image of the {split.name} split could be read: there is nothing to evaluate.")
