"""Evaluators of classification in a run: they measure training states on one split.

An evaluator is any object with a method `run(state)` that yields names and values of metrics. Those
of this module have two kinds of results:

* means of the objective, such as the loss, from the sums of the evaluation step;
* metrics from its rows, which have the predictions for each image. A metric is a property of
  the counts of predictions (`ClassCounts`, `LabelCounts`); `RunningMetrics` reads it by name.

These are yielded, besides metrics that are chosen (for sets of labels `METRICS_FOR_LABEL_SETS`):

    ClassificationEvaluator    the means "loss" and "accuracy"
    LabelSetEvaluator          the metric "accuracy"
    MultilabelEvaluator        the mean "loss" and the metrics `MULTILABEL_RESULTS`

Legend: N images of the split, S places for the correct classes of an image.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Generic

import numpy as np

from vit_jax.arrays import Batch, StepResults
from vit_jax.config.metric_names import METRICS_FOR_LABEL_SETS, MULTILABEL_RESULTS
from vit_jax.evals.class_counts import ClassCounts
from vit_jax.evals.label_map import build_identity_map
from vit_jax.evals.running_metrics import NO_FURTHER_METRICS, ChosenMetrics, RunningMetrics
from vit_jax.evals.step_results import (
    Evaluated,
    Split,
    Totals,
    add_sums,
    iterate_step_results,
    require_images,
)
from vit_jax.objectives.sums import compute_means, count_images


@dataclasses.dataclass(frozen=True)
class ClassificationEvaluator(Generic[Evaluated]):
    """Mean loss and accuracy over a split, and chosen metrics.

    Attributes:
      split: the images.
      step: (state, batch) -> sums of the objective, and the rows that the metrics read; made by
        `train.step.make_evaluation_step`.
      chosen: further metrics.
    """

    split: Split
    step: Callable[[Evaluated, Batch], StepResults]
    chosen: ChosenMetrics = NO_FURTHER_METRICS

    def run(self, state: Evaluated) -> Iterator[tuple[str, float]]:
        """Yield the means of the objective, the metrics, and "images", the number of images.

        Raises:
          TooManyUnreadable: no image of the split is readable, or none has a label.
        """
        totals: Totals = {}
        metrics = self.make_running_metrics()
        for sums, rows in iterate_step_results(self.split.open_batches, self.step, state):
            add_sums(totals, sums)
            metrics.add(rows)
        num_images = count_images(totals)
        require_images(num_images, self.split.name)

        means = self.report_means(totals)
        for name, mean in means.items():
            yield name, float(mean)
        # A chosen "loss" or "accuracy" that is also a mean of the objective is not yielded again.
        yield from metrics.compute(exclude=means.keys()).items()
        yield "images", num_images

    def report_means(self, totals: Totals) -> dict[str, np.ndarray]:
        """Return the means of the objective to report, such as "loss" and "accuracy"."""
        return compute_means(totals)

    def make_running_metrics(self) -> RunningMetrics:
        """Return the metrics, before the first image."""
        label_map = build_identity_map(self.split.class_names)
        return RunningMetrics(ClassCounts(label_map), self.chosen)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LabelSetEvaluator(ClassificationEvaluator[Evaluated]):
    """Accuracy over a split of images with sets of correct classes, any of which is right.

    Attributes:
      correct_NS: correct classes of each image; unused places have -1.
    """

    correct_NS: np.ndarray

    def report_means(self, totals: Totals) -> dict[str, np.ndarray]:
        """Return no means: a step knows the first label of each image, and compares with it."""
        return {}

    def make_running_metrics(self) -> RunningMetrics:
        """Return the metrics, before the first image."""
        label_map = build_identity_map(self.split.class_names, self.correct_NS)
        # Chosen metrics that are defined for sets, and accuracy, also if it is not chosen.
        chosen = self.chosen.keep(METRICS_FOR_LABEL_SETS)
        return RunningMetrics(ClassCounts(label_map), chosen, always=("accuracy",))


@dataclasses.dataclass(frozen=True)
class MultilabelEvaluator(ClassificationEvaluator[Evaluated]):
    """Mean loss over a split of images that may have several labels, average precision and F1."""

    def make_running_metrics(self) -> RunningMetrics:
        """Return the metrics, before the first image."""
        from vit_jax.evals.label_counts import LabelCounts  # other runs do not load it

        counts = LabelCounts(len(self.split.class_names))
        return RunningMetrics(counts, self.chosen, always=MULTILABEL_RESULTS)
