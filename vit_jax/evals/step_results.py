"""Run a jitted step over a split, and yield what it returns: every example once, on all devices.

A step is a function of what it evaluates, a training state or a module, and of a batch. It returns

* sums over the images that count, or
* rows: arrays with one row for each image of the batch, among them "mask_B", or
* both, as `StepResults`.

`iterate_results` yields them batch by batch. Three functions use it, one for each kind:

* `sum_over` adds up sums;
* `iterate_rows` yields rows without padding, also of unreadable images, for results by image;
* `iterate_step_results` yields both, the rows only of images that count, for metrics.

The images of all batches are in the order of the split, so that counting them gives their indices.
Padding is at the end of the last batch; its mask is 0. So is the mask of images that could not be
read. Images with mask 0 do not count.

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
Results = dict[str, jax.Array]  # sums or rows of a batch, on the devices
Rows = dict[str, np.ndarray]  # rows of a batch, on the host
Totals = dict[str, np.ndarray]  # sums over a split, on the host
Evaluated = TypeVar("Evaluated")  # a training state or a module
State = TypeVar("State", contravariant=True)  # protocols need this variance


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


class Evaluator(Protocol[State]):
    """Measures training states on a split."""

    def run(self, state: State) -> Iterator[tuple[str, float]]:
        """Yield names and values of the metrics of a training state."""


def iterate_results(
    open_batches: OpenBatches,
    step: Callable[[Evaluated, Batch], object],
    evaluated: Evaluated,
) -> Iterator[Any]:
    """Yield the results of a step for every batch, as NumPy arrays on the host.

    The results of a batch are fetched after the step of the next one has been started, so that the
    devices do not wait for the host.

    Args:
      open_batches: see `Split`.
      step: (evaluated, batch) -> results.
      evaluated: a training state or a module.
    """
    previous: object = None
    with open_batches() as batches:
        for batch in batches:
            results = step(evaluated, batch)
            if previous is not None:
                yield jax.device_get(previous)
            previous = results
    if previous is not None:
        yield jax.device_get(previous)


def sum_over(
    open_batches: OpenBatches,
    step: Callable[[Evaluated, Batch], Results],
    evaluated: Evaluated,
) -> Totals:
    """Return float64 totals over a split by name; {} without batches.

    Arguments are as for `iterate_results`.
    """
    totals: Totals = {}
    for sums in iterate_results(open_batches, step, evaluated):
        add_sums(totals, sums)
    return totals


def iterate_rows(
    open_batches: OpenBatches,
    step: Callable[[Evaluated, Batch], Results],
    evaluated: Evaluated,
    num_examples: int,
) -> Iterator[Rows]:
    """Yield the rows of every batch without padding; unreadable images remain, with mask 0.

    "record_B" has the index of each image in the split. Arguments are as for `iterate_results`.

    Raises:
      RuntimeError: the batches hold fewer than `num_examples` examples.
    """
    num_seen = 0
    for rows in iterate_results(open_batches, step, evaluated):
        rows = add_indices(rows, start=num_seen)
        num_unpadded = max(num_examples - num_seen, 0)
        num_seen += len(rows["mask_B"])
        yield select_rows(rows, slice(num_unpadded))
    if num_seen < num_examples:
        raise RuntimeError(
            f"The batches of a split held {num_seen:,} of its {num_examples:,} images."
        )


def iterate_step_results(
    open_batches: OpenBatches,
    step: Callable[[Evaluated, Batch], StepResults],
    evaluated: Evaluated,
) -> Iterator[StepResults]:
    """Yield the sums of every batch, and the rows of its images that count.

    "record_B" has the index of each image in the split. Arguments are as for `iterate_results`.
    """
    num_seen = 0
    for sums, rows in iterate_results(open_batches, step, evaluated):
        if rows:  # a step returns them for every batch or for none
            rows = add_indices(rows, start=num_seen)
            num_seen += len(rows["mask_B"])
            rows = keep_counted(rows)
        yield StepResults(sums, rows)


def add_indices(rows: Rows, start: int) -> Rows:
    """Return the rows of a batch and "record_B", the index in the split, from `start` on."""
    end = start + len(rows["mask_B"])
    return rows | {"record_B": np.arange(start, end)}


def keep_counted(rows: Rows) -> Rows:
    """Return the N rows of images that count; their names keep the B of the batch."""
    return select_rows(rows, rows["mask_B"] > 0)


def select_rows(rows: Rows, selected: np.ndarray | slice) -> Rows:
    """Return the rows at these places: a slice, which copies nothing, or bool (B,)."""
    return {name: value[selected] for name, value in rows.items()}


def add_sums(totals: Totals, sums: Mapping[str, np.ndarray]) -> None:
    """Add the sums over a batch to float64 totals, in place."""
    for name, value in sums.items():
        total = totals.get(name, np.zeros(np.shape(value)))
        totals[name] = total + np.asarray(value, np.float64)


def require_images(num_images: float | np.ndarray, name: str) -> None:
    """Raise TooManyUnreadable, which ends an evaluation, if no image of a split counts."""
    if not num_images:
        raise TooManyUnreadable(
            f"{name}: no image could be read, or none has a label. There is nothing to evaluate."
        )
