"""Results on images that may have several labels: metrics, and tables of classes and images.

Legend: B global batch, K classes.
"""

import math
from collections.abc import Iterator, Sequence

import numpy as np

from vit_jax.config.metric_names import USUAL_METRICS, format_metric
from vit_jax.data.kinds.table import BETWEEN
from vit_jax.evals.label_counts import THRESHOLD, LabelCounts, PerClass, describe_classes
from vit_jax.evals.running_metrics import NO_FURTHER_METRICS, ChosenMetrics, RunningMetrics
from vit_jax.evals.step_results import Rows
from vit_jax.storage.files import JsonObject

WORST_SHOWN = 3


class MultilabelMetrics:
    """Metrics of probabilities.

    Attributes:
      counts: the probabilities and labels.
    """

    probabilities = "probability_BK"  # in the rows of `score_classes`

    def __init__(
        self,
        class_names: Sequence[str],
        chosen: ChosenMetrics = NO_FURTHER_METRICS,
    ) -> None:
        self.counts = LabelCounts(len(class_names))
        self.image_columns = (
            "labels",
            "answers",
            "is_right",
            *class_names,
        )  # names for `image_rows`
        self._class_names = class_names
        self._metrics = RunningMetrics(self.counts, chosen, always=USUAL_METRICS["several"])

    @property
    def images(self) -> int:
        """Number of images."""
        return self.counts.images

    def add(self, rows: Rows) -> None:
        """Add the rows of `score_classes` for images that count."""
        self._metrics.add(rows)

    def values(self) -> JsonObject:
        """Return the metrics by name, None for NaN and infinity.

        Raises:
          ValueError: no image has a label.
        """
        values: JsonObject = {}
        for name, value in self._metrics.compute().items():
            values[name] = value if math.isfinite(value) else None
        return values

    def shown(self) -> dict[str, str]:
        """Return `values` as text."""
        texts = {}
        for name, value in self.values().items():
            if value is not None:
                texts[name] = format_metric(name, value)
        return texts

    def details(self) -> JsonObject:
        """Return the metrics of each class, None for NaN."""
        per_class = self.counts.per_class()
        return {"classes": describe_classes(self._class_names, per_class)}

    def worst(self) -> dict[str, str]:
        """Return the classes of the lowest average precision as a line of text, by its name."""
        precisions = []
        for entry in self.details()["classes"]:
            if entry["images"]:
                precisions.append((entry["average_precision"], entry["class"]))

        words = []
        lowest = sorted(precisions)[:WORST_SHOWN]
        for precision, class_name in lowest:
            words.append(f"{class_name} {precision:.2%}")
        return {"lowest_precision": ", ".join(words)}

    def image_rows(self, rows: Rows) -> Iterator[list[object]]:
        """Yield for each image the cells of `image_columns`."""
        label_BK = rows["label_BK"]
        probability_BK = rows["probability_BK"]
        for label_K, probability_K in zip(
            label_BK,
            probability_BK,
            strict=True,
        ):
            labels = self._join_names(label_K > 0)
            predicted = self._join_names(probability_K >= THRESHOLD)
            yield [
                labels,
                predicted,
                int(labels == predicted),
                *map(_format_cell, probability_K),
            ]

    def _join_names(self, is_class_K: np.ndarray) -> str:
        """Return the names of some classes, (K,) bool, in one cell."""
        numbers = np.flatnonzero(is_class_K).tolist()
        names = [self._class_names[k] for k in numbers]
        return BETWEEN.join(names)

    def tables(self) -> dict[str, list[list[object]]]:
        """Return tables for files by name: "classes"."""
        return {"classes": list(self.class_rows())}

    def class_rows(self) -> Iterator[list[object]]:
        """Yield the header, then for each class name and metrics; empty cells for NaN."""
        yield ["class", *PerClass._fields]
        for entry in self.details()["classes"]:
            name, images, *values = entry.values()
            yield [name, images, *map(_format_cell, values)]


def _format_cell(value: float | None) -> str:
    """Return a number with six decimals, or an empty cell."""
    if value is None:
        return ""
    return f"{value:.6f}"
