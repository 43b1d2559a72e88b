"""Softmax, sigmoid and binary cross-entropy over class probabilities.

Legend: B batch, K classes.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from vit_jax.arrays import Batch, ModelOutput, Targets
from vit_jax.config import ObjectiveConfig
from vit_jax.imports.references import is_reference, resolve
from vit_jax.objectives.sums import Sums


@dataclasses.dataclass(frozen=True)
class Classification:
    """Image classification.

    Attributes:
      loss: "softmax"; "sigmoid": independent classes, summed over, as in big_vision and BiT; "bce": the same, averaged,
        of labels that are 1 wherever they are above 0 (DeiT III); or a function (logits_BK, label_BK) -> loss_B, all
        float32.
      label_smoothing_fraction: share of the label spread evenly over all classes.
    """

    loss: str | Callable[[jax.Array, jax.Array], jax.Array]
    label_smoothing_fraction: float = 0.0

    def prepare(
        self, batch: Batch, label_BK: jax.Array, mask_B: jax.Array, key: jax.Array
    ) -> Targets:
        """Smooth the labels."""
        del key
        label_BK = optax.smooth_labels(label_BK, self.label_smoothing_fraction)
        return Targets(label_BK, mask_B, is_multilabel=batch.is_multilabel)

    def sums(self, output: ModelOutput, targets: Targets) -> Sums:
        """Float32 totals; an example whose mask is 0 adds nothing to any of them."""
        logits_BK = output.logits_BK.astype(jnp.float32)
        label_BK = targets.label_BK
        if self.loss == "softmax":
            loss_B = optax.softmax_cross_entropy(logits_BK, label_BK)
        elif self.loss == "bce":
            loss_B = optax.sigmoid_binary_cross_entropy(logits_BK, label_BK > 0).mean(axis=-1)
        elif callable(self.loss):
            loss_B = self.loss(logits_BK, label_BK)
            if loss_B.shape != targets.mask_B.shape:
                raise ValueError(
                    f"config.objective.loss returns shape {loss_B.shape}: must be {targets.mask_B.shape}."
                )
        else:
            loss_B = optax.sigmoid_binary_cross_entropy(logits_BK, label_BK).sum(axis=-1)
        mask_B = targets.mask_B
        sums = {"loss": (loss_B * mask_B).sum(), "weight": mask_B.sum()}
        if targets.is_multilabel:
            return sums
        correct_B = (logits_BK.argmax(axis=-1) == label_BK.argmax(axis=-1)).astype(jnp.float32)
        return sums | {"correct": (correct_B * mask_B).sum()}


def build_classification(config: ObjectiveConfig) -> Classification:
    """Classification with the loss that the config names.

    Raises:
      ValueError: a reference to something that cannot be called.
    """
    loss = (
        resolve(config.loss, "config.objective.loss") if is_reference(config.loss) else config.loss
    )
    if is_reference(config.loss) and not callable(loss):
        raise ValueError(
            f"config.objective.loss={config.loss!r} is {type(loss).__name__}, not a function."
        )
    return Classification(loss, config.label_smoothing_fraction)
