"""Classifiers on frozen features of several datasets: how they run, and their results as text."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from vit_jax.evals.features import Extractor, Features, notes_on
from vit_jax.evals.intervals import wilson_interval
from vit_jax.evals.neighbours import NUM_NEIGHBOURS, neighbour_accuracy
from vit_jax.evals.splits import Pair
from vit_jax.text.tables import columns

Measure = Callable[[Pair, Features, Features], tuple[Any, list[str]]]
"""From a dataset and the features of its sides to results, and notes for their readers."""


def run_on_pairs(
    pairs: Sequence[Pair], extractor: Extractor, measure: Measure
) -> tuple[dict[str, Any], list[str]]:
    """Return the results of every dataset by its name, and notes."""
    results = {}
    notes = list[str]()
    for pair in pairs:
        train = extractor.extract(pair.train)
        test = extractor.extract(pair.test)
        notes += notes_on(pair.name, pair.train.class_names, train, test)
        results[pair.name], more = measure(pair, train, test)
        notes += more
    return results, notes


def measure_neighbours(
    pair: Pair,
    train: Features,
    test: Features,
    neighbours: Sequence[int] = NUM_NEIGHBOURS,
    **options: Any,
) -> tuple[dict[str, Any], list[str]]:
    """Return the accuracies of nearest neighbours, with intervals, and notes.

    Options are as for `neighbour_accuracy`.
    """
    accuracies = neighbour_accuracy(
        train, test, pair.train.num_classes, neighbours=neighbours, **options
    )
    images = int(test.is_read_N.sum())
    intervals = {k: wilson_interval(share * images, images) for k, share in accuracies.items()}
    results = {"accuracy": accuracies, "interval": intervals, "test_images": images}
    impossible = ", ".join(str(k) for k in neighbours if k not in accuracies)
    if not impossible:
        return results, []
    return results, [f"{pair.name}: too few training images for {impossible} neighbours."]


def to_text(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Return a line for each dataset and classifier: the test accuracy with its 95 % interval."""
    rows = []
    for name, result in results.items():
        for cells in _list_rows(result):
            rows.append([name, *cells])
    return columns(rows, "<<<><", gap=" ", least=(24, 32, 17, 7))


def _list_rows(result: Mapping[str, Any]) -> Iterator[list[str]]:
    """Yield for each metric of a dataset: classifier, name of the metric, value, remark."""
    num_images = f" of {result['test_images']:,} images"
    if "mean_average_precision" in result:
        precision = f"{result['mean_average_precision']:.2%}"
        yield [_describe_probe(result), "test mean average precision", precision, num_images]

    accuracy = result.get("accuracy", {})
    interval = result.get("interval", {})
    if isinstance(accuracy, dict):
        accuracies = {f"{k} neighbours": (accuracy[k], interval[k]) for k in accuracy}
    else:
        accuracies = {_describe_probe(result): (accuracy, interval)}
    for classifier, (value, (low, high)) in accuracies.items():
        remark = f" (95 % interval {low:.2%} to {high:.2%}){num_images}"
        yield [classifier, "test accuracy", f"{value:.2%}", remark]

    if folds := result.get("folds"):
        metric = "accuracy" if "accuracy" in result else "mean average precision"
        deviation = f" standard deviation {np.std(folds, ddof=1):.2%}"
        remark = f"{deviation}, of {result['training_images']:,} training images"
        mean = f"{np.mean(folds):.2%}"
        yield [f"mean of {len(folds)} folds", f"held-out {metric}", mean, remark]

    for side, metrics in (("test", result), ("held-out", result.get("out_of_fold", {}))):
        if "loss" in metrics:
            error = f"{metrics['calibration_error']:.2%}"
            yield ["", f"{side} calibration error", error, f" loss {metrics['loss']:.4g}"]


def _describe_probe(result: Mapping[str, Any]) -> str:
    return f"{result['method']}, penalty {result['penalty']:.4g}"
