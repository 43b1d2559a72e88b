"""An evaluation as a folder of files: figures, tables of classes and of images, confusion, and pictures of them."""

import contextlib
import csv
import io
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from vit_jax.api import Model
from vit_jax.evals.answers import Answers
from vit_jax.files import make_folder, open_atomically, write_atomically
from vit_jax.inference import figures
from vit_jax.inference.evaluate import Evaluate, Watch
from vit_jax.inference.labelled import Labelled
from vit_jax.inference.outcome import Evaluation, to_json


def write_report(folder: Path, labelled: Labelled, model: Model, evaluate: Evaluate) -> Evaluation:
    """Evaluates, writing what is found into a folder; called by the first process, where the others evaluate alone.

    Raises:
      ValueError: the system refuses to write; as `evaluate`.
    """
    with _writing_images(folder, labelled) as watch:
        found = evaluate(labelled, watch)
    files: dict[str, str | bytes] = {
        "classes.csv": found.to_csv(),
        "reliability.png": figures.draw_reliability(found),
        "mistakes.png": figures.draw_mistakes(found, model.require_transform()),
    }
    if found.tally.first_2LA is not None:
        files |= {"confusion.csv": _confusion_csv(found), "confusion.png": figures.draw_confusion(found)}
    files["result.json"] = to_json({"weights": model.source, **found.values()}) + "\n"
    for name, content in files.items():
        as_bytes = content.encode("utf-8", "surrogateescape") if isinstance(content, str) else content
        write_atomically(folder / name, as_bytes)
    return found


@contextlib.contextmanager
def _writing_images(folder: Path, labelled: Labelled) -> Iterator[Watch]:
    """Yields what writes a line of images.csv for each answer as it comes; the file appears at the end."""
    names, answer_names = labelled.source.class_names, labelled.key.answer_names
    with make_folder(folder), open_atomically(folder / "images.csv") as file:
        text = io.TextIOWrapper(file, "utf-8", "surrogateescape", newline="", write_through=True)
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(["image", "class", "answer", "probability", "is_right"])

        def watch(answers: Answers, is_right_NT: np.ndarray) -> None:
            rows = zip(
                answers.record_N.tolist(),
                answers.label_N,
                answers.class_NT,
                answers.probability_NT,
                is_right_NT,
                strict=True,
            )
            for record, label, class_T, probability_T, is_right_T in rows:
                words = labelled.source.name_of(record), names[label], answer_names[class_T[0]]
                writer.writerow([*words, f"{probability_T[0]:.6f}", int(is_right_T[0])])

        try:
            yield watch
        finally:
            text.detach()  # or its end would close the file


def _confusion_csv(evaluation: Evaluation) -> str:
    """A line for each class, a column for each answer: images of the class by their first answer."""
    assert evaluation.tally.first_2LA is not None
    key, names = evaluation.labelled.key, evaluation.labelled.source.class_names
    counts_LA = evaluation.tally.first_2LA.sum(axis=0)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["class", *(key.answer_names[output] for output in evaluation.tally.answer_A)])
    writer.writerows([names[label], *counts_LA[label].tolist()] for label in key.listed.tolist())
    return text.getvalue()
