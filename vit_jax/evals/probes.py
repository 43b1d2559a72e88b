"""Classifiers on frozen features of several datasets: how they run, and their results as text."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from vit_jax.evals.features import Extractor, Features, list_notes
from vit_jax.evals.intervals import wilson_interval
from vit_jax.evals.neighbours import NUM_NEIGHBOURS, neighbour_accuracy
from vit_jax.evals.splits import Pair
from vit_jax.storage.files import JsonObject
from vit_jax.text.tables import columns

R = TypeVar("R")  # the results of a dataset
Measure = Callable[[Pair, Features, Features], tuple[R, list[str]]]
"""Returns results and notes for a dataset and the features of its training and test images."""


def run_on_pairs(
    pairs: Sequence[Pair],
    extractor: Extractor,
    measure: Measure[R],
) -> tuple[dict[str, R], list[str]]:
    """Return the results of every dataset by its name, and notes."""
    results = {}
    notes = list[str]()
    for pair in pairs:
        train = extractor.extract(pair.train)
        test = extractor.extract(pair.test)

        notes += list_notes(pair.name, pair.train.class_names, train, test)

        result, remarks = measure(pair, train, test)
        results[pair.name] = result
        notes += remarks
    return results, notes


def measure_neighbours(
    pair: Pair,
    train: Features,
    test: Features,
    neighbours: Sequence[int] = NUM_NEIGHBOURS,
    **options: Any,
) -> tuple[JsonObject, list[str]]:
    """Return the accuracies of nearest neighbours, with intervals, and notes.

    Options are as for `neighbour_accuracy`.
    """
    accuracies = neighbour_accuracy(
        train,
        test,
        pair.train.num_classes,
        neighbours=neighbours,
        **options,
    )
    num_images = int(test.is_read_N.sum())
    intervals = {}
    for k, accuracy in accuracies.items():
        num_correct = accuracy * num_images
        intervals[k] = wilson_interval(num_correct, num_images)
    results = {
        "accuracy": accuracies,
        "interval": intervals,
        "test_images": num_images,
    }

    impossible = [str(k) for k in neighbours if k not in accuracies]
    if not impossible:
        return results, []
    numbers = ", ".join(impossible)
    return results, [f"{pair.name}: too few training images for {numbers} neighbours."]


def to_text(results: Mapping[str, JsonObject]) -> str:
    """Return a line for each dataset and classifier: the test accuracy with its 95 % interval."""
    rows = []
    for name, result in results.items():
        for cells in _list_rows(result):
            rows.append([name, *cells])

    return columns(rows, "<<<><", gap=" ", least=(24, 32, 17, 7))


def _list_rows(result: JsonObject) -> Iterator[list[str]]:
    """Yield for each metric of a dataset: classifier, name of the metric, value, remark."""
    num_images = f" of {result['test_images']:,} images"
    if "mean_average_precision" in result:
        classifier = _describe_probe(result)
        precision = f"{result['mean_average_precision']:.2%}"
        yield [classifier, "test mean average precision", precision, num_images]

    for classifier, accuracy, interval in _list_accuracies(result):
        low, high = interval
        remark = f" (95 % interval {low:.2%} to {high:.2%}){num_images}"
        yield [classifier, "test accuracy", f"{accuracy:.2%}", remark]

    if result.get("folds"):
        yield _describe_folds(result)

    yield from _list_probability_metrics("test", result)
    yield from _list_probability_metrics("held-out", result.get("out_of_fold", {}))


def _list_accuracies(result: JsonObject) -> Iterator[tuple[str, float, Any]]:
    """Yield for each accuracy of a dataset: classifier, accuracy, interval."""
    if "accuracy" not in result:
        return

    accuracy = result["accuracy"]
    interval = result["interval"]
    if not isinstance(accuracy, dict):
        yield _describe_probe(result), accuracy, interval
        return
    for k in accuracy:
        yield f"{k} neighbours", accuracy[k], interval[k]


def _describe_folds(result: JsonObject) -> list[str]:
    """Return the row of a cross-validation: mean and standard deviation over the folds."""
    folds = result["folds"]
    metric = "accuracy" if "accuracy" in result else "mean average precision"
    num_images = result["training_images"]
    deviation = np.std(folds, ddof=1)
    return [
        f"mean of {len(folds)} folds",
        f"held-out {metric}",
        f"{np.mean(folds):.2%}",
        f" standard deviation {deviation:.2%}, of {num_images:,} training images",
    ]


def _list_probability_metrics(side: str, metrics: JsonObject) -> Iterator[list[str]]:
    """Yield the row of calibration error and loss, if the classifier has probabilities."""
    if "loss" not in metrics:
        return
    error = f"{metrics['calibration_error']:.2%}"
    loss = f" loss {metrics['loss']:.4g}"
    yield ["", f"{side} calibration error", error, loss]


def _describe_probe(result: JsonObject) -> str:
    return f"{result['method']}, penalty {result['penalty']:.4g}"
