"""What every evaluator has in common. When it runs, and under which prefix its results appear, is not its business."""

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol

from vit_jax.arrays import Batch

OpenBatches = Callable[[], AbstractContextManager[Iterator[Batch]]]


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


class Evaluator(Protocol):
    """Built once with its data; run as often as wanted."""

    def run(self, state: Any) -> Iterator[tuple[str, float]]:
        """Yields the names and values of everything measured on a training state."""
