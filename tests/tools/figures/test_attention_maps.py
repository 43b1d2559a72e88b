"""Attention distance, entropy and rollout against cases worked by hand."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from tests.evals.samples import sample_pixels, sample_weights
from vit_jax.api import from_weights
from vit_jax.tools.figures import attention_maps

# The mean distance from any patch of a grid of 2 x 2 with 16 pixels each
UNIFORM = (16 + 16 + 16 * math.sqrt(2)) / 4


def test_token_distances_of_a_grid_that_is_not_square():
    distances = attention_maps.token_distances((2, 3), (4, 8))

    for first in range(6):
        for second in range(6):
            rows = first // 3 - second // 3
            columns = first % 3 - second % 3
            expected = math.hypot(4 * rows, 8 * columns)
            assert distances[first, second] == pytest.approx(expected)


@pytest.mark.parametrize("class_tokens", [0, 1])
def test_uniform_attention_has_the_distance_worked_by_hand(class_tokens):
    """Attention to the class token counts as distance zero: four fifths of the distance remain."""
    length = 4 + class_tokens
    weights = jnp.full((1, 2, 3, length, length), 1 / length)
    distances = attention_maps.mean_distances(weights, (2, 2), (16, 16))
    entropies = attention_maps.mean_entropies(weights)

    assert distances.shape == (2, 1, 3)
    assert np.allclose(distances, UNIFORM * 4 / length, rtol=1e-6)
    assert np.allclose(entropies, math.log(length), rtol=1e-6)


def test_attention_to_oneself_or_to_the_class_token_has_distance_zero():
    itself = jnp.eye(5)
    to_class = jnp.zeros((5, 5)).at[:, 0].set(1)
    weights = jnp.stack([itself, to_class])[:, None, None]

    assert not attention_maps.mean_distances(weights, (2, 2), (16, 16)).any()
    assert not attention_maps.mean_entropies(weights).any()


def test_blocks_heads_and_images_keep_their_places():
    """Only head 2 of block 1, for image 0, looks from every patch to the first one: (0 + 16 + 16 +
    22.6) / 4.
    """
    to_first = jnp.zeros((4, 4)).at[:, 0].set(1)
    to_itself = jnp.broadcast_to(jnp.eye(4), (2, 3, 4, 4, 4))
    weights = to_itself.at[1, 0, 2].set(to_first)

    found = np.array(attention_maps.mean_distances(weights, (2, 2), (16, 16)))

    assert found[0, 1, 2] == pytest.approx(UNIFORM)

    found[0, 1, 2] = 0
    assert not found.any()


def test_rollout_of_known_matrices():
    """The heads of block 1 average to 1/2 everywhere, with the identity (3/4, 1/4).

    Block 2 looks at token 0 alone.
    """
    to_itself = jnp.eye(2)
    to_other = jnp.array([[0.0, 1.0], [1.0, 0.0]])
    to_first = jnp.array([[1.0, 0.0], [1.0, 0.0]])
    first_block = jnp.stack([to_itself, to_other])
    second_block = jnp.stack([to_first, to_first])
    weights = jnp.stack([first_block, second_block])[:, None]
    identity = jnp.broadcast_to(jnp.eye(3), (4, 1, 2, 3, 3))

    forward = attention_maps.rollout(weights)[0]
    backward = attention_maps.rollout(weights[::-1])[0]

    assert np.allclose(forward, [[0.75, 0.25], [0.5, 0.5]])
    assert np.allclose(backward, [[0.875, 0.125], [0.625, 0.375]])
    assert np.allclose(attention_maps.rollout(identity), jnp.eye(3))


def test_the_image_as_a_whole_is_the_class_token_or_the_mean():
    weights = jnp.arange(9.0).reshape(1, 3, 3)

    assert attention_maps.select_patch_weights(weights, 2).tolist() == [[1.0, 2.0]]
    assert attention_maps.select_patch_weights(weights, 3).tolist() == [[3.0, 4.0, 5.0]]


def test_images_are_reduced_a_few_at_a_time(monkeypatch):
    """One program for two images is compiled, also where only one image remains."""
    model = from_weights(sample_weights())
    a = model.architecture
    pixels = sample_pixels(5)
    attention_LBTQS = np.asarray(model(pixels, intermediates=("attention",)).attention_LBTQS)
    expected = attention_LBTQS.mean(axis=(0, 2))
    weights_per_image = a.depth * a.num_heads * a.sequence_length**2
    monkeypatch.setattr(attention_maps, "MOST_WEIGHTS", 2 * weights_per_image)
    batches = []

    def reduce(output):
        batches.append(output.attention_LBTQS.shape[1])
        return {"mean": output.attention_LBTQS.mean(axis=(0, 2))}

    found = attention_maps.reduce_attention(model, pixels, reduce)

    assert batches == [2]
    assert np.allclose(found["mean"], expected, atol=1e-6)
