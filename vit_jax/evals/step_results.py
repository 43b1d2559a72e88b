"""The results of a jitted step over a split: every example once, on all devices and processes.

A step takes a training state or a module, and a batch. It returns sums over the batch, rows (arrays
with a row for each image), or both as `StepResults`. One function for each:

* `sum_over` adds up the sums;
* `iterate_rows` yields the rows, without padding;
* `iterate_step_results` yields both, without the rows of padding and of unreadable images.

Padding is at the end of the last batch, so that the rows of all batches are in the order of the
split. Its mask is 0, and so is that of unreadable images; steps leave both out of their sums.

Legend: B global batch, N images that count.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

import jax
import numpy as np

from vit_jax.arrays import Batch, StepResults
from vit_jax.data.unreadable import TooManyUnreadable

OpenBatches = Callable[[], AbstractContextManager[Iterator[Batch]]]
Results = dict[str, jax.Array]
Rows = dict[str, np.ndarray]
Totals = dict[str, np.ndarray]
E = TypeVar("E")  # a training state or a module
S = TypeVar("S", contravariant=True)  # a training state


@dataclasses.dataclass(frozen=True)
class Split:
    """The examples of an evaluator.

    Attributes:
      name: for messages.
      class_names: in the order of the labels.
      num_examples: without padding.
      open_batches: returns a context of placed batches that hold every example once, padded with
        mask 0; every process gets the same number of batches. The iterator raises an error if the
        run has to stop.
    """

    name: str
    class_names: tuple[str, ...]
    num_examples: int
    open_batches: OpenBatches


class Evaluator(Protocol[S]):
    """Measures training states on a split."""

    def run(self, state: S) -> Iterator[tuple[str, float]]:
        """Yield names and values of the metrics of a training state."""


def iterate_step_results(
    open_batches: OpenBatches,
    step: Callable[[E, Batch], StepResults],
    evaluated: E,
) -> Iterator[StepResults]:
    """Yield the sums of every batch, and the rows of its images that count.

    There are no rows of padding and of unreadable images. "record_B" has the index of each image in
    the split. Arguments are as for `iterate_results`.
    """
    start = 0
    for sums, rows in iterate_results(open_batches, step, evaluated):
        if rows:
            end = start + len(rows["mask_B"])
            rows = keep_counted({**rows, "record_B": np.arange(start, end)})
            start = end
        yield StepResults(sums, rows)


def iterate_rows(
    open_batches: OpenBatches,
    step: Callable[[E, Batch], Results],
    evaluated: E,
    num_examples: int,
) -> Iterator[Rows]:
    """Yield the rows of every batch without padding; unreadable images remain, with mask 0.

    "record_B" has the index of each image in the split. Arguments are as for `iterate_results`.

    Raises:
      RuntimeError: the batches hold fewer than `num_examples` examples.
    """
    start = 0
    for rows in iterate_results(open_batches, step, evaluated):
        end = min(start + len(rows["mask_B"]), num_examples)
        num_images = end - start  # in the last batch without padding, which is at its end
        unpadded_rows = {name: value[:num_images] for name, value in rows.items()}
        yield {**unpadded_rows, "record_B": np.arange(start, end)}
        start = end
    if start < num_examples:
        raise RuntimeError(f"The batches of a split held {start:,} of its {num_examples:,} images.")


def sum_over(
    open_batches: OpenBatches,
    step: Callable[[E, Batch], Results],
    evaluated: E,
) -> Totals:
    """Return float64 totals over a split by name; {} without batches.

    Arguments are as for `iterate_results`.
    """
    totals: Totals = {}
    for sums in iterate_results(open_batches, step, evaluated):
        add_sums(totals, sums)
    return totals


def iterate_results(
    open_batches: OpenBatches,
    step: Callable[[E, Batch], object],
    evaluated: E,
) -> Iterator[Any]:
    """Yield the results of a step for every batch, as NumPy arrays on the host.

    They are one batch late, so that the devices do not wait for the host.

    Args:
      open_batches: see `Split`.
      step: (evaluated, batch) -> results.
      evaluated: a training state or a module.
    """
    pending: object = None
    with open_batches() as batches:
        for batch in batches:
            results = step(evaluated, batch)
            if pending is not None:
                yield jax.device_get(pending)
            pending = results
    if pending is not None:
        yield jax.device_get(pending)


def keep_counted(rows: Rows) -> Rows:
    """Return the N rows of images that count; their names keep the B of the batch."""
    counts_B = rows["mask_B"] > 0
    return {name: value[counts_B] for name, value in rows.items()}


def add_sums(totals: Totals, sums: Mapping[str, np.ndarray]) -> None:
    """Add the sums over a batch to float64 totals, in place."""
    for name, value in sums.items():
        total = totals.get(name, np.zeros(np.shape(value)))
        totals[name] = total + np.asarray(value, np.float64)


def require_images(num_images: float | np.ndarray, name: str) -> None:
    """Raise TooManyUnreadable if no image of a split counts."""
    if not num_images:
        raise TooManyUnreadable(
            f"{name}: no image could be read, or none has a label. There is nothing to evaluate."
        )
