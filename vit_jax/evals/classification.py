"""Loss and accuracy over a whole split, every example exactly once on any number of devices and processes."""

import collections
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import jax

from vit_jax.arrays import Batch

Sums = dict[str, jax.Array]


class ClassificationEvaluator:
    """Accuracy and mean loss.

    Args:
      name: prefix of what is reported: "test" gives `test_loss` and `test_accuracy`.
      open_batches: gives the split's batches, padded with mask 0, the same number in every process.
      step: (state, batch) -> sums of "loss", "correct" and "weight" over the examples that count.
    """

    def __init__(
        self,
        name: str,
        open_batches: Callable[[], AbstractContextManager[Iterator[Batch]]],
        step: Callable[[Any, Batch], Sums],
    ):
        self.name, self._open_batches, self._step = name, open_batches, step

    def run(self, state: Any) -> Iterator[tuple[str, float]]:
        """Yields `NAME_loss` and `NAME_accuracy`, both per example.

        Raises:
          ValueError: not one image of the split could be read.
        """
        totals: collections.Counter[str] = collections.Counter()
        pending: Sums | None = None
        with self._open_batches() as batches:
            for batch in batches:
                sums = self._step(state, batch)
                if pending is not None:  # read one batch late, so that the devices never wait
                    totals.update(_to_floats(pending))
                pending = sums
        if pending is not None:
            totals.update(_to_floats(pending))
        if not totals["weight"]:
            raise ValueError(f"No image of the {self.name} split could be read, so there is nothing to evaluate.")
        yield f"{self.name}_loss", totals["loss"] / totals["weight"]
        yield f"{self.name}_accuracy", totals["correct"] / totals["weight"]


def _to_floats(sums: Sums) -> dict[str, float]:
    return {name: float(value) for name, value in jax.device_get(sums).items()}
