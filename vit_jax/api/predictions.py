"""Predictions for image files, as records, JSON, CSV and text."""

import json
from collections.abc import Iterator, Sequence
from typing import Required, TypedDict

import numpy as np

from vit_jax.api.model import Images, Model
from vit_jax.data.decoding.images import UnreadableImage
from vit_jax.data.records import Source
from vit_jax.evals.runner import require_finite
from vit_jax.text.tables import columns
from vit_jax.text.tables import to_csv as rows_to_csv

Likely = TypedDict("Likely", {"class": str, "probability": float})
"""A class and its probability."""


class Record(TypedDict, total=False):
    """An image, and its most probable classes or why it is unreadable."""

    image: Required[str]
    error: str
    predictions: list[Likely]


def predict(
    model: Model,
    images: Sequence[str] | Source,
    top: int | None,
    threshold: float = 0.0,
) -> Iterator[Record]:
    """Yield a record for each file, or each image of a source, in their order.

    It has the most probable classes, or the reason why the image is unreadable.

    The classes are the first `top`, or all, with a probability of at least `threshold`.

    Raises:
      ValueError: probabilities that are not finite; the model has no classes or states no
        preparation of images.
    """
    source = images if isinstance(images, Source) else Images(images)
    rows = model.stream(source)
    for index, probability_K in enumerate(rows):
        image = source.name_of(index)
        if isinstance(probability_K, UnreadableImage):
            yield {"image": image, "error": str(probability_K)}
            continue

        require_finite(probability_K[None], model.source, [image].__getitem__)
        predictions = _list_likely(
            model.class_names,
            probability_K,
            top,
            threshold,
        )
        yield {"image": image, "predictions": predictions}


def _list_likely(
    class_names: Sequence[str],
    probability_K: np.ndarray,
    top: int | None,
    threshold: float,
) -> list[Likely]:
    """Return the first `top` classes of at least `threshold`, of equals the lower number first."""
    order = np.argsort(-probability_K, kind="stable")
    likely: list[Likely] = []
    for k in order[:top]:
        probability = probability_K[k]
        if probability >= threshold:
            likely.append({"class": class_names[k], "probability": float(probability)})
    return likely


def to_json(records: Sequence[Record]) -> str:
    """Return a JSON array with one image a line.

    It is ASCII, which every terminal and every file name allows.
    """
    lines = [json.dumps(record, allow_nan=False) for record in records]
    joined = ",\n".join(lines)
    return f"[\n{joined}\n]"


def to_csv(records: Sequence[Record]) -> str:
    """Return CSV with a line for each image.

    Its cells are the name, why the image is unreadable, and classes, the most probable first.
    """
    rows = list(map(_list_cells, records))
    num_cells = max(map(len, rows))
    for row in rows:
        num_missing = num_cells - len(row)
        row += [""] * num_missing

    head = ["image", "error"]
    num_classes = (num_cells - len(head)) // 2
    for number in range(1, num_classes + 1):
        head.append(f"class_{number}")
        head.append(f"probability_{number}")
    return rows_to_csv([head, *rows])


def _list_cells(record: Record) -> list[str]:
    cells = [record["image"], record.get("error", "")]
    for likely in record.get("predictions", []):
        cells.append(likely["class"])
        cells.append(f"{likely['probability']:.6f}")
    return cells


def to_table(records: Sequence[Record]) -> str:
    """Return a line for each image: its classes, the most probable first."""
    rows = [(record["image"], _describe(record)) for record in records]
    return columns(rows, "<<", gap="   ")


def _describe(record: Record) -> str:
    if "error" in record:
        return f"cannot be read: {record['error']}"

    predictions = []
    for likely in record["predictions"]:
        probability = f"{likely['probability']:.1%}"
        predictions.append(f"{likely['class']} {probability}")
    return "   ".join(predictions) or "none"
