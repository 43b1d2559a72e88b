"""A metric: the Brier score, the squared error of the probabilities.

`evaluation.metrics` takes a function `(logits_BK, label_BK) -> value_B`, or an object with this
method `measure`.

`vit-jax evaluate` has the option `--metrics` for it. The result is the mean over the images,
"test_brier". `direction` states whether higher ("max") or lower ("min") values are better, so that
it may be `best_metric`. `summarise` is only needed if the metric is not the mean itself.

Run it:

    vit-jax pretrain --config=digits --workdir=runs/brier \
        --config.evaluation.metrics=top5_accuracy,docs.examples.metric:brier
    vit-jax evaluate runs/brier --data=digits --metrics=docs.examples.metric:brier
"""

import jax
import jax.numpy as jnp


class BrierScore:
    """Distance between probabilities and labels; runs on the devices, inside `jax.jit`."""

    direction = "min"

    def measure(self, logits_BK: jax.Array, label_BK: jax.Array) -> jax.Array:
        """Return the squared error of each image, (B,)."""
        probability_BK = jax.nn.softmax(logits_BK)
        return jnp.square(probability_BK - label_BK).sum(axis=-1)

    def summarise(self, mean: float) -> float:
        """Return the metric from the mean of all images."""
        return float(mean)


brier = BrierScore()
