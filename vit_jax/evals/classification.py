"""Loss and accuracy over a whole split, every example exactly once on any number of devices and processes."""

from collections.abc import Callable, Iterator
from typing import Any

from vit_jax.arrays import Batch
from vit_jax.evals.sums import OpenBatches, Sums, sum_over


class ClassificationEvaluator:
    """Accuracy and mean loss.

    Args:
      name: prefix of what is reported: "test" gives `test_loss` and `test_accuracy`.
      open_batches: gives the split's batches, padded with mask 0, the same number in every process.
      step: (state, batch) -> sums of "loss", "correct" and "weight" over the examples that count.
      after_batch: called after each batch; may raise, which ends an evaluation without a result.
    """

    def __init__(
        self,
        name: str,
        open_batches: OpenBatches,
        step: Callable[[Any, Batch], Sums],
        after_batch: Callable[[], object] = lambda: None,
    ):
        self.name, self._open_batches, self._step, self._after_batch = name, open_batches, step, after_batch

    def run(self, state: Any) -> Iterator[tuple[str, float]]:
        """Yields `NAME_loss` and `NAME_accuracy`, both per example, and `NAME_images`, the number of examples.

        Raises:
          ValueError: not one image of the split could be read.
        """
        totals = sum_over(self._open_batches, self._step, state, self._after_batch)
        if not totals.get("weight"):
            raise ValueError(f"No image of the {self.name} split could be read, so there is nothing to evaluate.")
        yield f"{self.name}_loss", float(totals["loss"] / totals["weight"])
        yield f"{self.name}_accuracy", float(totals["correct"] / totals["weight"])
        yield f"{self.name}_images", float(totals["weight"])
