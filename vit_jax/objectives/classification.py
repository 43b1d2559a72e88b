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
      loss: "softmax"; "sigmoid": independent classes, summed over, as in big_vision and BiT; "bce":
        the same, averaged, of labels that are 1 wherever they are above 0 (DeiT III); or a function
        (logits_BK, label_BK) -> loss_B, all float32.
      label_smoothing_fraction: share of the label spread evenly over all classes.
    """

    loss: str | Callable[[jax.Array, jax.Array], jax.Array]
    label_smoothing_fraction: float = 0.0

    def prepare(
        self,
        batch: Batch,
        label_BK: jax.Array,
        mask_B: jax.Array,
        key: jax.Array,
    ) -> Targets:
        """Smooth the labels."""
        del key
        label_BK = optax.smooth_labels(label_BK, self.label_smoothing_fraction)
        return Targets(label_BK, mask_B, is_multilabel=batch.is_multilabel)

    def sums(self, output: ModelOutput, targets: Targets) -> Sums:
        """Return float32 totals; an example whose mask is 0 adds nothing to any of them."""
        logits_BK = output.logits_BK.astype(jnp.float32)
        label_BK = targets.label_BK
        mask_B = targets.mask_B
        loss_B = self._compute_loss(logits_BK, label_BK)
        if loss_B.shape != mask_B.shape:
            raise ValueError(
                f"config.objective.loss returns shape {loss_B.shape}: must be {mask_B.shape}."
            )

        sums = {"loss": (loss_B * mask_B).sum(), "weight": mask_B.sum()}
        if not targets.is_multilabel:
            is_correct_B = logits_BK.argmax(axis=-1) == label_BK.argmax(axis=-1)
            sums["correct"] = (is_correct_B.astype(jnp.float32) * mask_B).sum()
        return sums

    def _compute_loss(self, logits_BK: jax.Array, label_BK: jax.Array) -> jax.Array:
        """Return the loss of each example, (B,)."""
        if callable(self.loss):
            return self.loss(logits_BK, label_BK)
        if self.loss == "softmax":
            return optax.softmax_cross_entropy(logits_BK, label_BK)
        if self.loss == "bce":
            is_present_BK = label_BK > 0
            return optax.sigmoid_binary_cross_entropy(logits_BK, is_present_BK).mean(axis=-1)
        return optax.sigmoid_binary_cross_entropy(logits_BK, label_BK).sum(axis=-1)


def build_classification(config: ObjectiveConfig) -> Classification:
    """Build classification with the loss that the config names.

    Raises:
      ValueError: a reference to something that cannot be called.
    """
    if not is_reference(config.loss):
        return Classification(config.loss, config.label_smoothing_fraction)
    loss = resolve(config.loss, "config.objective.loss")
    if not callable(loss):
        raise ValueError(
            f"config.objective.loss={config.loss!r} is {type(loss).__name__}, not a function."
        )
    return Classification(loss, config.label_smoothing_fraction)
