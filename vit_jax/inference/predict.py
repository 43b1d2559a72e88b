"""Images in, classes and probabilities out."""

import dataclasses
import json
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from vit_jax.data.files import FileSource
from vit_jax.data.pipeline import evaluation_batches
from vit_jax.data.unreadable import reason_of
from vit_jax.data.workers import Parallelism, available_cores
from vit_jax.inference.classifier import Classifier, probabilities, top_classes

LARGEST_BATCH = 64
_NOT_FINITE = "Its parameters are damaged, or too large for the dtype it computes in."


@dataclasses.dataclass(frozen=True)
class Prediction:
    """What is seen in one image.

    Attributes:
      image: its file.
      probabilities: (K,), float32; None where the image cannot be read.
      error: why it cannot be read.
    """

    image: str
    probabilities: np.ndarray | None = None
    error: str | None = None


def predict(classifier: Classifier, images: Sequence[str]) -> Iterator[Prediction]:
    """Classifies files, in their order; one that cannot be read is told and the rest goes on.

    Args:
      classifier: computes on its device.
      images: paths.

    Raises:
      ValueError: the network's answer to an image is no number.
    """
    source = FileSource(images, classifier.class_names)
    batch_size = min(LARGEST_BATCH, len(source))
    dtype = classifier.architecture.compute_dtype
    run = jax.jit(lambda model, image: probabilities(model, image, dtype))
    threads = Parallelism(num_workers=0, num_threads=available_cores())
    with evaluation_batches(
        source, classifier.transform, global_batch=batch_size, rows=np.arange(batch_size), parallelism=threads
    ) as batches:
        for batch in batches:
            found = jax.device_get(run(classifier.model, batch.image))
            for row, index in enumerate(batch.record_index.tolist()):
                if index < 0:
                    continue
                if not batch.mask[row]:
                    yield Prediction(images[index], error=reason_of(source, index))
                    continue
                if not np.isfinite(found[row]).all():
                    raise ValueError(f"{classifier.source}: the answer to {images[index]} is no number. {_NOT_FINITE}")
                yield Prediction(images[index], found[row])


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
