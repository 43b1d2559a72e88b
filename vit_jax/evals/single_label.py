"""Results on images with one label: metrics, confusions, mistakes and tables.

Legend: K outputs of the network, A outputs that may be predicted, L classes of the data, T most
probable outputs, P pairs of a class and a wrong output, N images of a batch that count. Rows keep the
B of a batch in their names; only N of them are left.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple, TypedDict

import numpy as np

from vit_jax.config.metric_names import (
    METRICS_FOR_LABEL_SETS,
    USUAL_METRICS,
    format_metric,
)
from vit_jax.evals.class_counts import ClassCounts
from vit_jax.evals.intervals import INTERVAL_OF, format_interval, wilson_interval
from vit_jax.evals.label_map import Labelled
from vit_jax.evals.running_metrics import NO_FURTHER_METRICS, ChosenMetrics, RunningMetrics
from vit_jax.evals.step_results import Rows
from vit_jax.storage.files import JsonObject

LARGEST_CONFUSION = 4_000_000  # classes times outputs, for example 2,000 by 2,000: 64 MB
MOST_MISTAKES = 24  # in memory
CONFUSED_SHOWN = 3
CONFUSED_KEPT = 50


class Mistake(NamedTuple):
    """A wrong prediction: record, its class, the predicted output and its probability."""

    record: int
    label: int
    predicted: int
    probability: float


Confusion = TypedDict(
    "Confusion",
    {
        "class": str,
        "answer": str,
        "images": int,
        "of": int,
    },
)
"""A class, a predicted class, the images with this prediction, and all of the class."""
NamedMistake = TypedDict(
    "NamedMistake",
    {
        "image": str,
        "class": str,
        "answer": str,
        "probability": float,
    },
)
"""The image of a mistake, its class, the predicted class and its probability."""


class ClassMetrics:
    """Metrics of predictions, and their forms for files and the terminal.

    `MultilabelMetrics` has the same methods for images with several labels. A class of the data may
    be several outputs of the network, each of which is then right.

    Attributes:
      labelled: the images; gets notes on what is not counted.
      counts: counts of the predictions by class.
      output_A: the outputs that may be predicted, ascending.
      confusion_2LA: images of each class by top-1 prediction, wrong ones [0] and right ones [1] (an
        image may have several right outputs); None if it would be too large.
      most_confident_mistakes: the mistakes of the highest probabilities, these first.
    """

    probabilities = "probability_BT"  # name of the rows that `evaluate` checks for NaN
    image_columns = ("class", "answer", "probability", "is_right")  # names for `image_rows`

    def __init__(
        self,
        labelled: Labelled,
        chosen: ChosenMetrics = NO_FURTHER_METRICS,
    ) -> None:
        label_map = labelled.label_map
        self.labelled = labelled
        self.counts = ClassCounts(label_map)
        self.output_A = np.flatnonzero(label_map.is_allowed_K)
        self.most_confident_mistakes = list[Mistake]()
        self.confusion_2LA = self._make_confusion()
        self._metrics = RunningMetrics(self.counts, chosen, always=USUAL_METRICS["one"])
        if chosen and not label_map.has_single_outputs:
            labelled.notes.append(
                "chosen metrics that need exactly one right output for each image are skipped."
            )

    def _make_confusion(self) -> np.ndarray | None:
        """Return zeros, or None and a note if the matrix would be too large."""
        num_classes = len(self.labelled.label_map.output_L)
        num_outputs = len(self.output_A)
        if num_classes * num_outputs <= LARGEST_CONFUSION:
            return np.zeros((2, num_classes, num_outputs), np.int64)

        size = f"{num_classes:,} classes and {num_outputs:,} answers"
        self.labelled.notes.append(
            f"confusions are not counted: the matrix of {size} would take too much memory."
        )
        return None

    def add(self, rows: Rows) -> None:
        """Add the rows of `predict`, and "record_B", for images that count."""
        self._metrics.add(rows)

        is_right_N = self.counts.find_right(rows)[:, 0]
        self._add_confusions(rows, is_right_N)
        self._add_mistakes(rows, is_right_N)

    def _add_confusions(self, rows: Rows, is_right_N: np.ndarray) -> None:
        if self.confusion_2LA is None:
            return
        predicted_N = rows["class_BT"][:, 0]
        column_N = np.searchsorted(self.output_A, predicted_N)
        cells = (is_right_N.astype(int), rows["label_B"], column_N)
        np.add.at(self.confusion_2LA, cells, 1)

    def _add_mistakes(self, rows: Rows, is_right_N: np.ndarray) -> None:
        confidence_N = rows["probability_BT"][:, 0]
        wrong = np.flatnonzero(~is_right_N)
        order = np.argsort(-confidence_N[wrong], kind="stable")
        most_confident = wrong[order][:MOST_MISTAKES]

        for row in most_confident.tolist():
            mistake = Mistake(
                record=int(rows["record_B"][row]),
                label=int(rows["label_B"][row]),
                predicted=int(rows["class_BT"][row, 0]),
                probability=float(confidence_N[row]),
            )
            self.most_confident_mistakes.append(mistake)

        self.most_confident_mistakes.sort(key=lambda one: (-one.probability, one.record))
        del self.most_confident_mistakes[MOST_MISTAKES:]

    @property
    def images(self) -> int:
        """Number of images."""
        return self.counts.images

    def values(self) -> JsonObject:
        """Return the metrics by name, with 95 % intervals.

        Metrics are None that are not finite, or not defined for images with several right outputs.
        """
        values: JsonObject = {}
        for name, value in self._metrics.compute().items():
            is_known = self._is_defined(name) and math.isfinite(value)
            values[name] = value if is_known else None
            if name in INTERVAL_OF:  # an accuracy, which is always known
                num_correct = value * self.images
                interval = wilson_interval(num_correct, self.images)
                values[INTERVAL_OF[name]] = list(interval)
        return values

    def _is_defined(self, name: str) -> bool:
        """Return whether a metric is defined: most need exactly one right output for each image."""
        return self.labelled.label_map.has_single_outputs or name in METRICS_FOR_LABEL_SETS

    def shown(self) -> dict[str, str]:
        """Return `values` as text: intervals beside their accuracies."""
        values = self.values()
        texts = {}
        for name, value in values.items():
            if value is None or name in INTERVAL_OF.values():
                continue
            texts[name] = format_metric(name, value)
            if name in INTERVAL_OF:
                texts[name] += f"  ({format_interval(values[INTERVAL_OF[name]])})"
        return texts

    def details(self) -> dict[str, object]:
        """Return metrics of classes and images by name."""
        bins = self.counts.calibration.bins()
        return {
            "most_confused": self.list_confusions(CONFUSED_KEPT),
            "most_confident_mistakes": self.name_mistakes(),
            "calibration_bins": [one._asdict() for one in bins],
        }

    def worst(self) -> dict[str, str]:
        """Return the most frequent mistakes as a line of text, by its name; {} without mistakes."""
        pairs = [_describe_confusion(pair) for pair in self.list_confusions(CONFUSED_SHOWN)]
        if not pairs:
            return {}
        return {"most_confused": ", ".join(pairs)}

    def list_confusions(self, most: int) -> list[Confusion]:
        """Return the most frequent pairs of class and wrong prediction.

        Among equally frequent pairs the lower numbers come first.
        """
        if self.confusion_2LA is None:
            return []
        class_names = self.labelled.source.class_names
        output_names = self.labelled.label_map.output_names

        wrong_LA = self.confusion_2LA[0]
        label_P, column_P = np.nonzero(wrong_LA)
        images_P = wrong_LA[label_P, column_P]
        order = np.argsort(-images_P, kind="stable")
        most_frequent = order[:most]

        confusions: list[Confusion] = []
        for pair in most_frequent.tolist():
            label = int(label_P[pair])
            output = int(self.output_A[column_P[pair]])
            confusions.append(
                {
                    "class": class_names[label],
                    "answer": output_names[output],
                    "images": int(images_P[pair]),
                    "of": int(self.counts.images_L[label]),
                }
            )
        return confusions

    def name_mistakes(self) -> list[NamedMistake]:
        """Return the most confident mistakes, with names in the place of numbers."""
        return [self._name_mistake(mistake) for mistake in self.most_confident_mistakes]

    def _name_mistake(self, mistake: Mistake) -> NamedMistake:
        """Return a mistake with names in the place of numbers."""
        source = self.labelled.source
        output_names = self.labelled.label_map.output_names
        return {
            "image": source.name_of(mistake.record),
            "class": source.class_names[mistake.label],
            "answer": output_names[mistake.predicted],
            "probability": mistake.probability,
        }

    def image_rows(self, rows: Rows) -> Iterator[list[object]]:
        """Yield for each image the cells of `image_columns`; arguments as for `add`."""
        class_names = self.labelled.source.class_names
        output_names = self.labelled.label_map.output_names
        is_right_N = self.counts.find_right(rows)[:, 0]
        for row, label in enumerate(rows["label_B"]):
            output = rows["class_BT"][row, 0]
            probability = rows["probability_BT"][row, 0]
            yield [
                class_names[label],
                output_names[output],
                f"{probability:.6f}",
                int(is_right_N[row]),
            ]

    def tables(self) -> dict[str, list[list[object]]]:
        """Return tables for files by name: "classes", and "confusion" if it is not too large."""
        tables = {"classes": list(self.class_rows())}
        if self.confusion_2LA is not None:
            tables["confusion"] = list(self.confusion_rows())
        return tables

    def class_rows(self) -> Iterator[list[object]]:
        """Yield the header, then for each class counts and accuracies with intervals.

        Accuracies are empty without images.
        """
        yield [
            "class",
            "images",
            "correct",
            "accuracy",
            "accuracy_low",
            "accuracy_high",
            "top5_accuracy",
            "top5_low",
            "top5_high",
        ]
        class_names = self.labelled.source.class_names
        for label in self.labelled.label_map.listed.tolist():
            images = int(self.counts.images_L[label])
            top1 = int(self.counts.top1_L[label])
            top5 = int(self.counts.top5_L[label])
            yield [
                class_names[label],
                images,
                top1,
                *_describe_share(top1, images),
                *_describe_share(top5, images),
            ]

    def confusion_rows(self) -> Iterator[list[object]]:
        """Yield the header, then for each class its name and images by predicted class.

        Yield nothing if the matrix is too large.
        """
        if self.confusion_2LA is None:
            return

        label_map = self.labelled.label_map
        output_names = [label_map.output_names[output] for output in self.output_A]
        yield ["class", *output_names]

        counts_LA = self.confusion_2LA.sum(axis=0)
        class_names = self.labelled.source.class_names
        for label in label_map.listed.tolist():
            counts_A = counts_LA[label]
            yield [class_names[label], *counts_A.tolist()]


def _describe_confusion(pair: Confusion) -> str:
    """Return a class, its wrong prediction and the numbers of images as text."""
    counts = f"{pair['images']:,} of {pair['of']:,}"
    return f"{pair['class']} as {pair['answer']} ({counts})"


def _describe_share(count: int, images: int) -> list[str]:
    """Return a fraction and its interval as text; empty cells without images."""
    if not images:
        return ["", "", ""]

    accuracy = count / images
    low, high = wilson_interval(count, images)
    return [f"{accuracy:.6f}", f"{low:.6f}", f"{high:.6f}"]
