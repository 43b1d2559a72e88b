"""Distillation: a classifier that also learns the predictions of a teacher.

Legend: B batch, K classes.
"""

import dataclasses

import jax
import jax.numpy as jnp
import optax

from vit_jax.arrays import Batch, ModelOutput, Targets
from vit_jax.config import ObjectiveConfig
from vit_jax.objectives.classification import Classification
from vit_jax.objectives.sums import Sums


@dataclasses.dataclass(frozen=True)
class Distillation:
    """The loss of labels and the loss of a teacher's predictions, in a weighted sum.

    A network with a distillation token (DeiT) learns labels with its class token and predictions
    with the other one; its logits are their mean.

    Attributes:
      classification: loss of labels, and of evaluations.
      form: "soft": the teacher's probabilities (Hinton et al., 2015); "hard": its class (DeiT).
      weight: share of the teacher in the loss.
      temperature: divides both logits of "soft".
    """

    classification: Classification
    form: str
    weight: float
    temperature: float

    def prepare(
        self,
        batch: Batch,
        label_BK: jax.Array,
        mask_B: jax.Array,
        key: jax.Array,
    ) -> Targets:
        """Smooth the labels; the step adds the predictions of the teacher."""
        return self.classification.prepare(batch, label_BK, mask_B, key)

    def sums(self, output: ModelOutput, targets: Targets) -> Sums:
        """Return float32 totals; "distillation_loss" is the part of the teacher, not weighted.

        Without predictions of a teacher, in evaluations, they are those of the labels.
        """
        sums = self.classification.sums(output, targets)
        if targets.teacher_BK is None:
            return sums

        taught_BK = output.logits_BK
        if output.token_logits_TBK is not None:
            label_logits_BK, taught_BK = output.token_logits_TBK
            label_output = dataclasses.replace(output, logits_BK=label_logits_BK)
            sums["loss"] = self.classification.sums(label_output, targets)["loss"]

        taught_loss_B = self.compute_loss(taught_BK.astype(jnp.float32), targets.teacher_BK)
        taught_loss = (taught_loss_B * targets.mask_B).sum()
        sums["loss"] = (1 - self.weight) * sums["loss"] + self.weight * taught_loss
        sums["distillation_loss"] = taught_loss
        return sums

    def compute_loss(self, logits_BK: jax.Array, teacher_BK: jax.Array) -> jax.Array:
        """Return the loss of each example against the logits of the teacher, (B,).

        It is the cross-entropy of the teacher's class, or the divergence of the student's
        probabilities from the teacher's, times the squared temperature.
        """
        if self.form == "hard":
            teacher_B = teacher_BK.argmax(axis=-1)
            return optax.softmax_cross_entropy_with_integer_labels(logits_BK, teacher_B)
        log_student_BK = jax.nn.log_softmax(logits_BK / self.temperature)
        log_teacher_BK = jax.nn.log_softmax(teacher_BK / self.temperature)
        share_BK = jnp.exp(log_teacher_BK)
        divergence_B = (share_BK * (log_teacher_BK - log_student_BK)).sum(axis=-1)
        return self.temperature**2 * divergence_B


def build_distillation(config: ObjectiveConfig, classification: Classification) -> Distillation:
    """Build the objective that adds a teacher to a loss of labels."""
    return Distillation(
        classification,
        form=config.distillation,
        weight=config.distillation_weight,
        temperature=config.distillation_temperature,
    )
