"""Results of an evaluation as a folder of files: metrics, tables of classes and of images, confusion matrix, figures.

Legend: N images, T predictions of an image, K classes.
"""

import contextlib
import io
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from vit_jax.data.table import BETWEEN
from vit_jax.data.transforms import EvaluationTransform
from vit_jax.evals import result_figures
from vit_jax.evals.evaluate import Evaluate, Evaluation, Watch, to_json
from vit_jax.evals.label_map import Labelled
from vit_jax.evals.multilabel import THRESHOLD
from vit_jax.evals.single_label import ClassMetrics
from vit_jax.files import make_folder, open_atomically, write_atomically
from vit_jax.tables import to_csv, write_csv


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
    files |= {f"{name}.png": figure for name, figure in result_figures.draw(evaluation.metrics, transform).items()}
    if isinstance(evaluation.metrics, ClassMetrics) and (rows := list(evaluation.metrics.confusion_table())):
        files["confusion.csv"] = to_csv(rows)
    files["result.json"] = to_json({"weights": weights, **evaluation.values()}) + "\n"
    for name, content in files.items():
        as_bytes = content.encode("utf-8", "surrogateescape") if isinstance(content, str) else content
        write_atomically(folder / name, as_bytes)
    return evaluation


@contextlib.contextmanager
def _writing_images(folder: Path, labelled: Labelled) -> Iterator[Watch]:
    """Yield a `Watch` that writes the lines of images.csv; the file appears at the end."""
    source, head, cells = labelled.source, ["class", "answer", "probability", "is_right"], _predicted
    if source.is_multilabel:
        head, cells = ["labels", "answers", "is_right", *source.class_names], _scored
    with make_folder(folder), open_atomically(folder / "images.csv") as file:
        text = io.TextIOWrapper(file, "utf-8", "surrogateescape", newline="", write_through=True)
        write_csv(text, [["image", *head]])

        def watch(record_N: np.ndarray, rows: Mapping[str, np.ndarray]) -> None:
            lines = zip(record_N.tolist(), cells(labelled, record_N, rows), strict=True)
            write_csv(text, ([source.name_of(record), *line] for record, line in lines))

        try:
            yield watch
        finally:
            text.detach()  # or its end would close the file


def _predicted(labelled: Labelled, record_N: np.ndarray, rows: Mapping[str, np.ndarray]) -> Iterator[list[Any]]:
    """Yield for each image: class, predicted class, its probability, whether it is right."""
    label_N, class_NT, label_map = rows["label_B"], rows["class_BT"], labelled.label_map
    is_right_N = label_map.is_right(record_N, label_N, class_NT)[:, 0]
    columns = label_N, class_NT[:, 0], rows["probability_BT"][:, 0], is_right_N
    for label, output, probability, is_right in zip(*columns, strict=True):
        names = labelled.source.class_names[label], label_map.output_names[output]
        yield [*names, f"{probability:.6f}", int(is_right)]


def _scored(labelled: Labelled, record_N: np.ndarray, rows: Mapping[str, np.ndarray]) -> Iterator[list[Any]]:
    """Yield for each image: labels, predicted labels, whether they are equal, probabilities of all classes."""
    names = labelled.source.class_names
    for is_true_K, probability_K in zip(rows["label_BK"] > 0, rows["probability_BK"], strict=True):
        is_labels = is_true_K, probability_K >= THRESHOLD
        true, predicted = (BETWEEN.join(names[k] for k in np.flatnonzero(is_K).tolist()) for is_K in is_labels)
        yield [true, predicted, int(true == predicted), *(f"{p:.6f}" for p in probability_K)]
