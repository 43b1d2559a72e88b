"""What an evaluation found, as text and as JSON: accuracy with its interval, calibration, speed, mistakes."""

import dataclasses
import json
from collections.abc import Iterator, Mapping
from typing import Any

from vit_jax.evals.multilabel import Scores
from vit_jax.evals.per_class import Tally
from vit_jax.files import printable
from vit_jax.inference.labelled import Labelled
from vit_jax.tables import to_csv

CONFUSED_SHOWN, CONFUSED_KEPT = 3, 50


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Evaluation:
    """What an evaluation found. A subclass says how good the answers are.

    Attributes:
      labelled: the images.
      tally: what was counted over the answers.
      unreadable: images that were left out.
      images_per_second: from opening the data to the last answer, with reading and decoding, without compilation.
      gflops_per_image: of the forward pass, a multiplication with its addition as two; None of a network whose program
        does not tell.
    """

    labelled: Labelled
    tally: Any
    unreadable: int
    images_per_second: float
    gflops_per_image: float | None

    def values(self) -> dict[str, Any]:
        """The figures by name, as JSON has them."""
        return {
            "data": self.labelled.words,
            "notes": self.labelled.notes,
            "images": self.tally.images,
            "unreadable_images": self.unreadable,
            **self.figures(),
            "images_per_second": self.images_per_second,
            "gflops_per_image": self.gflops_per_image,
            **self.details(),
        }

    def figures(self) -> dict[str, Any]:
        """How good the answers are, by name."""
        raise NotImplementedError

    def details(self) -> dict[str, Any]:
        """And where they are good or not."""
        raise NotImplementedError

    def shown(self) -> dict[str, str]:
        """The figures as text."""
        raise NotImplementedError

    def worst(self) -> dict[str, str]:
        """In a line of text, with its name, where the answers are not good; empty where they are."""
        raise NotImplementedError

    def table(self) -> Iterator[list[Any]]:
        """Yield the header and the rows of the table of classes."""
        raise NotImplementedError

    def to_csv(self) -> str:
        """Return the table of classes as CSV."""
        return to_csv(self.table())


class ClassEvaluation(Evaluation):
    """Of images with one label."""

    tally: Tally

    def figures(self) -> dict[str, Any]:
        """By name; "loss" is None where an image has several right answers."""
        tally, accuracies = self.tally, dict[str, Any]()
        for name, value, interval in tally.accuracies():
            accuracies |= {name: value, name.replace("accuracy", "interval"): list(interval)}
        loss = tally.loss / tally.images if self.labelled.key.has_loss else None
        return accuracies | {"loss": loss, "calibration_error": tally.calibration.error}

    def details(self) -> dict[str, Any]:
        return {
            "most_confused": self.confused(CONFUSED_KEPT),
            "most_confident_mistakes": self.mistakes(),
            "calibration_bins": [one._asdict() for one in self.tally.calibration.bins()],
        }

    def shown(self) -> dict[str, str]:
        values, lines = self.figures(), dict[str, str]()
        for name in ("top1", "top5"):
            low, high = values[f"{name}_interval"]
            lines[f"{name}_accuracy"] = f"{values[f'{name}_accuracy']:.2%}  (95 %: {low:.2%} to {high:.2%})"
        if values["loss"] is not None:
            lines["loss"] = f"{values['loss']:.4f}"
        return lines | {"calibration_error": f"{values['calibration_error']:.2%}"}

    def worst(self) -> dict[str, str]:
        confused = self.confused(CONFUSED_SHOWN)
        pairs = [f"{p['class']} as {p['answer']} ({p['images']:,} of {p['of']:,})" for p in confused]
        return {"most_confused": ", ".join(pairs)} if pairs else {}

    def table(self) -> Iterator[list[Any]]:
        return self.tally.table(self.labelled.source.class_names, self.labelled.key.listed.tolist())

    def confused(self, most: int) -> list[dict[str, Any]]:
        """The most frequent mistakes: images of "class", of so many, whose first answer was "answer"."""
        tally, names, answers = self.tally, self.labelled.source.class_names, self.labelled.key.answer_names
        return [
            {"class": names[label], "answer": answers[output], "images": images, "of": int(tally.images_L[label])}
            for label, output, images in tally.confused(most)
        ]

    def mistakes(self) -> list[dict[str, Any]]:
        """The most confident mistakes, the first the worst."""
        source, answers = self.labelled.source, self.labelled.key.answer_names
        return [
            {
                "image": source.name_of(one.record),
                "class": source.class_names[one.label],
                "answer": answers[one.answer],
                "probability": one.probability,
            }
            for one in self.tally.mistakes
        ]


class MultilabelEvaluation(Evaluation):
    """Of images that may have several labels, where no answer is the right one and none is taken for another."""

    tally: Scores

    def figures(self) -> dict[str, Any]:
        return {**dict(self.tally.results()), "loss": self.tally.loss / self.tally.images}

    def details(self) -> dict[str, Any]:
        """The figures of each class, None where they say nothing."""
        found: list[dict[str, Any]] = []
        for name, row in zip(self.labelled.source.class_names, self.tally.rows(), strict=True):
            found.append({"class": name, **{key: None if x != x else x for key, x in row.items()}})
        return {"classes": found}

    def shown(self) -> dict[str, str]:
        values = self.figures()
        return {name: f"{value:.4f}" if name == "loss" else f"{value:.2%}" for name, value in values.items()}

    def worst(self) -> dict[str, str]:
        known = [one for one in self.details()["classes"] if one["images"]]
        ranked = sorted((one["average_precision"], one["class"]) for one in known)
        return {"lowest_precision": ", ".join(f"{name} {value:.2%}" for value, name in ranked[:CONFUSED_SHOWN])}

    def table(self) -> Iterator[list[Any]]:
        return self.tally.table(self.labelled.source.class_names)


def to_json(values: Mapping[str, Any]) -> str:
    """In ASCII, which every terminal and every file name survives."""
    return json.dumps(values, indent=2, allow_nan=False)


def values(found: Mapping[str, Evaluation], absent: Mapping[str, str], weights: str) -> dict[str, Any]:
    """Everything that was found, for JSON: the figures of the one dataset, or those of several by name under "sets"."""
    if list(found) == [""]:
        return {"weights": weights, **found[""].values()}
    return {"weights": weights, "sets": {name: one.values() for name, one in found.items()}, "absent": dict(absent)}


def to_text(found: Mapping[str, Evaluation], weights: str) -> str:
    """The figures of one dataset, one to a line, or a table of several."""
    return _to_table(found, weights) if len(found) > 1 else _to_lines(next(iter(found.values())), weights)


def _to_lines(evaluation: Evaluation, weights: str) -> str:
    """Under the source of the weights and the data that they were evaluated on."""
    lines = {"weights": weights, "data": evaluation.labelled.words}
    values = evaluation.values()
    missing = f", and {evaluation.unreadable:,} that cannot be read" if evaluation.unreadable else ""
    lines["images"] = f"{values['images']:,}{missing}"
    lines |= evaluation.shown()
    lines["images_per_second"] = f"{values['images_per_second']:,.0f}"
    if values["gflops_per_image"] is not None:
        lines["gflops_per_image"] = f"{values['gflops_per_image']:,.3g}"
    lines |= evaluation.worst()
    width = max(18, *map(len, lines))
    return "\n".join(f"{name:<{width}} {printable(text)}" for name, text in lines.items())


def _to_table(evaluations: Mapping[str, Evaluation], weights: str) -> str:
    """One line for each dataset."""
    rows = [("", "images", "top-1", "95 %", "top-5", "calibration error", "images/s")]
    for name, evaluation in evaluations.items():
        values = evaluation.values()
        low, high = values["top1_interval"]
        top1, top5, error = (f"{values[key]:.2%}" for key in ("top1_accuracy", "top5_accuracy", "calibration_error"))
        interval, speed = f"{low:.2%} to {high:.2%}", f"{values['images_per_second']:,.0f}"
        rows.append((name, f"{values['images']:,}", top1, interval, top5, error, speed))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "  ".join([f"{row[0]:<{widths[0]}}", *(f"{cell:>{w}}" for cell, w in zip(row[1:], widths[1:], strict=True))])
        for row in rows
    ]
    heading = [f"weights  {printable(weights)}"]
    if (gflops := next(iter(evaluations.values())).gflops_per_image) is not None:
        heading.append(f"network  {gflops:,.3g} GFLOPs an image")
    return "\n".join([*heading, "", *lines])
