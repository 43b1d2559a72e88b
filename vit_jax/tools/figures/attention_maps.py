"""Statistics of attention weights: distance and entropy of heads, rollout to the representation.

Arithmetic on the weights that a model returns on request (`intermediates=("attention",)`). Other modules
draw the figures.

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
from vit_jax.tools.figures.view import run_in_batches

MOST_WEIGHTS = 2**27  # in memory, 0.5 GiB; one image may have more
MOST_IMAGES = 64  # in a batch
Reduce = Callable[[ModelOutput], dict[str, jax.Array]]


def token_distances(grid: tuple[int, int], patch_size: tuple[int, int]) -> np.ndarray:
    """Return Euclidean distances between patches in pixels, float32 (N, N).

    Arguments are (rows, columns) and (height, width).
    """
    rows, columns = np.indices(grid).reshape(2, -1) * np.array(patch_size)[:, None]
    return np.hypot(rows[:, None] - rows, columns[:, None] - columns).astype(np.float32)


def mean_distances(
    attention_LBTQS: jax.Array,
    grid: tuple[int, int],
    patch_size: tuple[int, int],
) -> jax.Array:
    """Return mean attention distances in pixels (B, L, T): weighted by attention, mean of queries.

    As the authors of ViT compute it: row and column of the class token are excluded, and the other
    weights are not normalised again. So attention to the class token counts as a distance of 0.
    """
    num_patches = math.prod(grid)
    distance_NN = jnp.asarray(token_distances(grid, patch_size))
    first = attention_LBTQS.shape[-1] - num_patches
    weights_LBTNN = attention_LBTQS[..., first:, first:]
    return jnp.einsum("LBTQS,QS->BLT", weights_LBTNN, distance_NN) / num_patches


def mean_entropies(attention_LBTQS: jax.Array) -> jax.Array:
    """Return mean entropies of attention in nats (B, L, T), averaged over queries; at most ln S."""
    entropy_LBT = -jax.scipy.special.xlogy(attention_LBTQS, attention_LBTQS).sum(-1).mean(-1)
    return jnp.moveaxis(entropy_LBT, 0, 1)


def rollout(attention_LBTQS: jax.Array) -> jax.Array:
    """Return the attention rollout from output tokens to input tokens (B, Q, S).

    As Abnar and Zuidema (2020): each block is the mean of the identity, for the residual branch,
    and the attention averaged over heads; the blocks are multiplied.
    """
    mean_LBQS = attention_LBTQS.mean(axis=2)
    identity_SS = jnp.eye(mean_LBQS.shape[-1])
    mixed_LBQS = (mean_LBQS + identity_SS) / 2  # rows still sum to 1
    return functools.reduce(lambda below, above: above @ below, mixed_LBQS)


def select_patch_weights(weights_BQS: jax.Array, num_patches: int) -> jax.Array:
    """Return the weight of each patch in the representation of the image (..., N).

    With a class token these are the weights of its query, otherwise the mean over queries. Leading
    dimensions are kept.
    """
    first = weights_BQS.shape[-1] - num_patches
    if first:
        return weights_BQS[..., 0, first:]
    return weights_BQS.mean(axis=-2)


def reduce_attention(
    model: Model,
    images_NHWC: np.ndarray,
    reduce: Reduce,
) -> dict[str, np.ndarray]:
    """Return the results of `reduce` on the model's output with attention weights, for all images.

    `reduce` maps the `ModelOutput` of a batch to arrays whose first dimension is the image. The
    weights of a batch are reduced before the next one runs, so memory does not grow with the number
    of images.
    """
    a = model.architecture
    weights_per_image = a.depth * a.num_heads * a.sequence_length**2
    batch_size = max(1, min(MOST_IMAGES, MOST_WEIGHTS // weights_per_image))

    @jax.jit
    def step(module: nnx.Module, image_BHWC: jax.Array) -> dict[str, jax.Array]:
        traced_model = dataclasses.replace(model, module=module)
        return reduce(traced_model(image_BHWC, intermediates=("attention",)))

    def run(image_BHWC: np.ndarray) -> dict[str, jax.Array]:
        return step(model.module, image_BHWC)

    return run_in_batches(model, images_NHWC, batch_size, run)
