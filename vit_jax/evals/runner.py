"""Run a jitted step over a split: every example once, on any number of devices and processes.

A step of an evaluator returns `StepResults`: sums over a batch, and rows, which have a value for
each of its images. Other steps return only sums, or only rows. The mask is 0 for padding, which
completes the last batch, and for unreadable images.

* `iterate_step_results` yields sums and rows, without padding and unreadable images;
* `iterate_rows` yields rows, without padding;
* `sum_over` adds sums up.

The caller decides when an evaluator runs and which prefix its results get.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

import jax
import numpy as np

from vit_jax.arrays import Batch, ModelOutput, StepResults
from vit_jax.data.placement import find_local_rows, open_placed
from vit_jax.data.records import Source
from vit_jax.data.stream import EvaluationStream
from vit_jax.data.transforms import EvaluationTransform
from vit_jax.data.unreadable import TooManyUnreadable, UnreadableLog
from vit_jax.kernels.devices import trace_for
from vit_jax.sharding import Placement, batch_sharding, build_mesh, replicate
from vit_jax.text.printable import printable

Module = Callable[..., ModelOutput]
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


def open_whole(
    source: Source,
    transform: EvaluationTransform,
    sharding: jax.sharding.Sharding,
    global_batch: int,
    log: UnreadableLog,
    num_workers: int | None = None,
    num_threads: int | None = None,
) -> AbstractContextManager[Iterator[Batch]]:
    """Return a context of placed batches that hold every record of a source once.

    Arguments are as for `open_placed`.
    """
    stream = EvaluationStream(
        source,
        transform,
        global_batch,
        find_local_rows(sharding, global_batch),
    )
    return open_placed(stream, sharding, log, num_workers, num_threads)


class Runner:
    """Runs steps of one network over sources, on all devices of all processes.

    Attributes:
      module: the network; its parameters lie complete on every device.
      transform: prepares the images.
      mesh: all devices.
      global_batch: examples of one step, rounded up to a multiple of the devices.
      max_unreadable: largest number of unreadable images of a source; None: the number that
        `unreadable.count_allowed` returns.
    """

    def __init__(
        self,
        module: Module,
        transform: EvaluationTransform,
        *,
        global_batch: int,
        max_unreadable: int | None,
    ):
        self.module = module
        self.transform = transform
        self.max_unreadable = max_unreadable
        self.mesh = build_mesh(jax.devices())
        self.global_batch = self._round_up(global_batch)

    def jit(self, step: Callable[..., Results]) -> jax.stages.Wrapped:
        """Return the jitted step (module, batch, ...) -> results, which are replicated."""
        return jax.jit(trace_for(Placement(self.mesh))(step), out_shardings=replicate(self.mesh))

    def place(self, array: np.ndarray) -> jax.Array:
        """Return an array, the same in all processes, complete on every device."""
        return jax.make_array_from_callback(
            array.shape, replicate(self.mesh), lambda index: array[index]
        )

    def compute_rows(
        self,
        source: Source,
        step: Callable[[Module, Batch], Results],
        *,
        shortens_batch: bool = False,
    ) -> Iterator[Rows]:
        """Yield the results of `iterate_rows` for a source and a jitted or compiled step.

        With `shortens_batch` a small source has a smaller batch.

        Raises:
          ValueError: after the last batch, if more images than `max_unreadable` are unreadable.
        """
        size = self.global_batch
        if shortens_batch:
            size = self._round_up(min(self.global_batch, len(source)))
        log = UnreadableLog(
            source,
            self.max_unreadable,
            self.transform.max_image_megapixels,
            self.transform.value_range,
            option="--max_unreadable",
            bands=self.transform.bands,
        )
        # A process that stopped alone would leave the others waiting in a step. Its log, which knows
        # only images of this process, therefore raises nothing. The rows are of all images, so that
        # all processes have the same count after the last batch.
        log.defer_errors()

        def open_batches() -> AbstractContextManager[Iterator[Batch]]:
            return open_whole(source, self.transform, batch_sharding(self.mesh), size, log)

        unreadable = 0
        for rows in iterate_rows(open_batches, step, self.module, len(source)):
            unreadable += int((rows["mask_B"] == 0).sum())
            yield rows
        log.require_few(unreadable)

    def _round_up(self, batch: int) -> int:
        """Return the next multiple of the number of devices."""
        return math.ceil(batch / self.mesh.size) * self.mesh.size


def iterate_results(
    open_batches: OpenBatches,
    step: Callable[[E, Batch], object],
    evaluated: E,
) -> Iterator[Any]:
    """Yield the results of a step (evaluated, batch) for every batch, as NumPy arrays on the host.

    They are one batch late, so that the devices do not wait for the host.
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


def iterate_rows(
    open_batches: OpenBatches,
    step: Callable[[E, Batch], Results],
    evaluated: E,
    num_examples: int,
) -> Iterator[Rows]:
    """Yield the rows of every batch, and "record_B", indices in the split.

    Padding is cut off at the end of the last batch; unreadable images remain, with mask 0.
    Arguments are as for `iterate_results`, of a step that returns rows.

    Raises:
      RuntimeError: the batches hold fewer examples than the split.
    """
    start = 0
    for results in iterate_results(open_batches, step, evaluated):
        end = min(start + len(results["mask_B"]), num_examples)
        rows = {name: value[: end - start] for name, value in results.items()}
        yield {**rows, "record_B": np.arange(start, end)}
        start = end
    if start < num_examples:
        raise RuntimeError(f"The batches of a split held {start:,} of its {num_examples:,} images.")


def iterate_step_results(
    open_batches: OpenBatches,
    step: Callable[[E, Batch], StepResults],
    evaluated: E,
) -> Iterator[StepResults]:
    """Yield the sums and rows of every batch; arguments as for `iterate_results`.

    There are no rows of padding and unreadable images. "record_B" has the indices in the split.
    """
    start = 0
    for sums, rows in iterate_results(open_batches, step, evaluated):
        if rows:
            end = start + len(rows["mask_B"])
            rows = keep_counted({**rows, "record_B": np.arange(start, end)})
            start = end
        yield StepResults(sums, rows)


def keep_counted(rows: Rows) -> Rows:
    """Return the N rows of images that count; their names keep the B of the batch."""
    counts_B = rows["mask_B"] > 0
    return {name: value[counts_B] for name, value in rows.items()}


def require_finite(output_B: np.ndarray, origin: str, name_of: Callable[[int], str]) -> np.ndarray:
    """Return outputs of a network, one row for each image.

    Raises:
      ValueError: a row is not finite. The message names its image by `name_of`, and `origin`.
    """
    is_finite_B = np.isfinite(output_B).reshape(len(output_B), -1).all(axis=1)
    if not is_finite_B.all():
        name = printable(name_of(int(is_finite_B.argmin())))
        raise ValueError(
            f"{origin}: the outputs for {name} are not finite. The parameters are damaged, or "
            "too large for the dtype. Use --weights.compute_dtype=float32, or other weights."
        )
    return output_B


def require_images(num_readable: float | np.ndarray, name: str) -> None:
    """Raise TooManyUnreadable if no image of a split could be read."""
    if not num_readable:
        raise TooManyUnreadable(f"{name}: no image could be read. There is nothing to evaluate.")


def add_sums(totals: Totals, sums: Mapping[str, np.ndarray]) -> None:
    """Add the sums over a batch to float64 totals, in place."""
    for name, value in sums.items():
        total = totals.get(name, np.zeros(np.shape(value)))
        totals[name] = total + np.asarray(value, np.float64)


def sum_over(
    open_batches: OpenBatches,
    step: Callable[[E, Batch], Results],
    evaluated: E,
) -> Totals:
    """Return float64 totals over a split by name, of a step that returns sums; {} without batches.

    Arguments are as for `iterate_results`.
    """
    totals: Totals = {}
    for sums in iterate_results(open_batches, step, evaluated):
        add_sums(totals, sums)
    return totals
