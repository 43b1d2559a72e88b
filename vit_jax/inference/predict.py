"""Classes and probabilities of image files, and how they are printed."""

import dataclasses
import json
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from vit_jax.api import Model
from vit_jax.data.images import UnreadableImage


@dataclasses.dataclass(frozen=True)
class Prediction:
    """The result for one image.

    Attributes:
      image: its file.
      probabilities: (K,), float32; None where the image cannot be read.
      error: why it cannot be read.
    """

    image: str
    probabilities: np.ndarray | None = None
    error: str | None = None


def predict(model: Model, images: Sequence[str], *, batch_size: int = 64) -> Iterator[Prediction]:
    """Classifies files in their order, and continues after one that cannot be read.

    Raises:
      ValueError: probabilities that are not finite; the model has no classes or states no preparation of images.
    """
    for image, found in zip(images, model.stream(list(images), batch_size=batch_size), strict=True):
        if isinstance(found, UnreadableImage):
            yield Prediction(image, error=str(found))
            continue
        if not np.isfinite(found).all():
            raise ValueError(
                f"{model.source}: the probabilities of {image} are not finite. Its parameters are damaged, or too "
                "large for the dtype it computes in."
            )
        yield Prediction(image, found)


def top_classes(probability_BK: np.ndarray, count: int) -> np.ndarray:
    """(B, count) class numbers, the most probable first; among equals the lower number."""
    return np.argsort(-probability_BK, axis=1, kind="stable")[:, :count]


def to_record(prediction: Prediction, class_names: Sequence[str], top: int) -> dict[str, Any]:
    """One JSON object: the image, and its classes with probabilities, or the error."""
    if prediction.probabilities is None:
        return {"image": prediction.image, "error": prediction.error}
    order = top_classes(prediction.probabilities[None], top)[0]
    classes = [{"class": class_names[k], "probability": float(prediction.probabilities[k])} for k in order]
    return {"image": prediction.image, "predictions": classes}


def to_json(records: Sequence[dict[str, Any]]) -> str:
    """A JSON array, one image a line; in ASCII, which every terminal and every file name survives."""
    return "[\n" + ",\n".join(json.dumps(record, allow_nan=False) for record in records) + "\n]"


def to_table(records: Sequence[dict[str, Any]]) -> str:
    """One line for each image: its classes, the most probable first."""
    width = max(len(record["image"]) for record in records)
    lines = []
    for record in records:
        if "error" in record:
            text = f"cannot be read: {record['error']}"
        else:
            text = "   ".join(f"{found['class']} {found['probability']:.1%}" for found in record["predictions"])
        lines.append(f"{record['image']:<{width}}   {text}")
    return "\n".join(lines)
