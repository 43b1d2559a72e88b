"""Classes of colours as colours, patches as images, and what of an image is hidden."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from tests.evals.samples import sample_pixels
from tests.weights.small_networks import VIT, weights_of
from vit_jax.api import from_weights
from vit_jax.config import ObjectiveConfig
from vit_jax.objectives.masked_patch import MaskedPatch
from vit_jax.tools.figures.reconstructions import HIDDEN, reconstruct, to_colours, to_image

GRID = (2, 3)
PATCH = (4, 4)
KINDS = {"mean_colour": 512, "colours_4x4": 16 * 512, "pixels": 48}


def masked(kind):
    return dataclasses.replace(VIT, pool="gap", num_classes=0, patch_outputs=KINDS[kind])


def objective(kind):
    return MaskedPatch(
        ObjectiveConfig(kind="masked_patch", patch_target=kind, loss="softmax"), GRID, PATCH
    )


def test_bins_are_shown_by_their_middle():
    """Eight levels of 255 / 8 = 31.875 each; red first."""
    found = to_colours(np.array([0, 511, 7, 64]))
    assert found.tolist() == [[16, 16, 16], [239, 239, 239], [16, 16, 239], [48, 16, 16]]


@pytest.mark.parametrize("kind", KINDS)
def test_an_image_of_targets_has_these_targets(kind):
    pixels = sample_pixels(2)
    targets = objective(kind).compute_targets(jnp.asarray(pixels))
    image = to_image(np.asarray(targets), kind, GRID, PATCH)

    assert image.shape == pixels.shape
    assert np.allclose(objective(kind).compute_targets(jnp.asarray(image)), targets, atol=1e-6)

    if kind == "pixels":
        assert np.array_equal(image, pixels)


@pytest.mark.parametrize("kind", KINDS)
def test_hidden_patches_alone_are_predicted(kind):
    model = from_weights(weights_of(masked(kind)))
    assert model.architecture.patch_outputs == KINDS[kind], "the head stays"

    pixels = sample_pixels(3)
    found = reconstruct(model, pixels)
    where = found["is_hidden"].repeat(4, axis=1).repeat(4, axis=2)

    assert 0 < where.mean() < 1
    assert np.array_equal(found["original"], pixels)
    assert (found["seen"][where] == HIDDEN).all()
    for name in ("seen", "predicted", "target"):
        assert np.array_equal(found[name][~where], pixels[~where])

    best = to_image(
        np.asarray(objective(kind).compute_targets(jnp.asarray(pixels))), kind, GRID, PATCH
    )
    assert np.array_equal(found["target"][where], best[where])

    other = pixels.copy()
    other[where] = 255 - other[where]

    assert np.array_equal(
        reconstruct(model, other)["predicted"][where], found["predicted"][where]
    ), "nothing leaks"
