"""Evaluators of classification in a run: they measure training states on one split."""

import dataclasses
from collections.abc import Callable, Iterator
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
        counts = ClassCounts(build_identity_map(self.split.class_names))
        custom_sums = CustomSums(self.chosen.custom)
        for results in iterate_results(self.split.open_batches, self.step, state):
            add_sums(totals, results)
            if self.chosen.built_in:
                counts.add(keep_counted(results))
            if self.chosen.custom:
                custom_sums.add(keep_counted(results))
        require_images(float(totals.get("weight", 0)), self.split.name)

        values = compute_means(totals)
        for name in self.chosen.built_in:
            if name not in values:
                values[name] = compute_metric(name, counts)
        yield from values.items()
        yield from custom_sums.values().items()
        yield "images", float(totals.get("images", totals["weight"]))


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
