"""Runs steps of one network over sources of images, for commands and probes that have no run."""

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import jax
import numpy as np

from vit_jax.arrays import Batch, ModelOutput
from vit_jax.data.placement import open_whole
from vit_jax.data.records import Source
from vit_jax.data.transforms import EvaluationTransform
from vit_jax.data.unreadable import UnreadableLog
from vit_jax.evals.step_results import Results, Rows, iterate_rows
from vit_jax.kernels.devices import trace_for
from vit_jax.sharding import Placement, batch_sharding, build_mesh, replicate
from vit_jax.text.printable import printable

Module = Callable[..., ModelOutput]


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
