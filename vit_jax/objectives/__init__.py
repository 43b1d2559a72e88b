"""Losses, and the preparation of batches for them.

An objective knows neither its model nor its loop.
"""

from typing import Protocol

import jax

from vit_jax.arrays import Batch, ModelOutput, Targets
from vit_jax.config import Architecture, ObjectiveConfig
from vit_jax.objectives.classification import Classification, build_classification
from vit_jax.objectives.sums import Sums

__all__ = ["Classification", "Objective", "build_objective"]


class Objective(Protocol):
    """The loss of a step: the sum "loss" divided by the sum "weight"."""

    def prepare(
        self,
        batch: Batch,
        label_BK: jax.Array,
        mask_B: jax.Array,
        key: jax.Array,
    ) -> Targets:
        """Return the targets of a batch.

        Labels and mask are the batch's, mixed if the run mixes images.
        """

    def sums(self, output: ModelOutput, targets: Targets) -> Sums:
        """Return float32 totals over the examples that count.

        Each but "images" is divided by the one named "weight", and reported.
        """


def build_objective(config: ObjectiveConfig, architecture: Architecture) -> Objective:
    """Return the objective that the config names.

    Raises:
      ValueError: a loss that cannot be called, or patches that cannot be predicted.
    """
    if config.kind == "masked_patch":
        from vit_jax.objectives.masked_patch import build_masked_patch

        return build_masked_patch(config, architecture)
    classification = build_classification(config)
    if config.teacher is None:
        return classification

    from vit_jax.objectives.distillation import build_distillation

    return build_distillation(config, classification)
