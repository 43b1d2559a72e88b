"""An evaluation as a folder of files: figures, tables of classes and of images, confusion, and pictures of them."""

import contextlib
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vit_jax.api import Model
from vit_jax.data.table import BETWEEN
from vit_jax.evals.answers import Answers
from vit_jax.evals.multilabel import THRESHOLD
from vit_jax.files import make_folder, open_atomically, write_atomically
from vit_jax.inference import figures
from vit_jax.inference.evaluate import Evaluate, Watch
from vit_jax.inference.labelled import Labelled
from vit_jax.inference.outcome import ClassEvaluation, Evaluation, to_json
from vit_jax.tables import to_csv, write_csv


def write_report(folder: Path, labelled: Labelled, model: Model, evaluate: Evaluate) -> Evaluation:
    """Evaluates, writing what is found into a folder; called by the first process, where the others evaluate alone.

    Raises:
      ValueError: the system refuses to write; as `evaluate`.
    """
    with _writing_images(folder, labelled) as watch:
        found = evaluate(labelled, watch)
    files: dict[str, str | bytes] = {"classes.csv": found.to_csv()}
    files |= {f"{name}.png": picture for name, picture in figures.draw(found, model.require_transform()).items()}
    if isinstance(found, ClassEvaluation) and found.tally.first_2LA is not None:
        files["confusion.csv"] = _confusion_csv(found)
    files["result.json"] = to_json({"weights": model.source, **found.values()}) + "\n"
    for name, content in files.items():
        as_bytes = content.encode("utf-8", "surrogateescape") if isinstance(content, str) else content
        write_atomically(folder / name, as_bytes)
    return found


@contextlib.contextmanager
def _writing_images(folder: Path, labelled: Labelled) -> Iterator[Watch]:
    """Yields what writes a line of images.csv for each answer as it comes; the file appears at the end."""
    names, answer_names = labelled.source.class_names, labelled.key.answer_names
    columns = ["class", "answer", "probability", "is_right"]
    cells: Callable[..., Iterator[list[Any]]] = _answered
    if labelled.source.is_multilabel:
        columns, cells = ["labels", "answers", "is_right", *names], _scored
    with make_folder(folder), open_atomically(folder / "images.csv") as file:
        text = io.TextIOWrapper(file, "utf-8", "surrogateescape", newline="", write_through=True)
        write_csv(text, [["image", *columns]])

        def watch(*found: Any) -> None:
            rows = cells(names, answer_names, *found)
            write_csv(text, ([labelled.source.name_of(record), *words] for record, *words in rows))

        try:
            yield watch
        finally:
            text.detach()  # or its end would close the file


def _answered(
    names: Sequence[str], answer_names: Sequence[str], answers: Answers, is_right_NT: np.ndarray
) -> Iterator[list[Any]]:
    """Of each image its number, class, first answer, the probability of that, and whether it is right."""
    rows = zip(answers.record_N.tolist(), answers.label_N, answers.class_NT[:, 0], strict=True)
    for (record, label, first), probability, is_right in zip(
        rows, answers.probability_NT[:, 0], is_right_NT[:, 0], strict=True
    ):
        yield [record, names[label], answer_names[first], f"{probability:.6f}", int(is_right)]


def _scored(
    names: Sequence[str], _: Sequence[str], record_N: np.ndarray, rows: Mapping[str, np.ndarray]
) -> Iterator[list[Any]]:
    """Of each image its number, labels, answers, whether they are the same, and the probability of every class."""
    for record, is_true_K, probability_K in zip(
        record_N.tolist(), rows["label_BK"] > 0, rows["probability_BK"], strict=True
    ):
        is_answered_K = probability_K >= THRESHOLD
        true, answered = (
            BETWEEN.join(names[k] for k in np.flatnonzero(is_K).tolist()) for is_K in (is_true_K, is_answered_K)
        )
        yield [record, true, answered, int(true == answered), *(f"{probability:.6f}" for probability in probability_K)]


def _confusion_csv(evaluation: ClassEvaluation) -> str:
    """A line for each class, a column for each answer: images of the class by their first answer."""
    assert evaluation.tally.first_2LA is not None
    key, names = evaluation.labelled.key, evaluation.labelled.source.class_names
    counts_LA = evaluation.tally.first_2LA.sum(axis=0)
    header = ["class", *(key.answer_names[output] for output in evaluation.tally.answer_A)]
    return to_csv([header, *([names[label], *counts_LA[label].tolist()] for label in key.listed.tolist())])
