"""Metrics of an evaluation: built-in ones by name, and metrics of the user.

A built-in metric is a property of the counts of all predictions: of `ClassCounts` for images with
one label, of `LabelCounts` for images with several. `config.metric_names.METRICS` lists the names.
A metric of the user is the mean over the images of values that are computed on the devices.

Legend: B global batch, K outputs of the network, N images that count.
"""

import dataclasses
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.arrays import Batch
from vit_jax.config.metric_names import (
    METRICS,
    Labels,
    list_metrics,
    name_custom_metric,
    require_metric_name,
)
from vit_jax.evals.class_counts import ClassCounts, predict
from vit_jax.evals.step_results import Results, Rows
from vit_jax.imports.references import is_reference, resolve

if TYPE_CHECKING:
    from vit_jax.evals.label_counts import LabelCounts


@dataclasses.dataclass(frozen=True)
class CustomMetric:
    """A metric of the user: a function of the mean, over the images, of values of each image.

    A reference "package.module:name" names a function `measure`, or an object with these
    attributes:

    * `measure(logits_BK, label_BK)`: the values of each image, (B, ...), float32. `label_BK` is 1
      for the classes of an image and 0 for the others. Logits of outputs that cannot be predicted
      are -inf. The function runs on the devices inside `jax.jit`. Padding and unreadable images are
      masked afterwards.
    * `summarise(mean)`: the metric from the mean of the values, float64. Optional for one value of
      each image.
    * `direction`: "max" or "min". Optional; `config.directions` reads it.

    Attributes:
      name: name of the results.
      reference: text that names it, for messages.
      measure, summarise: see above.
    """

    name: str
    reference: str
    measure: Callable[[jax.Array, jax.Array], jax.Array]
    summarise: Callable[[np.ndarray], float] = float

    @property
    def row_name(self) -> str:
        """Name of the values among the results of a step, which have one row for each image."""
        return f"{self.name}_B"

    def compute_rows(self, logits_BK: jax.Array, label_BK: jax.Array) -> jax.Array:
        """Return the values of each image.

        Raise ValueError for an array without a row for each image.
        """
        values_B = jnp.asarray(self.measure(logits_BK, label_BK))
        if values_B.shape[:1] != logits_BK.shape[:1]:
            raise ValueError(
                f"metrics={self.reference}: must return a row for each of {len(logits_BK)} images, "
                f"not an array of shape {values_B.shape}."
            )
        if values_B.ndim > 1 and self.summarise is float:
            raise ValueError(
                f"metrics={self.reference}: must return one value for each image, or have a "
                "method summarise."
            )
        return values_B


def load_custom_metric(reference: str, field: str) -> CustomMetric:
    """Import a metric of the user.

    Raises:
      ValueError: the reference cannot be imported, or names neither a function nor an object with
        `measure`.
    """
    found = resolve(reference, field)
    measure = getattr(found, "measure", found)
    if isinstance(found, type) or not callable(measure):
        raise ValueError(
            f"{field}={reference!r}: must name a function, or an object with a method measure, not "
            f"{type(found).__name__}."
        )
    summarise = getattr(found, "summarise", float)
    return CustomMetric(name_custom_metric(reference), reference, measure, summarise)


class CustomMean:
    """The mean of the values of a metric of the user, in float64, over the images that count."""

    def __init__(self, metric: CustomMetric) -> None:
        self.metric = metric
        self._total: np.ndarray | float = 0.0
        self._images = 0

    def add(self, rows: Rows) -> None:
        """Add the rows of a step for images that count."""
        value_N = rows[self.metric.row_name].astype(np.float64)
        self._total += value_N.sum(axis=0)
        self._images += len(value_N)

    def summarise(self) -> float:
        """Return the metric."""
        return float(self.metric.summarise(np.asarray(self._total / self._images)))


@dataclasses.dataclass(frozen=True)
class ChosenMetrics:
    """Metrics that an evaluation reports besides the usual ones.

    Attributes:
      built_in: names of `METRICS`.
      custom: metrics of the user.
    """

    built_in: tuple[str, ...] = ()
    custom: tuple[CustomMetric, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.built_in or self.custom)

    def keep(self, names: Sequence[str]) -> "ChosenMetrics":
        """Return the metrics without built-in ones of other names."""
        built_in = tuple(name for name in self.built_in if name in names)
        return dataclasses.replace(self, built_in=built_in)

    def require_labels(self, labels: Labels, field: str) -> None:
        """Raise ValueError if a chosen metric is not defined for images with these labels."""
        possible = list_metrics(labels)
        for name in self.built_in:
            if name not in possible:
                kind = "single-label" if labels == "one" else "multi-label"
                raise ValueError(
                    f"{field}={name}: must be a metric of {kind} data. Use {', '.join(possible)}."
                )

    def compute_custom_rows(self, logits_BK: jax.Array, label_BK: jax.Array) -> Results:
        """Return the values of each image for the metrics of the user."""
        return {metric.row_name: metric.compute_rows(logits_BK, label_BK) for metric in self.custom}


NO_FURTHER_METRICS = ChosenMetrics()


def choose_metrics(names: Iterable[str], field: str) -> ChosenMetrics:
    """Return the metrics with these names or references; `field` is the option, for messages.

    Raises:
      ValueError: an unknown name, a reference that cannot be imported, or two metrics with the same
        name.
    """
    built_in: list[str] = []
    custom: dict[str, CustomMetric] = {}
    for name in names:
        if not is_reference(name):
            built_in.append(require_metric_name(name, field))
            continue
        metric = load_custom_metric(name, field)
        if metric.name in METRICS or metric.name in custom:
            raise ValueError(
                f"{field}={name}: another metric has the name {metric.name}. Rename the function "
                "or object."
            )
        custom[metric.name] = metric
    return ChosenMetrics(tuple(dict.fromkeys(built_in)), tuple(custom.values()))


def make_metric_rows(
    chosen: ChosenMetrics,
    *,
    has_label_sets: bool = False,
) -> Callable[[jax.Array, Batch], Results]:
    """Return (logits_BK, batch) -> the rows that the evaluations of a run need for chosen metrics.

    Evaluators with label sets need the predictions of each image, as built-in metrics do. Built-in
    metrics of multi-label data need no more than the rows of `score_classes`, which are always
    there.
    """

    def metric_rows(logits_BK: jax.Array, batch: Batch) -> Results:
        rows: Results = {}
        needs_predictions = chosen.built_in or has_label_sets
        if needs_predictions and not batch.is_multilabel:
            rows |= predict(logits_BK, batch, batch.label_B)
        if chosen.custom:
            label_BK = batch.label_BK(logits_BK.shape[1])
            rows |= chosen.compute_custom_rows(logits_BK, label_BK)
            rows["mask_B"] = batch.mask_B
        return rows

    return metric_rows


class RunningMetrics:
    """Metrics of a split: `add` takes the rows of each batch, `compute` returns the metrics.

    The argument `always` names built-in metrics that are computed whether or not they are chosen.

    Attributes:
      names: names of the built-in metrics, properties of the counts.
      counts: counts of the predictions.
      means: metrics of the user.
    """

    def __init__(
        self, counts: "ClassCounts | LabelCounts", chosen: ChosenMetrics, always: Sequence[str] = ()
    ) -> None:
        self.names = list(dict.fromkeys((*always, *chosen.built_in)))
        self.counts = counts
        self.means = [CustomMean(metric) for metric in chosen.custom]

    def add(self, rows: Rows) -> None:
        """Add the rows of a batch for images that count."""
        if self.names:
            self.counts.add(rows)
        for mean in self.means:
            mean.add(rows)

    def compute(self, exclude: Collection[str] = ()) -> dict[str, float]:
        """Return the metrics by name, without some."""
        metrics = {}
        for name in self.names:
            if name not in exclude:
                metrics[name] = getattr(self.counts, name)
        for mean in self.means:
            if mean.metric.name not in exclude:
                metrics[mean.metric.name] = mean.summarise()
        return metrics
