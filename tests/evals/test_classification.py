"""Evaluation by hand: sums over batches, padding left out, and a split of which nothing can be read."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vit_jax.arrays import Batch
from vit_jax.evals import ClassificationEvaluator, Split


def batch(losses, correct, mask):
    """The fields stand for what the step below would compute from real ones."""
    return Batch(image_BHWC=jnp.asarray(losses), label_B=jnp.asarray(correct), mask_B=jnp.asarray(mask, jnp.float32))


@jax.jit
def step(scale, batch):
    weight = batch.mask_B
    sums = {"loss": jnp.sum(batch.image_BHWC * weight * scale), "correct": jnp.sum(batch.label_B * weight)}
    return {**sums, "weight": jnp.sum(weight)}


def evaluate(batches):
    split = Split("test", (), 3, lambda: contextlib.nullcontext(iter(batches)))
    return dict(ClassificationEvaluator(split, step).run(jnp.float32(2)))


def test_by_hand():
    """Three examples count: losses 2 x (1 + 2 + 6) over 3, two of them right; the padding's 100 is not seen."""
    batches = [
        batch(np.float32([1, 2]), np.float32([1, 0]), [1, 1]),
        batch(np.float32([6, 100]), np.float32([1, 1]), [1, 0]),
    ]
    assert evaluate(batches) == {"loss": pytest.approx(6.0), "accuracy": pytest.approx(2 / 3), "images": 3}


@pytest.mark.parametrize("batches", [[], [batch(np.float32([1]), np.float32([1]), [0])]], ids=["none", "all_masked"])
def test_nothing_readable(batches):
    with pytest.raises(ValueError, match="No image of the test split could be read"):
        evaluate(batches)
