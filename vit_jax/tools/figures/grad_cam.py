"""Grad-CAM (Selvaraju et al., 2017): which places of a ResNet's last map speak for a class.

Legend: B images, H W height and width of the map, C its channels, K classes.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.api import Model
from vit_jax.arrays import normalise
from vit_jax.tools.figures.view import in_batches

MOST_IMAGES = 16  # at once


def class_activation(map_BHWC: jax.Array, gradient_BHWC: jax.Array) -> jax.Array:
    """Return the sum of the channels, each weighted by the mean of its gradient, where it is positive, (B, H, W)."""
    weight_B11C = gradient_BHWC.mean(axis=(1, 2), keepdims=True)
    return jax.nn.relu((map_BHWC * weight_B11C).sum(axis=-1))


def class_activations(model: Model, images_NHWC: np.ndarray) -> dict[str, np.ndarray]:
    """Return Grad-CAM of the most probable class of each image, at the map that the ResNet of the network ends in.

    Returns:
      "activation" (N, H, W), "label" (N,), "probability" (N,).
    """
    a = model.architecture
    place = "stem" if a.has_transformer else "body"  # where the network keeps its ResNet

    @jax.jit
    def step(module: Any, image_BHWC: jax.Array) -> dict[str, jax.Array]:
        images = normalise(image_BHWC, a.compute_dtype)
        map_BHWC, _ = getattr(module, place)(images)

        def score(map_BHWC: jax.Array) -> tuple[jax.Array, jax.Array]:
            rest = jax.tree.map(
                lambda leaf: leaf, module
            )  # a copy, whose ResNet gives the map that is asked about
            setattr(rest, place, lambda images, intermediates: (map_BHWC, None))
            logits_BK = rest(images).logits_BK
            return logits_BK.max(axis=-1).sum(), logits_BK

        gradient_BHWC, logits_BK = jax.grad(score, has_aux=True)(map_BHWC)
        probability_BK = jax.nn.softmax(logits_BK)
        activation = class_activation(
            map_BHWC.astype(jnp.float32), gradient_BHWC.astype(jnp.float32)
        )
        return {
            "activation": activation,
            "label": logits_BK.argmax(-1),
            "probability": probability_BK.max(-1),
        }

    return in_batches(
        model, images_NHWC, MOST_IMAGES, lambda image_BHWC: step(model.module, image_BHWC)
    )
