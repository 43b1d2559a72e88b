"""Results of evaluations, metrics by name, as text and as JSON."""

import dataclasses
import json
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from vit_jax.evals.classification import ClassMetrics
from vit_jax.evals.label_map import Labelled
from vit_jax.evals.multilabel import MultilabelMetrics
from vit_jax.tables import columns, metric_text, to_csv


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Evaluation:
    """Results on one dataset.

    Attributes:
      labelled: the images.
      metrics: of their predictions.
      unreadable: number of images that were skipped.
      images_per_second: from opening the data to the last prediction, including decoding, without compilation.
      gflops_per_image: of the forward pass, 2 for each multiply-add; None if unknown.
    """

    labelled: Labelled
    metrics: ClassMetrics | MultilabelMetrics
    unreadable: int
    images_per_second: float
    gflops_per_image: float | None

    def values(self) -> dict[str, Any]:
        """Return everything by name, for JSON."""
        return {
            "data": self.labelled.words,
            "notes": self.labelled.notes,
            "images": self.metrics.images,
            "unreadable_images": self.unreadable,
            **self.metrics.figures(),
            "images_per_second": self.images_per_second,
            "gflops_per_image": self.gflops_per_image,
            **self.metrics.details(),
        }

    def shown(self) -> dict[str, str]:
        """Return the metrics as text, by name."""
        return {name: metric_text(name, value) for name, value in self.metrics.shown().items()}

    def to_csv(self) -> str:
        """Return the table of classes as CSV."""
        return to_csv(self.metrics.table())


Watch = Callable[[np.ndarray, Mapping[str, np.ndarray]], None]
"""Receives the numbers of images in their split, and their rows of `classification.predict` or `multilabel.score`."""
Evaluate = Callable[[Labelled, Watch | None], Evaluation]


def to_json(values: Mapping[str, Any]) -> str:
    """Return JSON in ASCII, which every terminal and every file name allows."""
    return json.dumps(values, indent=2, allow_nan=False)


def values(results: Mapping[str, Evaluation], absent: Mapping[str, str], weights: str) -> dict[str, Any]:
    """Return everything for JSON: values of the one dataset, or those of several by name under "sets"."""
    if list(results) == [""]:
        return {"weights": weights, **results[""].values()}
    return {"weights": weights, "sets": {name: one.values() for name, one in results.items()}, "absent": dict(absent)}


def to_text(results: Mapping[str, Evaluation], weights: str) -> str:
    """Return the metrics of one dataset, one to a line, or a table with a line for each of several."""
    if len(results) > 1:
        return _to_table(results, weights)
    (evaluation,) = results.values()
    unreadable = f", and {evaluation.unreadable:,} that cannot be read" if evaluation.unreadable else ""
    lines = {
        "weights": weights,
        "data": evaluation.labelled.words,
        "images": f"{evaluation.metrics.images:,}{unreadable}",
        **evaluation.shown(),
        "images_per_second": f"{evaluation.images_per_second:,.0f}",
    }
    if evaluation.gflops_per_image is not None:
        lines["gflops_per_image"] = f"{evaluation.gflops_per_image:,.3g}"
    return columns((lines | evaluation.metrics.worst()).items(), "<<", gap=" ", least=(18,))


def _to_table(results: Mapping[str, Evaluation], weights: str) -> str:
    rows = [("", "images", "top-1", "95 %", "top-5", "calibration error", "images/s")]
    for name, evaluation in results.items():
        values: dict[str, Any] = evaluation.metrics.figures()
        low, high = values["top1_interval"]
        top1, top5, error = (f"{values[key]:.2%}" for key in ("top1_accuracy", "top5_accuracy", "calibration_error"))
        speed = f"{evaluation.images_per_second:,.0f}"
        rows.append((name, f"{evaluation.metrics.images:,}", top1, f"{low:.2%} to {high:.2%}", top5, error, speed))
    heading = [("weights", weights)]
    if (gflops := next(iter(results.values())).gflops_per_image) is not None:
        heading.append(("network", f"{gflops:,.3g} GFLOPs an image"))
    return f"{columns(heading, '<<')}\n\n{columns(rows, '<>>>>>>')}"
