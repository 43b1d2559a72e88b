"""Classes of colours as colours, patches as images, and the hidden part of an image."""

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


def compute_targets(kind, pixels):
    config = ObjectiveConfig(
        kind="masked_patch",
        patch_target=kind,
        loss="softmax",
    )
    task = MaskedPatch(config, GRID, PATCH)
    targets = task.compute_targets(jnp.asarray(pixels))
    return np.asarray(targets)


def build_masked(kind):
    return dataclasses.replace(
        VIT,
        pool="gap",
        num_classes=0,
        patch_outputs=KINDS[kind],
    )


def test_bins_are_shown_by_their_middle():
    """Eight levels of 255 / 8 = 31.875 each; red first."""
    found = to_colours(np.array([0, 511, 7, 64]))

    assert found.tolist() == [
        [16, 16, 16],
        [239, 239, 239],
        [16, 16, 239],
        [48, 16, 16],
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_an_image_of_targets_has_these_targets(kind):
    pixels = sample_pixels(2)
    targets = compute_targets(kind, pixels)

    image = to_image(targets, kind, GRID, PATCH)
    targets_of_image = compute_targets(kind, image)

    assert image.shape == pixels.shape
    assert np.allclose(targets_of_image, targets, atol=1e-6)
    if kind == "pixels":
        assert np.array_equal(image, pixels)


@pytest.mark.parametrize("kind", KINDS)
def test_hidden_patches_alone_are_predicted(kind):
    model = from_weights(weights_of(build_masked(kind)))
    pixels = sample_pixels(3)
    targets = compute_targets(kind, pixels)
    best = to_image(targets, kind, GRID, PATCH)

    found = reconstruct(model, pixels)
    cells = np.ones((1, *PATCH), bool)
    is_hidden = np.kron(found["is_hidden"], cells)

    assert model.architecture.patch_outputs == KINDS[kind], "the head stays"
    assert 0 < is_hidden.mean() < 1
    assert np.array_equal(found["original"], pixels)
    assert (found["seen"][is_hidden] == HIDDEN).all()
    assert np.array_equal(found["target"][is_hidden], best[is_hidden])
    for name in ("seen", "predicted", "target"):
        assert np.array_equal(found[name][~is_hidden], pixels[~is_hidden])

    # Nothing leaks from hidden patches.
    changed = pixels.copy()
    changed[is_hidden] = 255 - changed[is_hidden]
    predicted = reconstruct(model, changed)["predicted"]
    expected = found["predicted"]

    assert np.array_equal(predicted[is_hidden], expected[is_hidden])
