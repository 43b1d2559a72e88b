"""A loss: focal loss (Lin et al., 2017), with less weight for confident, correct examples.

`objective.loss` takes `(logits_BK, label_BK) -> loss_B`.

Run it:

    vit-jax pretrain --config=digits --workdir=runs/focal \
        --config.objective.loss=docs.examples.loss:focal_loss
"""

import jax
import jax.numpy as jnp

GAMMA = 2.0


def focal_loss(logits_BK: jax.Array, label_BK: jax.Array) -> jax.Array:
    """Return the loss of each example: cross-entropy times (1 - probability of the class)^gamma.

    Arguments and result are float32.
    """
    log_probability_BK = jax.nn.log_softmax(logits_BK)
    weight_BK = (1.0 - jnp.exp(log_probability_BK)) ** GAMMA
    return -(label_BK * weight_BK * log_probability_BK).sum(axis=-1)
