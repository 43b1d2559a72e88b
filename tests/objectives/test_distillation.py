"""Losses of a teacher's predictions, held to numpy, and the two heads of a distilled DeiT."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose

from vit_jax.arrays import ModelOutput, Targets
from vit_jax.config import ModelConfig, build_architecture
from vit_jax.models import abstract_model
from vit_jax.objectives.classification import Classification
from vit_jax.objectives.distillation import Distillation

RNG = np.random.default_rng(0)
LOGITS, CLASS_LOGITS, TAUGHT_LOGITS, TEACHER = RNG.normal(size=(4, 3, 5)).astype(np.float32)
LABELS = np.eye(5, dtype=np.float32)[[0, 3, 2]]
MASK = np.array([1, 0, 1], np.float32)


def softmax(x):
    exponentials = np.exp(x)
    return exponentials / exponentials.sum(axis=-1, keepdims=True)


def cross_entropy(target, logits):
    return -(target * np.log(softmax(logits))).sum(axis=-1)


def expect_loss(form, label_logits, taught_logits, weight, temperature):
    """Return the summed loss by the definitions of Hinton et al. and of DeiT."""
    if form == "hard":
        chosen = np.eye(5)[TEACHER.argmax(axis=-1)]
        taught = cross_entropy(chosen, taught_logits)
    else:
        share = softmax(TEACHER / temperature)
        entropy = cross_entropy(share, TEACHER / temperature)
        divergence = cross_entropy(share, taught_logits / temperature) - entropy
        taught = temperature**2 * divergence
    loss = (1 - weight) * cross_entropy(LABELS, label_logits) + weight * taught
    return (loss * MASK).sum(), (taught * MASK).sum()


@pytest.mark.parametrize(("form", "temperature"), [("soft", 1.0), ("soft", 3.0), ("hard", 1.0)])
@pytest.mark.parametrize("has_token", [False, True])
def test_loss_of_labels_and_teacher(form, temperature, has_token):
    objective = Distillation(Classification("softmax"), form, 0.3, temperature)
    output = ModelOutput(logits_BK=LOGITS)
    label_logits = LOGITS
    taught_logits = LOGITS
    if has_token:
        label_logits = CLASS_LOGITS
        taught_logits = TAUGHT_LOGITS
        output = dataclasses.replace(
            output,
            token_logits_TBK=jnp.stack([CLASS_LOGITS, TAUGHT_LOGITS]),
        )
    expected, expected_taught = expect_loss(form, label_logits, taught_logits, 0.3, temperature)

    sums = objective.sums(output, Targets(LABELS, MASK, teacher_BK=TEACHER))
    plain = objective.sums(output, Targets(LABELS, MASK))

    assert_allclose(sums["loss"], expected, rtol=1e-5)
    assert_allclose(sums["distillation_loss"], expected_taught, rtol=1e-5)
    assert sums["weight"] == 2
    # An evaluation has no teacher: it measures the mean of both heads against the labels.
    assert_allclose(plain["loss"], (cross_entropy(LABELS, LOGITS) * MASK).sum(), rtol=1e-5)
    assert "distillation_loss" not in plain


def test_logits_are_the_mean_of_both_heads():
    """The heads of DeiT are the halves of a kernel that maps both tokens to the mean of logits."""
    sizes = {"width": 8, "depth": 1, "mlp_dim": 8, "num_heads": 2}
    config = ModelConfig(name="ViT-mu/2", class_tokens=2, head="linear", **sizes)
    architecture = build_architecture(config, image_size=(4, 4), num_classes=5)
    rng = np.random.default_rng(1)

    def sample(leaf):
        return jnp.asarray(rng.normal(size=leaf.shape), leaf.dtype)

    model = jax.tree.map(sample, abstract_model(architecture))
    images = jnp.asarray(rng.normal(size=(3, 4, 4, 3)), jnp.float32)
    output = jax.jit(lambda images: model(images, intermediates=("token_logits",)))(images)
    kernel = np.asarray(model.head.linear.kernel[...])
    bias = np.asarray(model.head.linear.bias[...])
    pooled = np.asarray(output.pooled_BD)

    first = 2 * pooled[:, :8] @ kernel[:8] + bias
    second = 2 * pooled[:, 8:] @ kernel[8:] + bias

    assert_allclose(output.token_logits_TBK, [first, second], rtol=1e-4, atol=1e-4)
    assert_allclose(output.logits_BK, (first + second) / 2, rtol=1e-4, atol=1e-4)
