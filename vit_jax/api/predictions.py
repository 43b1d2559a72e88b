"""Predictions for image files, as records, JSON, CSV and text."""

import json
from collections.abc import Iterator, Sequence
from typing import Required, TypedDict

import numpy as np

from vit_jax.api.model import Model
from vit_jax.data.decoding.images import UnreadableImage
from vit_jax.evals.runner import require_finite
from vit_jax.text.tables import columns
from vit_jax.text.tables import to_csv as rows_to_csv

Likely = TypedDict("Likely", {"class": str, "probability": float})


class Record(TypedDict, total=False):
    """An image, and its most probable classes or why it is unreadable."""

    image: Required[str]
    error: str
    predictions: list[Likely]


def predict(
    model: Model, images: Sequence[str], top: int | None, threshold: float = 0.0
) -> Iterator[Record]:
    """Yield a record for each file, in their order: its most probable classes, or why it is unreadable.

    The classes are the first `top`, or all, with a probability of at least `threshold`.

    Raises:
      ValueError: probabilities that are not finite; the model has no classes or states no
        preparation of images.
    """
    for image, probability_K in zip(images, model.stream(list(images)), strict=True):
        if isinstance(probability_K, UnreadableImage):
            yield {"image": image, "error": str(probability_K)}
            continue
        require_finite(probability_K[None], model.source, [image].__getitem__)
        order = np.argsort(-probability_K, kind="stable")[:top]  # of equals the lower number first
        likely: list[Likely] = []
        for k in order[probability_K[order] >= threshold]:
            likely.append({"class": model.class_names[k], "probability": float(probability_K[k])})
        yield {"image": image, "predictions": likely}


def to_json(records: Sequence[Record]) -> str:
    """Return a JSON array with one image a line, in ASCII, which every terminal and every file name allows."""
    lines = [json.dumps(record, allow_nan=False) for record in records]
    return "[\n" + ",\n".join(lines) + "\n]"


def to_csv(records: Sequence[Record]) -> str:
    """Return CSV with a line for each image: name, why it is unreadable, classes, the most probable first."""
    most = max(len(record.get("predictions", ())) for record in records)
    head = ["image", "error"]
    for number in range(1, most + 1):
        head += [f"class_{number}", f"probability_{number}"]
    rows = [head]
    for record in records:
        row = [record["image"], record.get("error", "")]
        for likely in record.get("predictions", ()):
            row += [likely["class"], f"{likely['probability']:.6f}"]
        empty_cells = [""] * (len(head) - len(row))
        rows.append(row + empty_cells)
    return rows_to_csv(rows)


def to_table(records: Sequence[Record]) -> str:
    """Return a line for each image: its classes, the most probable first."""
    rows = [(record["image"], _describe(record)) for record in records]
    return columns(rows, "<<", gap="   ")


def _describe(record: Record) -> str:
    if "error" in record:
        return f"cannot be read: {record['error']}"
    likely = [f"{one['class']} {one['probability']:.1%}" for one in record["predictions"]]
    return "   ".join(likely) or "none"
