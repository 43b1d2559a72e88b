"""Early stopping: a run whose evaluations do not improve any more ends, and its best checkpoint is its result."""

import math
from collections.abc import Mapping, Sequence

from vit_jax.checkpoint.reader import BEST_STEPS
from vit_jax.config import RunConfig
from vit_jax.config.directions import require_direction
from vit_jax.storage.files import JsonObject

EVALUATIONS = "early_stopping"  # in the metadata of a checkpoint: step and value of each, by the name of the metric


class EarlyStopping:
    """The history of `checkpoint.best_metric`; empty unless `stop_early.patience` is set.

    It decides by these values alone, and checkpoints carry them: a run that was killed decides as one that was not.

    Args:
      config: of the run.
      metadata: of the checkpoint that the run continues.
    """

    def __init__(self, config: RunConfig, metadata: JsonObject):
        self._config = config.stop_early
        self._metric = config.checkpoint.best_metric
        self._sign = (
            1 if self.is_on and require_direction(config, self._metric).mode == "max" else -1
        )
        recorded = metadata.get(EVALUATIONS, {}).get(self._metric, ())
        self._values: dict[int, float] = dict(map(tuple, recorded)) if self.is_on else {}

    @property
    def is_on(self) -> bool:
        return self._config.patience is not None

    def note(self, step: int, results: Mapping[str, float]) -> None:
        """Take the results of an evaluation, which may lack the metric."""
        if self.is_on and self._metric in results:
            self._values[step] = results[self._metric]

    def metadata(self) -> JsonObject:
        """Metadata for a checkpoint; its readers take weights from the first of `best_steps` that is kept."""
        if not self.is_on:
            return {}
        return {
            EVALUATIONS: {self._metric: sorted(self._values.items())},
            BEST_STEPS: self._best_steps(),
        }

    def best_of(self, steps: Sequence[int]) -> int | None:
        """The best of these steps; None if it is off, or none of them was evaluated."""
        return next((step for step in self._best_steps() if step in steps), None)

    def reason_to_stop(self) -> str:
        """A sentence; empty as long as the run goes on. Asked before every step."""
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
            else:  # so is what is not a number
                num_without += 1
        if num_without < self._config.patience:
            return ""
        return f"stopped early: {self._metric} has not improved for {num_without} evaluations, since step {since}"

    def _best_steps(self) -> list[int]:
        """The best first, of equal ones the later, which the store keeps; without those that are not numbers."""
        good = {
            step: self._sign * value for step, value in self._values.items() if math.isfinite(value)
        }
        return sorted(good, key=lambda step: (good[step], step), reverse=True)
