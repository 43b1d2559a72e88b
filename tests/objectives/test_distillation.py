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
    log_share = np.log(softmax(logits))
    return -(target * log_share).sum(axis=-1)


def expect_loss(form, label_logits, taught_logits, weight, temperature):
    """Return the summed loss by the definitions of Hinton et al. and of DeiT."""
    if form == "hard":
        chosen = np.eye(5)[TEACHER.argmax(axis=-1)]
        taught = cross_entropy(chosen, taught_logits)
    else:
        teacher_logits = TEACHER / temperature
        share = softmax(teacher_logits)
        entropy = cross_entropy(share, teacher_logits)
        divergence = cross_entropy(share, taught_logits / temperature) - entropy
        taught = temperature**2 * divergence

    of_labels = cross_entropy(LABELS, label_logits)
    loss = (1 - weight) * of_labels + weight * taught
    summed_loss = (loss * MASK).sum()
    summed_taught = (taught * MASK).sum()
    return summed_loss, summed_taught


@pytest.mark.parametrize(
    ("form", "temperature"),
    [
        ("soft", 1.0),
        ("soft", 3.0),
        ("hard", 1.0),
    ],
)
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
    expected, expected_taught = expect_loss(
        form,
        label_logits,
        taught_logits,
        0.3,
        temperature,
    )

    targets = Targets(LABELS, MASK)
    taught_targets = dataclasses.replace(targets, teacher_BK=TEACHER)

    sums = objective.sums(output, taught_targets)
    plain = objective.sums(output, targets)

    assert_allclose(sums["loss"], expected, rtol=1e-5)
    assert_allclose(sums["distillation_loss"], expected_taught, rtol=1e-5)
    assert sums["weight"] == 2
    # An evaluation has no teacher: it measures the mean of both heads against the labels.
    expected_plain = cross_entropy(LABELS, LOGITS) * MASK
    assert_allclose(plain["loss"], expected_plain.sum(), rtol=1e-5)
    assert "distillation_loss" not in plain


def test_logits_are_the_mean_of_both_heads():
    """The heads of DeiT are the halves of a kernel that maps both tokens to the mean of logits."""
    config = ModelConfig(
        name="ViT-mu/2",
        class_tokens=2,
        head="linear",
        width=8,
        depth=1,
        mlp_dim=8,
        num_heads=2,
    )
    architecture = build_architecture(config, image_size=(4, 4), num_classes=5)
    rng = np.random.default_rng(1)

    def sample(leaf):
        return jnp.asarray(rng.normal(size=leaf.shape), leaf.dtype)

    model = jax.tree.map(sample, abstract_model(architecture))

    @jax.jit
    def run(images):
        return model(images, intermediates=("token_logits",))

    images = jnp.asarray(rng.normal(size=(3, 4, 4, 3)), jnp.float32)
    output = run(images)
    kernel = np.asarray(model.head.linear.kernel[...])
    bias = np.asarray(model.head.linear.bias[...])
    pooled = np.asarray(output.pooled_BD)

    class_token, distillation_token = np.split(pooled, 2, axis=1)
    class_kernel, distillation_kernel = np.split(kernel, 2)
    first = 2 * class_token @ class_kernel + bias
    second = 2 * distillation_token @ distillation_kernel + bias
    mean = (first + second) / 2

    assert_allclose(
        output.token_logits_TBK,
        [first, second],
        rtol=1e-4,
        atol=1e-4,
    )
    assert_allclose(output.logits_BK, mean, rtol=1e-4, atol=1e-4)
