"""Evaluators of classification in a run: they measure training states on one split."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from vit_jax.arrays import Batch
from vit_jax.evals.class_counts import ClassCounts
from vit_jax.evals.label_counts import LabelCounts
from vit_jax.evals.label_map import build_identity_map
from vit_jax.evals.metric_functions import (
    NO_FURTHER_METRICS,
    ChosenMetrics,
    CustomSums,
    compute_metric,
)
from vit_jax.evals.runner import (
    Results,
    Split,
    add_sums,
    iterate_results,
    keep_counted,
    require_images,
)
from vit_jax.objectives.sums import compute_means


@dataclasses.dataclass(frozen=True)
class ClassificationEvaluator:
    """Accuracy and mean loss over a split, and chosen metrics.

    Attributes:
      split: the examples.
      step: (state, batch) -> sums of "loss", "correct" and "weight" over the examples that count,
        as objectives return them; over patches if patches are predicted. With chosen metrics also
        the rows of `make_measure`.
      chosen: further metrics.
    """

    split: Split
    step: Callable[[Any, Batch], Results]
    chosen: ChosenMetrics = NO_FURTHER_METRICS

    def run(self, state: Any) -> Iterator[tuple[str, float]]:
        """Yield "loss" and "accuracy", the chosen metrics, and "images", their number.

        Raises:
          ValueError: no image of the split is readable.
        """
        totals: dict[str, np.ndarray] = {}
        further = FurtherCounts(self.chosen, self.split.class_names)
        for results in iterate_results(self.split.open_batches, self.step, state):
            add_sums(totals, results)
            further.add(results)
        require_images(float(totals.get("weight", 0)), self.split.name)

        means = compute_means(totals)
        yield from means.items()
        for name, value in further.compute_metrics().items():
            if name not in means:  # a chosen metric that the objective reports is reported once
                yield name, value
        yield "images", float(totals.get("images", totals["weight"]))


class FurtherCounts:
    """Counts of predictions and sums for the chosen metrics of images with one label."""

    def __init__(self, chosen: ChosenMetrics, class_names: tuple[str, ...]) -> None:
        self._chosen = chosen
        self._counts = ClassCounts(build_identity_map(class_names))
        self._custom_sums = CustomSums(chosen.custom)

    def add(self, results: Mapping[str, np.ndarray]) -> None:
        """Add the rows of a batch. A step has rows only if metrics are chosen (`make_measure`)."""
        if not self._chosen:
            return
        rows = keep_counted(results)
        if self._chosen.built_in:
            self._counts.add(rows)
        self._custom_sums.add(rows)

    def compute_metrics(self) -> dict[str, Any]:
        """Return the chosen metrics by name, built-in ones first."""
        metrics = {}
        for name in self._chosen.built_in:
            metrics[name] = compute_metric(name, self._counts)
        return metrics | self._custom_sums.values()


@dataclasses.dataclass(frozen=True)
class MultilabelEvaluator:
    """Mean average precision, F1 and mean loss over a split, and chosen metrics.

    Attributes:
      split: the examples.
      step: (state, batch) -> the objective's sums "loss" and "weight", and the results of
        `score_classes`.
      chosen: further metrics.
    """

    split: Split
    step: Callable[[Any, Batch], Results]
    chosen: ChosenMetrics = NO_FURTHER_METRICS

    def run(self, state: Any) -> Iterator[tuple[str, float]]:
        """Yield the objective's loss, usual and chosen metrics, and "images", their number.

        Raises:
          ValueError: no image of the split is readable, or none has a label.
        """
        counts = LabelCounts(len(self.split.class_names))
        custom_sums = CustomSums(self.chosen.custom)
        loss = 0.0
        for results in iterate_results(self.split.open_batches, self.step, state):
            loss += float(results["loss"])
            rows = keep_counted(results)
            counts.add(rows)
            custom_sums.add(rows)
        require_images(counts.images, self.split.name)
        counts.require_labels()

        yield "loss", loss / counts.images
        for name in self.chosen.list_names("several"):
            value = compute_metric(name, counts)
            if name != "loss" and value is not None:  # the objective has its loss
                yield name, value
        yield from custom_sums.values().items()
        yield "images", float(counts.images)
