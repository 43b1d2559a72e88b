"""Statistics of attention weights: distance and entropy of each head, and rollout to the image's representation.

Arithmetic on the weights that a model returns on request (its intermediate "attention"); nothing is drawn.

Legend: L blocks, B images, T heads, S tokens, Q queries (= S), N patches: the tokens without the
class token, if any.
"""

import dataclasses
import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from vit_jax.api import Model
from vit_jax.arrays import ModelOutput
from vit_jax.tools.figures.view import in_batches

MOST_WEIGHTS = 2**27  # held at once, 0.5 GiB, unless those of one image are more
MOST_IMAGES = 64  # at once
Reduce = Callable[[ModelOutput], dict[str, jax.Array]]


def token_distances(grid: tuple[int, int], patch_size: tuple[int, int]) -> np.ndarray:
    """Return Euclidean distances between patches in pixels, float32 (N, N); arguments as (rows, columns)."""
    rows, columns = np.indices(grid).reshape(2, -1) * np.array(patch_size)[:, None]
    return np.hypot(rows[:, None] - rows, columns[:, None] - columns).astype(np.float32)


def mean_distances(
    attention_LBTQS: jax.Array, grid: tuple[int, int], patch_size: tuple[int, int]
) -> jax.Array:
    """Return mean attention distances in pixels (B, L, T): distances to patches by weight, averaged over queries.

    As the authors of ViT compute it: row and column of the class token are left out, and the
    weights that stay are not brought back to a sum of 1, so what goes to the class token counts as
    a distance of 0.
    """
    distance_NN = jnp.asarray(token_distances(grid, patch_size))
    first = attention_LBTQS.shape[-1] - math.prod(grid)
    weights_LBTNN = attention_LBTQS[..., first:, first:]
    return jnp.einsum("LBTQS,QS->BLT", weights_LBTNN, distance_NN) / math.prod(grid)


def mean_entropies(attention_LBTQS: jax.Array) -> jax.Array:
    """Return mean entropies in nats (B, L, T) over all tokens, averaged over all queries; at most ln S."""
    entropy_LBT = -jax.scipy.special.xlogy(attention_LBTQS, attention_LBTQS).sum(-1).mean(-1)
    return jnp.moveaxis(entropy_LBT, 0, 1)


def rollout(attention_LBTQS: jax.Array) -> jax.Array:
    """Return the attention rollout from output tokens to input tokens (B, Q, S) (Abnar and Zuidema, 2020).

    Of each block the mean over heads and the identity, for the residual branch, are averaged;
    blocks are multiplied.
    """
    mean_LBQS = attention_LBTQS.mean(axis=2)
    mixed_LBQS = (
        mean_LBQS + jnp.eye(mean_LBQS.shape[-1])
    ) / 2  # rows of a softmax sum to 1, and so do these
    return functools.reduce(lambda below, above: above @ below, mixed_LBQS)


def by_image(weights_BQS: jax.Array, num_patches: int) -> jax.Array:
    """Return the weight of each patch in the representation of the image (..., N).

    With a class token its row without its own column, else the mean over queries. Dimensions in
    front stay.
    """
    first = weights_BQS.shape[-1] - num_patches
    return weights_BQS[..., 0, first:] if first else weights_BQS.mean(axis=-2)


def over_images(model: Model, images_NHWC: np.ndarray, reduce: Reduce) -> dict[str, np.ndarray]:
    """Return the results of `reduce` on the model's output with attention weights, joined over images.

    `reduce` maps the `ModelOutput` of some images to arrays whose first dimension is the image.
    Weights are reduced before the next images are run, so memory does not grow with the number of
    images.
    """
    a = model.architecture
    per_image = a.depth * a.num_heads * a.sequence_length**2
    size = max(1, min(MOST_IMAGES, MOST_WEIGHTS // per_image))

    @jax.jit
    def step(module: nnx.Module, images_BHWC: jax.Array) -> dict[str, jax.Array]:
        return reduce(
            dataclasses.replace(model, module=module)(images_BHWC, intermediates=("attention",))
        )

    return in_batches(model, images_NHWC, size, lambda image_BHWC: step(model.module, image_BHWC))
