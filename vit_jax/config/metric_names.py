"""The metrics of vit_jax: names, better values, and form as text.

The training loop, `vit-jax evaluate`, sweeps, figures and pages take names and directions from
`METRICS`. A result is named after its metric: "test_accuracy" is the accuracy on the test split.
`evals.running_metrics` computes them. Metrics of the user are objects that the config names by
references.
"""

from collections.abc import Mapping
from typing import Literal, NamedTuple

from vit_jax.text.nearest import did_you_mean

Mode = Literal["max", "min"]
BestMode = Literal["auto", "max", "min"]
Labels = Literal["one", "several"]


class Metric(NamedTuple):
    """A metric.

    Attributes:
      mode: "max" if higher is better, "min" if lower is better.
      is_share: printed in percent.
      labels: numbers of labels of an image for which it is computed from counts of predictions:
        "one" by the property of this name of `ClassCounts`, "several" by the one of `LabelCounts`.
    """

    mode: Mode
    is_share: bool = False
    labels: tuple[Labels, ...] = ()


METRICS: Mapping[str, Metric] = {
    "accuracy": Metric("max", True, ("one",)),
    "top5_accuracy": Metric("max", True, ("one",)),
    "mean_average_precision": Metric("max", True, ("several",)),
    "f1_micro": Metric("max", True, ("several",)),
    "f1_macro": Metric("max", True, ("one", "several")),
    "loss": Metric("min", False, ("one", "several")),
    "calibration_error": Metric("min", True, ("one", "several")),
    "error": Metric("min"),
    "images_per_second": Metric("max"),
    "goodput": Metric("max"),
    "unreadable_images": Metric("min"),
    "parameters": Metric("min"),
    "exaflops": Metric("min"),
    "wall_seconds": Metric("min"),
}
"""Metrics by name, in the order in which they are printed.

`directions` has the direction of any result of a run, also of those that custom evaluators and
metrics state.
"""

USUAL_METRICS: Mapping[Labels, tuple[str, ...]] = {
    "one": ("accuracy", "top5_accuracy", "loss", "calibration_error"),
    "several": ("mean_average_precision", "f1_micro", "f1_macro", "loss"),
}
"""Metrics that `vit-jax evaluate` always prints."""

METRICS_FOR_LABEL_SETS = ("accuracy", "top5_accuracy", "calibration_error")
"""Metrics that are defined where an image has several right outputs, or none."""

MULTILABEL_RESULTS = ("mean_average_precision", "f1_micro", "f1_macro")
"""Metrics of multi-label data that take the place of the accuracy."""

EARLIER_NAMES: Mapping[str, str] = {
    "top1_accuracy": "accuracy",
    "log_loss": "loss",
    "macro_f1": "f1_macro",
    "micro_f1": "f1_micro",
}
"""Names of earlier versions and of other libraries, which options still accept."""

SHARES = tuple(name for name in METRICS if METRICS[name].is_share)
"""Metrics that are printed in percent."""
_COMPUTED = tuple(name for name in METRICS if METRICS[name].labels)
"""Metrics that can be chosen."""


def find_metric(result: str) -> Metric | None:
    """Return the metric that ends the name of a result, such as "test_accuracy".

    Return None for other names.
    """
    end = ""
    for name in METRICS:
        if f"_{result}".endswith(f"_{name}"):
            end = max(end, name, key=len)
    return METRICS.get(end)


def find_current_name(metric: str) -> str:
    """Return the name of a metric in place of one of `EARLIER_NAMES`; other names unchanged."""
    return EARLIER_NAMES.get(metric, metric)


def require_metric_name(name: str, field: str) -> str:
    """Return the current name of a built-in metric that can be chosen.

    Raises:
      ValueError: there is no such metric; `field` is the option, for the message.
    """
    current = find_current_name(name)
    if current not in _COMPUTED:
        hint = did_you_mean(name, _COMPUTED)
        raise ValueError(
            f"{field}={name}: must be one of {', '.join(_COMPUTED)}, or a reference "
            f"package.module:name.{hint}"
        )
    return current


def name_custom_metric(reference: str) -> str:
    """Return the name of a metric of the user: "brier" for "mypackage.metrics:brier"."""
    return reference.rpartition(":")[2].rpartition(".")[2]


def list_metrics(labels: Labels) -> list[str]:
    """Return the names of metrics that predictions of images with these labels have."""
    return [name for name, metric in METRICS.items() if labels in metric.labels]


def format_metric(name: str, value: float | str) -> str:
    """Return a value as text: in percent, as a number of images, or with four decimals.

    Text stays unchanged.
    """
    if isinstance(value, str):
        return value
    if name.endswith(SHARES):
        return f"{value:.2%}"
    if "images" in name:
        return f"{value:,.0f}"
    return f"{value:.4f}"
