"""Results of an evaluation as a folder of files: metrics, tables of classes and of images, confusion matrix, figures.

Legend: N images, T predictions of an image, K classes.
"""

import contextlib
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vit_jax.data.table import BETWEEN
from vit_jax.data.transforms import EvaluationTransform
from vit_jax.evals import result_figures
from vit_jax.evals.classification import Predictions
from vit_jax.evals.evaluate import Evaluate, Watch
from vit_jax.evals.label_map import Labelled
from vit_jax.evals.multilabel import THRESHOLD
from vit_jax.evals.results import ClassEvaluation, Evaluation, to_json
from vit_jax.files import make_folder, open_atomically, write_atomically
from vit_jax.tables import write_csv


def write_report(
    folder: Path, labelled: Labelled, evaluate: Evaluate, transform: EvaluationTransform, weights: str
) -> Evaluation:
    """Evaluate and write the results into a folder. The first process calls this, the others `evaluate`.

    Args:
      folder: need not exist.
      labelled: the images.
      evaluate: evaluates the network.
      transform: decodes images for the figures.
      weights: where the network comes from.

    Raises:
      ValueError: the folder cannot be written; as `evaluate`.
    """
    with _writing_images(folder, labelled) as watch:
        evaluation = evaluate(labelled, watch)
    files: dict[str, str | bytes] = {"classes.csv": evaluation.to_csv()}
    files |= {f"{name}.png": figure for name, figure in result_figures.draw(evaluation, transform).items()}
    if isinstance(evaluation, ClassEvaluation) and (confusion := evaluation.confusion_csv()) is not None:
        files["confusion.csv"] = confusion
    files["result.json"] = to_json({"weights": weights, **evaluation.values()}) + "\n"
    for name, content in files.items():
        as_bytes = content.encode("utf-8", "surrogateescape") if isinstance(content, str) else content
        write_atomically(folder / name, as_bytes)
    return evaluation


@contextlib.contextmanager
def _writing_images(folder: Path, labelled: Labelled) -> Iterator[Watch]:
    """Yield a `Watch` that writes the lines of images.csv; the file appears at the end."""
    names, output_names = labelled.source.class_names, labelled.label_map.output_names
    head = ["class", "answer", "probability", "is_right"]
    cells: Callable[..., Iterator[list[Any]]] = _predicted
    if labelled.source.is_multilabel:
        head, cells = ["labels", "answers", "is_right", *names], _scored
    with make_folder(folder), open_atomically(folder / "images.csv") as file:
        text = io.TextIOWrapper(file, "utf-8", "surrogateescape", newline="", write_through=True)
        write_csv(text, [["image", *head]])

        def watch(*seen: Any) -> None:
            rows = cells(names, output_names, *seen)
            write_csv(text, ([labelled.source.name_of(record), *row] for record, *row in rows))

        try:
            yield watch
        finally:
            text.detach()  # or its end would close the file


def _predicted(
    names: Sequence[str], output_names: Sequence[str], found: Predictions, is_right_NT: np.ndarray
) -> Iterator[list[Any]]:
    """Yield for each image: number, class, predicted class, its probability, whether it is right."""
    first = (
        found.record_N.tolist(),
        found.label_N,
        found.class_NT[:, 0],
        found.probability_NT[:, 0],
        is_right_NT[:, 0],
    )
    for record, label, output, probability, is_right in zip(*first, strict=True):
        yield [record, names[label], output_names[output], f"{probability:.6f}", int(is_right)]


def _scored(
    names: Sequence[str], _: Sequence[str], record_N: np.ndarray, rows: Mapping[str, np.ndarray]
) -> Iterator[list[Any]]:
    """Yield for each image: number, labels, predicted labels, whether they are equal, probabilities of all classes."""
    for record, is_true_K, probability_K in zip(
        record_N.tolist(), rows["label_BK"] > 0, rows["probability_BK"], strict=True
    ):
        true, predicted = (
            BETWEEN.join(names[k] for k in np.flatnonzero(is_K).tolist())
            for is_K in (is_true_K, probability_K >= THRESHOLD)
        )
        yield [record, true, predicted, int(true == predicted), *(f"{p:.6f}" for p in probability_K)]
