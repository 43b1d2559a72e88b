"""Built-in evaluators on frozen features, and the metrics of all evaluators: which values are better, form as text."""

from collections.abc import Mapping
from typing import Literal, NamedTuple

FrozenKind = Literal["fewshot", "knn"]


class FrozenEvaluatorSpec(NamedTuple):
    """An evaluator on frozen features.

    Attributes:
      number_argument: argument with one or several numbers; each has its own result.
      default: its default.
      result_suffix: end of the name of a result, after its number.
      arguments: names of further arguments.
    """

    number_argument: str
    default: tuple[int, ...]
    result_suffix: str
    arguments: tuple[str, ...]


FROZEN_EVALUATORS: Mapping[FrozenKind, FrozenEvaluatorSpec] = {
    "fewshot": FrozenEvaluatorSpec(
        "shots", (5,), "shot_accuracy", ("seeds", "l2", "sampling", "layer")
    ),
    "knn": FrozenEvaluatorSpec("neighbours", (20,), "nn_accuracy", ("temperature", "layer")),
}

Mode = Literal["max", "min"]
BestMode = Literal["auto", "max", "min"]


class Metric(NamedTuple):
    """A metric.

    Attributes:
      mode: "max" if higher is better, "min" if lower is better.
      is_share: printed in percent.
    """

    mode: Mode
    is_share: bool = False


METRICS: Mapping[str, Metric] = {
    "accuracy": Metric("max", is_share=True),
    "mean_average_precision": Metric("max", is_share=True),
    "f1_micro": Metric("max", is_share=True),
    "f1_macro": Metric("max", is_share=True),
    "loss": Metric("min"),
    "calibration_error": Metric("min", is_share=True),
    "error": Metric("min"),
    "images_per_second": Metric("max"),
    "unreadable_images": Metric("min"),
    "parameters": Metric("min"),
    "exaflops": Metric("min"),
    "wall_seconds": Metric("min"),
}
"""By the end of the name of a result: "test_accuracy" is an accuracy. The first that fits counts.

`directions` has the direction of any result of a run, also of those that custom evaluators state.
"""
MULTILABEL_RESULTS = ("mean_average_precision", "f1_micro", "f1_macro")
"""Metrics of multi-label data, in place of the accuracy."""
SHARES = tuple(name for name, metric in METRICS.items() if metric.is_share)


def metric_of(name: str) -> Metric | None:
    """Return the metric that a result, such as "test_accuracy", is named after; None for other names."""
    return next(
        (metric for end, metric in METRICS.items() if name == end or name.endswith(f"_{end}")), None
    )


def metric_text(name: str, value: float | str) -> str:
    """Return a value as text: in percent, as a number of images, or with four decimals; text as it is."""
    if isinstance(value, str):
        return value
    return (
        f"{value:.2%}"
        if name.endswith(SHARES)
        else f"{value:,.0f}"
        if "images" in name
        else f"{value:.4f}"
    )
