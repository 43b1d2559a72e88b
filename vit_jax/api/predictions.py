"""Predictions for image files, as records, JSON, CSV and text."""

import itertools
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
        likely = order[probability_K[order] >= threshold]
        classes: list[Likely] = [
            {"class": model.class_names[k], "probability": float(probability_K[k])} for k in likely
        ]
        yield {"image": image, "predictions": classes}


def to_json(records: Sequence[Record]) -> str:
    """Return a JSON array with one image a line, in ASCII, which every terminal and every file name allows."""
    return "[\n" + ",\n".join(json.dumps(record, allow_nan=False) for record in records) + "\n]"


def to_csv(records: Sequence[Record]) -> str:
    """Return CSV with a line for each image: name, why it is unreadable, classes, the most probable first."""
    most = max(len(record.get("predictions", ())) for record in records)
    rows = [
        [
            "image",
            "error",
            *(f"{word}_{n}" for n in range(1, most + 1) for word in ("class", "probability")),
        ]
    ]
    for record in records:
        classes = [
            (one["class"], f"{one['probability']:.6f}") for one in record.get("predictions", ())
        ]
        empty = [("", "")] * (most - len(classes))
        rows.append([record["image"], record.get("error", ""), *itertools.chain(*classes, *empty)])
    return rows_to_csv(rows)


def to_table(records: Sequence[Record]) -> str:
    """Return a line for each image: its classes, the most probable first."""

    def classes(record: Record) -> str:
        if "error" in record:
            return f"cannot be read: {record['error']}"
        return (
            "   ".join(f"{one['class']} {one['probability']:.1%}" for one in record["predictions"])
            or "none"
        )

    return columns([(record["image"], classes(record)) for record in records], "<<", gap="   ")
