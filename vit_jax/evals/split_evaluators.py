"""Evaluators of classification in a run: they measure training states on one split.

Sums of the objective are divided by their sum "weight" (`compute_means`), counts of predictions and
sums of custom metrics by the number of images (`metric_functions`).
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Generic

from vit_jax.arrays import Batch
from vit_jax.evals.class_counts import ClassCounts
from vit_jax.evals.label_counts import LabelCounts
from vit_jax.evals.label_map import build_identity_map
from vit_jax.evals.metric_functions import (
    NO_FURTHER_METRICS,
    ChosenMetrics,
    CustomSums,
    compute_metrics,
)
from vit_jax.evals.runner import (
    E,
    Results,
    Split,
    Totals,
    add_sums,
    iterate_batches,
    require_images,
)
from vit_jax.objectives.sums import compute_means


@dataclasses.dataclass(frozen=True)
class ClassificationEvaluator(Generic[E]):
    """Accuracy and mean loss over a split, and chosen metrics.

    Attributes:
      split: the examples.
      step: (state, batch) -> sums of "loss", "correct" and "weight" over the examples that count,
        as objectives return them; over patches if patches are predicted. With chosen metrics also
        the rows of `make_metric_rows`.
      chosen: further metrics.
    """

    split: Split
    step: Callable[[E, Batch], Results]
    chosen: ChosenMetrics = NO_FURTHER_METRICS

    def run(self, state: E) -> Iterator[tuple[str, float]]:
        """Yield "loss" and "accuracy", the chosen metrics, and "images", their number.

        Raises:
          ValueError: no image of the split is readable.
        """
        totals: Totals = {}
        counts = ClassCounts(build_identity_map(self.split.class_names))
        custom_sums = CustomSums(self.chosen.custom)
        for batch in iterate_batches(self.split.open_batches, self.step, state):
            add_sums(totals, batch.sums)
            custom_sums.add(batch.rows)
            if self.chosen.built_in:  # only then the step returns predictions
                counts.add(batch.rows)
        require_images(float(totals.get("weight", 0)), self.split.name)

        means = compute_means(totals)
        for name, mean in means.items():
            yield name, float(mean)
        metrics = compute_metrics(self.chosen.built_in, counts) | custom_sums.values()
        for name, value in metrics.items():
            if value is not None and name not in means:  # the objective has its accuracy
                yield name, value
        yield "images", float(totals.get("images", totals["weight"]))


@dataclasses.dataclass(frozen=True)
class MultilabelEvaluator(Generic[E]):
    """Mean average precision, F1 and mean loss over a split, and chosen metrics.

    Attributes:
      split: the examples.
      step: (state, batch) -> the objective's sums "loss" and "weight", and the rows of
        `score_classes`.
      chosen: further metrics.
    """

    split: Split
    step: Callable[[E, Batch], Results]
    chosen: ChosenMetrics = NO_FURTHER_METRICS

    def run(self, state: E) -> Iterator[tuple[str, float]]:
        """Yield the objective's loss, usual and chosen metrics, and "images", their number.

        Raises:
          ValueError: no image of the split is readable, or none has a label.
        """
        totals: Totals = {}
        counts = LabelCounts(len(self.split.class_names))
        custom_sums = CustomSums(self.chosen.custom)
        for batch in iterate_batches(self.split.open_batches, self.step, state):
            add_sums(totals, batch.sums)
            custom_sums.add(batch.rows)
            counts.add(batch.rows)
        require_images(counts.images, self.split.name)
        counts.require_labels()

        yield "loss", float(compute_means(totals)["loss"])
        names = self.chosen.list_names("several")
        metrics = compute_metrics(names, counts) | custom_sums.values()
        for name, value in metrics.items():
            if name != "loss" and value is not None:  # the objective has its loss
                yield name, value
        yield "images", float(counts.images)
