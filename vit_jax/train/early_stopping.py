"""Early stopping: end a run whose evaluations do not improve; its best checkpoint is its result."""

import math
from collections.abc import Mapping, Sequence

from vit_jax.checkpoint.reader import BEST_STEPS
from vit_jax.config import RunConfig
from vit_jax.config.directions import require_direction
from vit_jax.storage.files import JsonObject

EVALUATIONS = "early_stopping"
"""Name in the metadata of a checkpoint: step and value of each evaluation, by metric."""


class EarlyStopping:
    """The history of `checkpoint.best_metric`; empty unless `stop_early.patience` is set.

    It decides by these values alone, and checkpoints carry them: a resumed run decides as one
    without interruption.

    Args:
      config: config of the run.
      metadata: metadata of the checkpoint that the run continues.
    """

    def __init__(self, config: RunConfig, metadata: JsonObject):
        self._config = config.stop_early
        self._metric = config.checkpoint.best_metric
        self._sign = -1
        self._values: dict[int, float] = {}
        if not self.is_on:
            return
        if require_direction(config, self._metric).mode == "max":
            self._sign = 1
        for step, value in metadata.get(EVALUATIONS, {}).get(self._metric, ()):
            self._values[step] = value

    @property
    def is_on(self) -> bool:
        """Return whether the run may stop early."""
        return self._config.patience is not None

    def note(self, step: int, results: Mapping[str, float]) -> None:
        """Record the results of an evaluation, which may lack the metric."""
        if self.is_on and self._metric in results:
            self._values[step] = results[self._metric]

    def metadata(self) -> JsonObject:
        """Return metadata for a checkpoint.

        Readers of the workdir take weights from the first of `best_steps` that is kept.
        """
        if not self.is_on:
            return {}
        return {
            EVALUATIONS: {self._metric: sorted(self._values.items())},
            BEST_STEPS: self._best_steps(),
        }

    def best_of(self, steps: Sequence[int]) -> int | None:
        """Return the best of these steps; None if it is off, or none of them was evaluated."""
        for step in self._best_steps():
            if step in steps:
                return step
        return None

    def reason_to_stop(self) -> str:
        """Return a sentence; empty as long as the run goes on."""
        if self._config.patience is None:
            return ""
        best = -math.inf
        since = 0
        num_without = 0
        for step, value in sorted(self._values.items()):
            if self._sign * value > best + self._config.min_delta:
                best = self._sign * value
                since = step
                num_without = 0
            else:  # NaN is no improvement
                num_without += 1
        if num_without < self._config.patience:
            return ""
        return (
            f"stopped early: {self._metric} has not improved for {num_without} evaluations, "
            f"since step {since}"
        )

    def _best_steps(self) -> list[int]:
        """Return the steps with finite values, the best first.

        Of steps with equal values the later one is first, as in the store.
        """
        ranked = []
        for step, value in self._values.items():
            if math.isfinite(value):
                ranked.append((self._sign * value, step))
        ranked.sort(reverse=True)
        return [step for _, step in ranked]
