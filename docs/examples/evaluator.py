"""An evaluator: fraction and accuracy of confident predictions.

`evaluation.evaluators.NAME.kind` takes `(split, run, **arguments)` with a method `run(state)`.

An evaluator has its cadence and its split. Its results start with its name ("trust_sure_accuracy")
and may be `best_metric`: `directions` states for each whether higher ("max") or lower ("min")
values are better.

Run it:

    vit-jax pretrain --config=digits --workdir=runs/trust \
        --config.evaluation.evaluators.trust.kind=docs.examples.evaluator:Confidence \
        --config.evaluation.evaluators.trust.every="10 epochs" \
        --config.evaluation.evaluators.trust.arguments.threshold=0.9
"""

from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from vit_jax.arrays import Batch, normalise
from vit_jax.evals import Split, sum_over
from vit_jax.train.assemble import Assembly


class Confidence:
    """Fraction and accuracy of predictions with at least this probability.

    It is built once with its split; `run` is called at every evaluation.
    """

    directions: Mapping[str, str] = {"sure_fraction": "max", "sure_accuracy": "max"}

    def __init__(self, split: Split, run: Assembly, *, threshold: float = 0.9):
        def sums(state: Any, batch: Batch) -> dict[str, jax.Array]:
            images = normalise(batch.image_BHWC, run.architecture.compute_dtype)
            output = state.evaluated_model()(images)
            probability_BK = jax.nn.softmax(output.logits_BK)
            is_sure_B = probability_BK.max(axis=-1) >= threshold
            is_correct_B = probability_BK.argmax(axis=-1) == batch.label_B
            sure_B = jnp.where(is_sure_B, batch.mask_B, 0.0)
            correct_B = jnp.where(is_correct_B, sure_B, 0.0)
            return {"sure": sure_B.sum(), "correct": correct_B.sum(), "images": batch.mask_B.sum()}

        self._split = split
        self._sums = jax.jit(sums)

    def run(self, state: Any) -> Iterator[tuple[str, float]]:
        """Yield names and values; every image counts once, with any number of devices."""
        totals = sum_over(self._split.open_batches, self._sums, state)
        yield "sure_fraction", float(totals["sure"] / totals["images"])
        yield "sure_accuracy", float(totals["correct"] / max(totals["sure"], 1))
