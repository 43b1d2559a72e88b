"""Mean and standard deviation of pixels in the patch embedding."""

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from vit_jax.weights.folding import BIAS, KERNEL, Normalisation, fold, unfold


def sample_parameters(has_bias, dtype=np.float64):
    """Return a patch embedding of 4 x 4 pixels, and the array of another layer."""
    rng = np.random.default_rng(0)
    kernel = rng.normal(size=(4, 4, 3, 8))
    parameters = {
        KERNEL: kernel.astype(dtype),
        "other": np.ones(2),
    }
    if has_bias:
        bias = rng.normal(size=8)
        parameters[BIAS] = bias.astype(dtype)
    return parameters


def embed(pixels, kernel, bias):
    return np.einsum("NhwC,hwCD->ND", pixels, kernel) + bias


IMAGENET = Normalisation((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


@pytest.mark.parametrize("has_bias", [True, False])
def test_the_folded_embedding_of_pixels_is_that_of_normalised_pixels(has_bias):
    parameters = sample_parameters(has_bias)
    rng = np.random.default_rng(1)
    pixels = rng.uniform(size=(5, 4, 4, 3))
    normalised = (pixels - IMAGENET.mean) / IMAGENET.std
    expected = embed(
        normalised,
        parameters[KERNEL],
        parameters.get(BIAS, 0.0),
    )
    largest = np.abs(expected).max()

    folded = fold(parameters, IMAGENET)
    outputs = embed(
        2 * pixels - 1,
        folded[KERNEL],
        folded[BIAS],
    )

    assert_allclose(
        outputs,
        expected,
        rtol=0,
        atol=1e-14 * largest,
    )
    assert_array_equal(folded["other"], parameters["other"])


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [
        (np.float64, 1e-14),
        (np.float32, 2**-23),
    ],
)
@pytest.mark.parametrize("has_bias", [True, False])
def test_unfolding_restores_the_parameters(has_bias, dtype, tolerance):
    parameters = sample_parameters(has_bias, dtype)
    bias = parameters.get(BIAS, 0.0)

    folded = fold(parameters, IMAGENET)
    unfolded = unfold(folded, IMAGENET)
    # The bias is a difference: it is exact to the rounding of the terms, not of the result.
    terms_D = np.abs(folded[KERNEL]).sum((0, 1, 2))
    terms_D += np.abs(folded[BIAS])
    difference = np.abs(unfolded[BIAS] - bias)

    assert_allclose(
        unfolded[KERNEL],
        parameters[KERNEL],
        rtol=tolerance,
        atol=0,
    )
    assert (difference <= tolerance * terms_D).all()
    assert unfolded[KERNEL].dtype == dtype
    assert unfolded[BIAS].dtype == dtype
    assert_array_equal(unfolded["other"], parameters["other"])
