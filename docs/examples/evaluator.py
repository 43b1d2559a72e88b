"""An evaluator: fraction and accuracy of confident predictions.

`evaluation.evaluators.NAME.kind` takes `(split, run, **arguments)` with a method `run(state)`.

It has its cadence and split. Its results start with its name ("trust_sure_accuracy") and may be `best_metric`:
`directions` states for each whether higher ("max") or lower ("min") values are better.

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
    """Built once with its split; `run` is called as often as it is due."""

    directions: Mapping[str, str] = {"sure_fraction": "max", "sure_accuracy": "max"}

    def __init__(self, split: Split, run: Assembly, *, threshold: float = 0.9):
        def sums(state: Any, batch: Batch) -> dict[str, jax.Array]:
            output = state.evaluated_model()(
                normalise(batch.image_BHWC, run.architecture.compute_dtype)
            )
            probability_BK = jax.nn.softmax(output.logits_BK)
            sure_B = jnp.where(probability_BK.max(axis=-1) >= threshold, batch.mask_B, 0.0)
            right_B = jnp.where(probability_BK.argmax(axis=-1) == batch.label_B, sure_B, 0.0)
            return {"sure": sure_B.sum(), "right": right_B.sum(), "images": batch.mask_B.sum()}

        self._split = split
        self._sums = jax.jit(sums)

    def run(self, state: Any) -> Iterator[tuple[str, float]]:
        """Yields names and values; every image counts once, on any number of devices and processes."""
        totals = sum_over(self._split.open_batches, self._sums, state)
        yield "sure_fraction", float(totals["sure"] / totals["images"])
        yield "sure_accuracy", float(totals["right"] / max(totals["sure"], 1))
