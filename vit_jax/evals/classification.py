"""Loss and accuracy over a full split, every example exactly once on any number of devices and processes."""

from collections.abc import Callable, Iterator
from typing import Any

from vit_jax.arrays import Batch
from vit_jax.evals.sums import Split, Sums, means_of, sum_over


class ClassificationEvaluator:
    """Accuracy and mean loss.

    Args:
      split: the examples.
      step: (state, batch) -> sums of "loss", "correct" and "weight" over the examples that count, as an objective has
        them; of masked patches over these.
    """

    def __init__(self, split: Split, step: Callable[[Any, Batch], Sums]):
        self._split, self._step = split, step

    def run(self, state: Any) -> Iterator[tuple[str, float]]:
        """Yields "loss" and "accuracy", both per example, and "images", the number of examples.

        Raises:
          ValueError: not one image of the split could be read.
        """
        totals = sum_over(self._split.open_batches, self._step, state)
        if not totals.get("weight"):
            raise ValueError(f"No image of the {self._split.name} split could be read: there is nothing to evaluate.")
        yield from means_of(totals).items()
        yield "images", float(totals.get("images", totals["weight"]))
