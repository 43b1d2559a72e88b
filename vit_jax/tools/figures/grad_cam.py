"""Grad-CAM (Selvaraju et al., 2017): the cells of a ResNet's last map that raise the score of a class.

Legend: B images, H W height and width of the map, C its channels, K classes.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.api import Model
from vit_jax.arrays import normalise
from vit_jax.tools.figures.view import run_in_batches

MOST_IMAGES = 16  # in a batch


def class_activation(map_BHWC: jax.Array, gradient_BHWC: jax.Array) -> jax.Array:
    """Return the positive part of the weighted sum of the channels, (B, H, W).

    The weight of a channel is the mean of its gradient.
    """
    weight_B11C = gradient_BHWC.mean(axis=(1, 2), keepdims=True)
    weighted_BHWC = map_BHWC * weight_B11C
    return jax.nn.relu(weighted_BHWC.sum(axis=-1))


def class_activations(model: Model, images_NHWC: np.ndarray) -> dict[str, np.ndarray]:
    """Return Grad-CAM of the most probable class of each image, at the last map of the ResNet.

    Returns:
      "activation" (N, H, W), "label" (N,), "probability" (N,).
    """
    architecture = model.architecture
    resnet = "stem" if architecture.has_transformer else "body"  # its name in the network

    @jax.jit
    def step(module: Any, image_BHWC: jax.Array) -> dict[str, jax.Array]:
        images = normalise(image_BHWC, architecture.compute_dtype)
        map_BHWC, _ = getattr(module, resnet)(images)

        def score(map_BHWC: jax.Array) -> tuple[jax.Array, jax.Array]:
            # A copy of the network, whose ResNet returns this map for every input.
            rest = jax.tree.map(lambda leaf: leaf, module)
            setattr(rest, resnet, lambda images, intermediates: (map_BHWC, None))
            logits_BK = rest(images).logits_BK
            best_B = logits_BK.max(axis=-1)
            return best_B.sum(), logits_BK

        gradient_BHWC, logits_BK = jax.grad(score, has_aux=True)(map_BHWC)
        activation_BHW = class_activation(
            map_BHWC.astype(jnp.float32),
            gradient_BHWC.astype(jnp.float32),
        )
        probability_BK = jax.nn.softmax(logits_BK)
        return {
            "activation": activation_BHW,
            "label": logits_BK.argmax(-1),
            "probability": probability_BK.max(-1),
        }

    def run(image_BHWC: np.ndarray) -> dict[str, jax.Array]:
        return step(model.module, image_BHWC)

    return run_in_batches(model, images_NHWC, MOST_IMAGES, run)
