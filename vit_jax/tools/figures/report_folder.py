"""Results of an evaluation as a folder: metrics, tables, confusion matrix, figures."""

import contextlib
import functools
import io
from collections.abc import Iterator
from pathlib import Path

from vit_jax.data.transforms import EvaluationTransform
from vit_jax.evals.evaluate import Evaluate, EvaluationResult, WriteRows, to_json
from vit_jax.evals.label_map import Labelled
from vit_jax.storage.files import make_folder, open_atomically, write_atomically
from vit_jax.text.tables import to_csv, write_csv
from vit_jax.tools.figures import result_figures


def write_report(
    folder: Path,
    labelled: Labelled,
    evaluate: Evaluate,
    transform: EvaluationTransform,
    weights: str,
) -> EvaluationResult:
    """Evaluate and write the results into a folder.

    The first process calls this function, the others call `evaluate`.

    Args:
      folder: is created if it does not exist.
      labelled: the images and their labels.
      evaluate: computes the metrics.
      transform: decodes images for the figures.
      weights: the origin of the network's parameters.

    Raises:
      ValueError: the folder cannot be written; as `evaluate`.
    """
    with make_folder(folder), _open_table(folder / "images.csv") as write_images:
        result = evaluate(labelled, write_images)

    for name, rows in result.metrics.tables().items():
        _write_text(folder / f"{name}.csv", to_csv(rows))
    for name, figure in result_figures.draw(result.metrics, transform).items():
        write_atomically(folder / f"{name}.png", figure)
    _write_text(folder / "result.json", to_json({"weights": weights, **result.values()}) + "\n")
    return result


def _write_text(path: Path, text: str) -> None:
    write_atomically(path, text.encode("utf-8", "surrogateescape"))


@contextlib.contextmanager
def _open_table(path: Path) -> Iterator[WriteRows]:
    """Yield a function that writes rows of a CSV file, which appears at the end."""
    with open_atomically(path) as file:
        text = io.TextIOWrapper(
            file,
            "utf-8",
            "surrogateescape",
            newline="",
            write_through=True,
        )
        try:
            yield functools.partial(write_csv, text)
        finally:
            text.detach()  # otherwise the wrapper would close the file
