"""Attention distance, entropy and rollout against cases worked by hand."""

import math

import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose

from tests.evals.samples import sample_pixels, sample_weights
from vit_jax.api import from_weights
from vit_jax.tools.figures import attention_maps

# The mean distance from any patch of a grid of 2 x 2 with 16 pixels each
UNIFORM = (16 + 16 + 16 * math.sqrt(2)) / 4


def measure_distances(weights):
    """Return the distances on a grid of 2 x 2 patches of 16 x 16 pixels."""
    return attention_maps.mean_distances(
        weights,
        (2, 2),
        (16, 16),
    )


def test_token_distances_of_a_grid_that_is_not_square():
    distances = attention_maps.token_distances((2, 3), (4, 8))

    for first, second in np.ndindex(6, 6):
        row, column = divmod(first, 3)
        other_row, other_column = divmod(second, 3)
        height = 4 * (row - other_row)
        width = 8 * (column - other_column)
        expected = math.hypot(height, width)
        assert distances[first, second] == pytest.approx(expected)


@pytest.mark.parametrize("class_tokens", [0, 1])
def test_uniform_attention_has_the_distance_worked_by_hand(class_tokens):
    """Attention to the class token counts as distance zero: four fifths of the distance remain."""
    length = 4 + class_tokens
    shape = (1, 2, 3, length, length)
    weights = jnp.full(shape, 1 / length)

    distances = measure_distances(weights)
    entropies = attention_maps.mean_entropies(weights)

    assert distances.shape == (2, 1, 3)
    assert_allclose(distances, UNIFORM * 4 / length, rtol=1e-6)
    assert_allclose(entropies, math.log(length), rtol=1e-6)


def test_attention_to_oneself_or_to_the_class_token_has_distance_zero():
    weights = np.zeros((2, 1, 1, 5, 5), np.float32)
    weights[0] = np.eye(5)
    weights[1, ..., 0] = 1

    distances = measure_distances(weights)
    entropies = attention_maps.mean_entropies(weights)

    assert not distances.any()
    assert not entropies.any()


def test_blocks_heads_and_images_keep_their_places():
    """Only head 2 of block 1, for image 0, looks from every patch to the first one: (0 + 16 + 16 +
    22.6) / 4.
    """
    weights = np.zeros((2, 3, 4, 4, 4), np.float32)
    weights[:] = np.eye(4)
    head = weights[1, 0, 2]
    head[:] = 0
    head[:, 0] = 1
    expected = np.zeros((3, 2, 4))
    expected[0, 1, 2] = UNIFORM

    distances = measure_distances(weights)

    assert_allclose(distances, expected, rtol=1e-6)


def test_rollout_of_known_matrices():
    """The heads of block 1 average to 1/2 everywhere, with the identity (3/4, 1/4).

    Block 2 looks at token 0 alone.
    """
    weights = np.zeros((2, 1, 2, 2, 2), np.float32)
    to_itself = np.eye(2)
    to_other = to_itself[::-1]
    first_block = weights[0, 0]
    first_block[0] = to_itself
    first_block[1] = to_other
    second_block = weights[1, 0]
    second_block[..., 0] = 1

    forward = attention_maps.rollout(weights)
    backward = attention_maps.rollout(weights[::-1])

    assert_allclose(forward[0, 0], [0.75, 0.25])
    assert_allclose(forward[0, 1], [0.5, 0.5])
    assert_allclose(backward[0, 0], [0.875, 0.125])
    assert_allclose(backward[0, 1], [0.625, 0.375])


def test_rollout_of_attention_to_oneself():
    weights = np.zeros((4, 1, 2, 3, 3), np.float32)
    weights[:] = np.eye(3)

    found = attention_maps.rollout(weights)

    assert_allclose(found[0], np.eye(3))


def test_the_image_as_a_whole_is_the_class_token_or_the_mean():
    weights = jnp.arange(9.0).reshape(1, 3, 3)

    from_class_token = attention_maps.select_patch_weights(weights, 2)
    from_mean = attention_maps.select_patch_weights(weights, 3)

    assert from_class_token.tolist() == [[1.0, 2.0]]
    assert from_mean.tolist() == [[3.0, 4.0, 5.0]]


def test_images_are_reduced_a_few_at_a_time(monkeypatch):
    """One program for two images is compiled, also where only one image remains."""
    model = from_weights(sample_weights())
    a = model.architecture
    pixels = sample_pixels(5)
    output = model(pixels, intermediates=("attention",))
    expected = output.attention_LBTQS.mean(axis=(0, 2))
    weights_per_image = a.depth * a.num_heads * a.sequence_length**2
    monkeypatch.setattr(
        attention_maps,
        "MOST_WEIGHTS",
        2 * weights_per_image,
    )
    batches = []

    def reduce(output):
        attention_LBTQS = output.attention_LBTQS
        batches.append(attention_LBTQS.shape[1])
        return {"mean": attention_LBTQS.mean(axis=(0, 2))}

    found = attention_maps.reduce_attention(model, pixels, reduce)

    assert batches == [2]
    assert np.allclose(found["mean"], expected, atol=1e-6)
