"""Metrics of classifiers whose images have one label: accuracy by class, loss, calibration, confusion matrix, mistakes.

`predict` runs on the devices; every process gets the predictions of all images and adds them up on the host, so that
memory does not grow with the images.

Legend: B global batch, K outputs of the network, A outputs that may be predicted, L classes of the data, N images of a
batch that count, T most probable outputs: five, or all of fewer.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypedDict

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.arrays import Batch
from vit_jax.config.evaluators import metric_text
from vit_jax.evals.label_map import Labelled
from vit_jax.evals.runner import Results, Rows, Split, require_images, sum_over
from vit_jax.objectives.sums import compute_means

NORMAL_QUANTILE = 1.959963984540054  # two-sided 95 %
BINS = 15
FIRST = 5
LARGEST_CONFUSION = 4_000_000  # classes times outputs, for example 2,000 by 2,000: 64 MB
MOST_MISTAKES = 24  # that are kept
CONFUSED_SHOWN = 3
CONFUSED_KEPT = 50


def wilson(correct: float, images: float) -> tuple[float, float]:
    """Return the 95 % score interval of a fraction (Wilson 1927).

    Unlike p ± 2 standard errors it stays within [0, 1] and is useful if all predictions are right, or none.

    Args:
      correct: 0 to `images`.
      images: more than 0, independent of each other: copies of an image or frames of a film make it too narrow.
    """
    z2 = NORMAL_QUANTILE**2
    share = correct / images
    middle = (share + z2 / (2 * images)) / (1 + z2 / images)
    half = (
        NORMAL_QUANTILE
        * math.sqrt(share * (1 - share) / images + z2 / (4 * images**2))
        / (1 + z2 / images)
    )
    return max(0.0, middle - half), min(1.0, middle + half)


class Bin(NamedTuple):
    """Predictions with confidences above `low`, up to `high`; mean confidence and accuracy are 0 without images."""

    low: float
    high: float
    images: int
    confidence: float
    accuracy: float


class Calibration:
    """Counts by confidence, the probability of the predicted class, in bins of equal width (Guo et al., ICML 2017)."""

    def __init__(self) -> None:
        self._images, self._confidence, self._right = np.zeros((3, BINS))

    def add(self, confidence_N: np.ndarray, is_right_N: np.ndarray) -> None:
        """Count predictions with confidences in [0, 1]."""
        place_N = np.clip(
            np.ceil(confidence_N.astype(np.float64) * BINS).astype(int) - 1, 0, BINS - 1
        )
        self._images += np.bincount(place_N, minlength=BINS)
        self._confidence += np.bincount(place_N, confidence_N, BINS)
        self._right += np.bincount(place_N, is_right_N, BINS)

    @property
    def error(self) -> float:
        """Expected calibration error: mean over images of |accuracy - mean confidence| in the bin of the image."""
        return float(np.abs(self._right - self._confidence).sum() / self._images.sum())

    def bins(self) -> Iterator[Bin]:
        """Yield all bins from low confidence to high."""
        for number, images in enumerate(self._images):
            means = (
                float(sums[number] / max(images, 1)) for sums in (self._confidence, self._right)
            )
            yield Bin(number / BINS, (number + 1) / BINS, int(images), *means)


def predict(
    logits_BK: jax.Array, batch: Batch, is_allowed_K: jax.Array, output_L: jax.Array
) -> Results:
    """Return for each image of a batch "label_B", "class_BT", "probability_BT", "loss_B" and "mask_B".

    "class_BT" has the numbers of outputs, the most probable first, of equal ones the lower number; "probability_BT" has
    their softmax probabilities, float32, not finite if a logit is not; "loss_B" is the cross-entropy.

    Outputs that are not allowed are ignored, as if the network did not have them. `output_L` is the output of each
    class of the data, for the loss.
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


Confusion = TypedDict("Confusion", {"class": str, "answer": str, "images": int, "of": int})
"""A class, a predicted class, the number of its images with this prediction, and of all its images."""
NamedMistake = TypedDict(
    "NamedMistake", {"image": str, "class": str, "answer": str, "probability": float}
)
"""The image of a mistake, its class, the predicted class and its probability."""


class ClassMetrics:
    """Metrics of predictions.

    Attributes:
      labelled: the images.
      images_L, top1_L, top5_L: numbers of images of each class, and of those with a correct top-1 or top-5 prediction.
      loss: sum of softmax cross-entropy.
      calibration: of the top-1 predictions.
      output_A: the outputs that may be predicted, ascending.
      confusion_2LA: images of each class by top-1 prediction, wrong ones [0] and right ones [1] (an image may have
        several right outputs); None if it would be too large.
      wrong: the most confident mistakes, the worst first.
    """

    probabilities = "probability_BT"  # in the rows of `predict`
    image_columns = ("class", "answer", "probability", "is_right")  # of `image_rows`

    def __init__(self, labelled: Labelled) -> None:
        self.labelled = labelled
        label_map = labelled.label_map
        num_classes = len(label_map.output_L)
        self.output_A = np.flatnonzero(label_map.is_allowed_K)
        self.images_L, self.top1_L, self.top5_L = np.zeros((3, num_classes), np.int64)
        self.loss = 0.0
        self.calibration = Calibration()
        self.wrong = list[Mistake]()
        self._has_loss = label_map.has_loss
        shape = num_classes, len(self.output_A)
        self.confusion_2LA = (
            np.zeros((2, *shape), np.int64) if math.prod(shape) <= LARGEST_CONFUSION else None
        )
        if self.confusion_2LA is None:
            size = f"{num_classes:,} classes and {len(self.output_A):,} answers"
            labelled.notes.append(
                f"confusions are not counted: the matrix of {size} would take too much memory."
            )

    def add(self, rows: Rows) -> None:
        """Add the rows of `predict`, and "record_B", for images that count."""
        record_N = rows["record_B"]
        label_N = rows["label_B"]
        class_NT = rows["class_BT"]
        first_N = class_NT[:, 0]
        is_right_NT = self.labelled.label_map.is_right(record_N, label_N, class_NT)
        is_right_N = is_right_NT[:, 0]
        confidence_N = rows["probability_BT"][:, 0]
        for counts_L, counted_N in (
            (self.images_L, np.ones(len(label_N), bool)),
            (self.top1_L, is_right_N),
            (self.top5_L, is_right_NT.any(axis=1)),
        ):
            counts_L += np.bincount(label_N[counted_N], minlength=len(counts_L))
        self.loss += float(rows["loss_B"].astype(np.float64).sum())
        self.calibration.add(confidence_N, is_right_N)
        if self.confusion_2LA is not None:
            place_N = np.searchsorted(self.output_A, first_N)
            np.add.at(self.confusion_2LA, (is_right_N.astype(int), label_N, place_N), 1)
        wrong = np.flatnonzero(~is_right_N)
        wrong = wrong[np.argsort(-confidence_N[wrong], kind="stable")][:MOST_MISTAKES]
        columns = record_N[wrong], label_N[wrong], first_N[wrong], confidence_N[wrong]
        new = list(map(Mistake, *(column.tolist() for column in columns)))
        self.wrong = sorted(self.wrong + new, key=lambda one: (-one.probability, one.record))[
            :MOST_MISTAKES
        ]

    @property
    def images(self) -> int:
        """Number of images."""
        return int(self.images_L.sum())

    def values(self) -> dict[str, Any]:
        """Return the metrics by name; "loss" is None if an image has several right outputs."""
        top1 = int(self.top1_L.sum())
        top5 = int(self.top5_L.sum())
        return {
            "top1_accuracy": top1 / self.images,
            "top1_interval": list(wilson(top1, self.images)),
            "top5_accuracy": top5 / self.images,
            "top5_interval": list(wilson(top5, self.images)),
            "loss": self.loss / self.images if self._has_loss else None,
            "calibration_error": self.calibration.error,
        }

    def shown(self) -> dict[str, str]:
        """Return `values` as text: intervals beside their accuracies."""
        values = self.values()
        intervals = {
            f"{name}_accuracy": values.pop(f"{name}_interval") for name in ("top1", "top5")
        }
        text = {
            name: metric_text(name, value) for name, value in values.items() if value is not None
        }
        beside = {
            name: f"  (95 %: {low:.2%} to {high:.2%})" for name, (low, high) in intervals.items()
        }
        return {name: words + beside.get(name, "") for name, words in text.items()}

    def details(self) -> dict[str, object]:
        """Return metrics of classes and images by name."""
        return {
            "most_confused": self.confused(CONFUSED_KEPT),
            "most_confident_mistakes": self.mistakes(),
            "calibration_bins": [one._asdict() for one in self.calibration.bins()],
        }

    def worst(self) -> dict[str, str]:
        """Return the most frequent mistakes as a line of text, by its name; {} without mistakes."""
        confused = self.confused(CONFUSED_SHOWN)
        pairs = [
            f"{p['class']} as {p['answer']} ({p['images']:,} of {p['of']:,})" for p in confused
        ]
        return {"most_confused": ", ".join(pairs)} if pairs else {}

    def confused(self, most: int) -> list[Confusion]:
        """Return the most frequent mistakes: class, predicted class, images, and images of the class.

        Of equally frequent ones those with the lower numbers come first.
        """
        if self.confusion_2LA is None:
            return []
        names = self.labelled.source.class_names
        output_names = self.labelled.label_map.output_names
        labels, places = np.nonzero(self.confusion_2LA[0])
        counts = self.confusion_2LA[0, labels, places]
        chosen = np.argsort(-counts, kind="stable")[:most]
        return [
            {
                "class": names[label],
                "answer": output_names[self.output_A[place]],
                "images": count,
                "of": int(self.images_L[label]),
            }
            for label, place, count in zip(
                *(x[chosen].tolist() for x in (labels, places, counts)), strict=True
            )
        ]

    def mistakes(self) -> list[NamedMistake]:
        """Return the most confident mistakes, the worst first."""
        source = self.labelled.source
        output_names = self.labelled.label_map.output_names
        return [
            {
                "image": source.name_of(one.record),
                "class": source.class_names[one.label],
                "answer": output_names[one.predicted],
                "probability": one.probability,
            }
            for one in self.wrong
        ]

    def image_rows(self, rows: Rows) -> Iterator[list[object]]:
        """Yield for each image the cells of `image_columns`; arguments as for `add`."""
        is_right_N = self.labelled.label_map.is_right(
            rows["record_B"], rows["label_B"], rows["class_BT"]
        )[:, 0]
        names = self.labelled.source.class_names
        output_names = self.labelled.label_map.output_names
        columns = rows["label_B"], rows["class_BT"][:, 0], rows["probability_BT"][:, 0], is_right_N
        for label, output, probability, is_right in zip(*columns, strict=True):
            yield [names[label], output_names[output], f"{probability:.6f}", int(is_right)]

    def tables(self) -> dict[str, list[list[object]]]:
        """Return tables for files by name: "classes", and "confusion" if it is not too large."""
        tables = {"classes": [*self.class_rows()], "confusion": [*self.confusion_rows()]}
        return {name: rows for name, rows in tables.items() if rows}

    def class_rows(self) -> Iterator[list[object]]:
        """Yield the header, then for each class with images: name, images, right ones, accuracies with intervals.

        Accuracies are empty without images.
        """
        accuracies = [
            f"top{place}_{end}" for place in (1, 5) for end in ("accuracy", "low", "high")
        ]
        yield ["class", "images", "top1_correct", *accuracies]
        for number in self.labelled.label_map.listed.tolist():
            images = int(self.images_L[number])
            counts = (int(self.top1_L[number]), int(self.top5_L[number]))
            shares = [
                (count / images, *wilson(count, images)) if images else ("", "", "")
                for count in counts
            ]
            cells = [f"{share:.6f}" if images else "" for triple in shares for share in triple]
            yield [self.labelled.source.class_names[number], images, counts[0], *cells]

    def confusion_rows(self) -> Iterator[list[object]]:
        """Yield the header, then for each class with images: name, images by predicted class. Empty if too large."""
        if self.confusion_2LA is None:
            return
        counts_LA = self.confusion_2LA.sum(axis=0)
        label_map = self.labelled.label_map
        yield ["class", *(label_map.output_names[output] for output in self.output_A)]
        for label in label_map.listed.tolist():
            yield [self.labelled.source.class_names[label], *counts_LA[label].tolist()]


@dataclasses.dataclass(frozen=True)
class ClassificationEvaluator:
    """Accuracy and mean loss over a split.

    Attributes:
      split: the examples.
      step: (state, batch) -> sums of "loss", "correct" and "weight" over the examples that count, as objectives return
        them; over patches if patches are predicted.
    """

    split: Split
    step: Callable[[Any, Batch], Results]

    def run(self, state: Any) -> Iterator[tuple[str, float]]:
        """Yield "loss" and "accuracy", both per example, and "images", the number of examples.

        Raises:
          ValueError: no image of the split is readable.
        """
        totals = sum_over(self.split.open_batches, self.step, state)
        require_images(float(totals.get("weight", 0)), self.split.name)
        yield from compute_means(totals).items()
        yield "images", float(totals.get("images", totals["weight"]))
