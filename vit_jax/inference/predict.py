"""Classes and probabilities of image files, and how they are printed."""

import itertools
import json
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from vit_jax.api import Model
from vit_jax.data.images import UnreadableImage
from vit_jax.files import printable
from vit_jax.tables import to_csv as rows_to_csv


def predict(model: Model, images: Sequence[str], top: int | None, threshold: float = 0.0) -> Iterator[dict[str, Any]]:
    """One JSON object for each file, in their order: its most probable classes, or why it cannot be read.

    They are the first `top`, or all, of those whose probability is at least `threshold`.

    Raises:
      ValueError: probabilities that are not finite; the model has no classes or states no preparation of images.
    """
    for image, found in zip(images, model.stream(list(images)), strict=True):
        if isinstance(found, UnreadableImage):
            yield {"image": image, "error": str(found)}
            continue
        if not np.isfinite(found).all():
            raise not_finite(model, image)
        order = np.argsort(-found, kind="stable")[:top]  # of equals the lower number first
        likely = order[found[order] >= threshold]
        classes = [{"class": model.class_names[k], "probability": float(found[k])} for k in likely]
        yield {"image": image, "predictions": classes}


def not_finite(model: Model, image: str) -> ValueError:
    """The error for a network that does not answer."""
    return ValueError(
        f"{model.source}: the probabilities of {printable(image)} are not finite. Its parameters are damaged, or too "
        "large for the dtype it computes in."
    )


def to_json(records: Sequence[dict[str, Any]]) -> str:
    """A JSON array, one image a line; in ASCII, which every terminal and every file name survives."""
    return "[\n" + ",\n".join(json.dumps(record, allow_nan=False) for record in records) + "\n]"


def to_csv(records: Sequence[dict[str, Any]]) -> str:
    """Return a line for each image: its name, why it cannot be read, and its classes, the most probable first."""
    most = max(len(record.get("predictions", ())) for record in records)
    rows = [["image", "error", *(f"{word}_{n}" for n in range(1, most + 1) for word in ("class", "probability"))]]
    for record in records:
        classes = [(one["class"], f"{one['probability']:.6f}") for one in record.get("predictions", ())]
        empty = [("", "")] * (most - len(classes))
        rows.append([record["image"], record.get("error", ""), *itertools.chain(*classes, *empty)])
    return rows_to_csv(rows)


def to_table(records: Sequence[dict[str, Any]]) -> str:
    """One line for each image: its classes, the most probable first."""
    names = [printable(record["image"]) for record in records]
    width = max(map(len, names))
    lines = []
    for name, record in zip(names, records, strict=True):
        if "error" in record:
            text = f"cannot be read: {printable(record['error'])}"
        else:
            classes = record["predictions"]
            text = "   ".join(f"{printable(found['class'])} {found['probability']:.1%}" for found in classes) or "none"
        lines.append(f"{name:<{width}}   {text}")
    return "\n".join(lines)
