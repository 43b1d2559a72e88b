"""Results of evaluations: metrics by name, as text and as JSON.

Legend: L classes of the data, A outputs that may be predicted.
"""

import dataclasses
import json
from collections.abc import Iterator, Mapping
from typing import Any

from vit_jax.evals.classification import ClassMetrics
from vit_jax.evals.label_map import Labelled
from vit_jax.evals.multilabel import MultilabelMetrics
from vit_jax.tables import columns, metric_text, to_csv

CONFUSED_SHOWN, CONFUSED_KEPT = 3, 50


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Evaluation:
    """Results on one dataset; subclasses define the metrics.

    Attributes:
      labelled: the images.
      unreadable: number of images that were skipped.
      images_per_second: from opening the data to the last prediction, including decoding, without compilation.
      gflops_per_image: of the forward pass, 2 for each multiply-add; None if unknown.
    """

    labelled: Labelled
    metrics: Any
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
            **self.figures(),
            "images_per_second": self.images_per_second,
            "gflops_per_image": self.gflops_per_image,
            **self.details(),
        }

    def figures(self) -> dict[str, Any]:
        """Return the metrics by name."""
        raise NotImplementedError

    def details(self) -> dict[str, Any]:
        """Return metrics of classes and images by name."""
        raise NotImplementedError

    def shown(self) -> dict[str, str]:
        """Return the metrics as text, by name."""
        return {name: metric_text(name, value) for name, value in self.figures().items() if value is not None}

    def worst(self) -> dict[str, str]:
        """Return the classes with the worst results as one line of text, by its name; {} without mistakes."""
        raise NotImplementedError

    def table(self) -> Iterator[list[Any]]:
        """Yield the header and the rows of the table of classes."""
        raise NotImplementedError

    def to_csv(self) -> str:
        """Return the table of classes as CSV."""
        return to_csv(self.table())


class ClassEvaluation(Evaluation):
    """Results on images with one label."""

    metrics: ClassMetrics

    def figures(self) -> dict[str, Any]:
        """Return the metrics by name; "loss" is None if an image has several right outputs."""
        metrics, accuracies = self.metrics, dict[str, Any]()
        for name, value, interval in metrics.accuracies():
            accuracies |= {name: value, name.replace("accuracy", "interval"): list(interval)}
        loss = metrics.loss / metrics.images if self.labelled.label_map.has_loss else None
        return accuracies | {"loss": loss, "calibration_error": metrics.calibration.error}

    def details(self) -> dict[str, Any]:
        return {
            "most_confused": self.confused(CONFUSED_KEPT),
            "most_confident_mistakes": self.mistakes(),
            "calibration_bins": [one._asdict() for one in self.metrics.calibration.bins()],
        }

    def shown(self) -> dict[str, str]:
        values = self.figures()
        for name in ("top1", "top5"):
            low, high = values.pop(f"{name}_interval")
            values[f"{name}_accuracy"] = f"{values[f'{name}_accuracy']:.2%}  (95 %: {low:.2%} to {high:.2%})"
        return {name: metric_text(name, value) for name, value in values.items() if value is not None}

    def worst(self) -> dict[str, str]:
        confused = self.confused(CONFUSED_SHOWN)
        pairs = [f"{p['class']} as {p['answer']} ({p['images']:,} of {p['of']:,})" for p in confused]
        return {"most_confused": ", ".join(pairs)} if pairs else {}

    def table(self) -> Iterator[list[Any]]:
        return self.metrics.table(self.labelled.source.class_names, self.labelled.label_map.listed.tolist())

    def confused(self, most: int) -> list[dict[str, Any]]:
        """Return the most frequent mistakes: class, predicted class, images, and images of the class."""
        metrics, names, outputs = self.metrics, self.labelled.source.class_names, self.labelled.label_map.output_names
        return [
            {"class": names[label], "answer": outputs[output], "images": images, "of": int(metrics.images_L[label])}
            for label, output, images in metrics.confused(most)
        ]

    def mistakes(self) -> list[dict[str, Any]]:
        """Return the most confident mistakes, the worst first."""
        source, outputs = self.labelled.source, self.labelled.label_map.output_names
        return [
            {
                "image": source.name_of(one.record),
                "class": source.class_names[one.label],
                "answer": outputs[one.predicted],
                "probability": one.probability,
            }
            for one in self.metrics.mistakes
        ]

    def confusion_csv(self) -> str | None:
        """Return a line for each class with its images by predicted class, as CSV; None if that is too large."""
        metrics, label_map, names = self.metrics, self.labelled.label_map, self.labelled.source.class_names
        if metrics.confusion_2LA is None:
            return None
        counts_LA = metrics.confusion_2LA.sum(axis=0)
        header = ["class", *(label_map.output_names[output] for output in metrics.output_A)]
        return to_csv([header, *([names[label], *counts_LA[label].tolist()] for label in label_map.listed.tolist())])


class MultilabelEvaluation(Evaluation):
    """Results on images that may have several labels."""

    metrics: MultilabelMetrics

    def figures(self) -> dict[str, Any]:
        return {**dict(self.metrics.results()), "loss": self.metrics.loss / self.metrics.images}

    def details(self) -> dict[str, Any]:
        """Return the metrics of each class, None for NaN."""
        names = self.labelled.source.class_names
        rows = [
            {"class": name, **{key: None if x != x else x for key, x in row.items()}}
            for name, row in zip(names, self.metrics.rows(), strict=True)
        ]
        return {"classes": rows}

    def worst(self) -> dict[str, str]:
        known = [one for one in self.details()["classes"] if one["images"]]
        ranked = sorted((one["average_precision"], one["class"]) for one in known)
        return {"lowest_precision": ", ".join(f"{name} {value:.2%}" for value, name in ranked[:CONFUSED_SHOWN])}

    def table(self) -> Iterator[list[Any]]:
        return self.metrics.table(self.labelled.source.class_names)


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
    return columns((lines | evaluation.worst()).items(), "<<", gap=" ", least=(18,))


def _to_table(results: Mapping[str, Evaluation], weights: str) -> str:
    rows = [("", "images", "top-1", "95 %", "top-5", "calibration error", "images/s")]
    for name, evaluation in results.items():
        values = evaluation.figures()
        low, high = values["top1_interval"]
        top1, top5, error = (f"{values[key]:.2%}" for key in ("top1_accuracy", "top5_accuracy", "calibration_error"))
        speed = f"{evaluation.images_per_second:,.0f}"
        rows.append((name, f"{evaluation.metrics.images:,}", top1, f"{low:.2%} to {high:.2%}", top5, error, speed))
    heading = [("weights", weights)]
    if (gflops := next(iter(results.values())).gflops_per_image) is not None:
        heading.append(("network", f"{gflops:,.3g} GFLOPs an image"))
    return f"{columns(heading, '<<')}\n\n{columns(rows, '<>>>>>>')}"
