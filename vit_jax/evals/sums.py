"""What every evaluator has in common: a split, and sums over its batches that are divided in the end.

When an evaluator runs, and under which prefix its results appear, is not its business.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

import jax
import numpy as np

from vit_jax.arrays import Batch

OpenBatches = Callable[[], AbstractContextManager[Iterator[Batch]]]
Results = dict[str, jax.Array]
Sums = Results


@dataclasses.dataclass(frozen=True)
class Split:
    """The examples that an evaluator sees.

    Attributes:
      name: for messages.
      class_names: in the order of the labels.
      num_examples: without padding.
      open_batches: a context that gives placed batches of every example once, padded with mask 0; the same number of
        batches in every process. Iterating ends with an error of its own where the run has to stop.
    """

    name: str
    class_names: tuple[str, ...]
    num_examples: int
    open_batches: OpenBatches


def means_of(sums: Mapping[str, Any]) -> dict[str, Any]:
    """What sums over examples, or patches, are reported as: each divided by "weight", their number.

    "images" is the number of images, where the weight is not.
    """
    reported = {"correct": "accuracy", "majority": "majority_accuracy"}
    return {reported.get(name, name): sums[name] / sums["weight"] for name in sums if name not in ("weight", "images")}


class Evaluator(Protocol):
    """Built once with its data; run as often as wanted."""

    def run(self, state: Any) -> Iterator[tuple[str, float]]:
        """Yields the names and values of everything measured on a training state."""


def results_of(
    open_batches: OpenBatches, step: Callable[[Any, Batch], Results], evaluated: Any
) -> Iterator[dict[str, np.ndarray]]:
    """What `step` gives for every batch of a split, on the host, one batch late, so that the devices never wait.

    The step takes what is evaluated, a training state or a model, and a batch.
    """
    pending: Results = {}
    with open_batches() as batches:
        for batch in batches:
            results = step(evaluated, batch)
            if pending:
                yield jax.device_get(pending)
            pending = results
    if pending:
        yield jax.device_get(pending)


def counted_rows(results: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Of what a step gave for each example of a batch (names end in _B, _BK, ...), the rows of those that count."""
    counts = results["mask_B"] > 0
    return {name: value[counts] for name, value in results.items() if "_B" in name}


def numbered_rows(
    open_batches: OpenBatches, step: Callable[[Any, Batch], Results], evaluated: Any
) -> Iterator[tuple[np.ndarray, dict[str, np.ndarray]]]:
    """`counted_rows` of every batch of a split, and the numbers of their examples in the split."""
    first = 0
    for found in results_of(open_batches, step, evaluated):
        yield first + np.flatnonzero(found["mask_B"] > 0), counted_rows(found)
        first += len(found["mask_B"])


def sum_over(open_batches: OpenBatches, step: Callable[[Any, Batch], Sums], evaluated: Any) -> dict[str, np.ndarray]:
    """Adds up, in float64, what `step` gives for every batch of a split; empty where there is no batch.

    Arguments as for `results_of`; the step sums over the examples that count.
    """
    totals: dict[str, np.ndarray] = {}
    for sums in results_of(open_batches, step, evaluated):
        for name, value in sums.items():
            totals[name] = totals.get(name, np.zeros(np.shape(value))) + np.asarray(value, np.float64)
    return totals
