"""Mean and standard deviation of pixels in the patch embedding."""

import numpy as np
import pytest

from vit_jax.weights.folding import BIAS, KERNEL, Normalisation, fold


@pytest.mark.parametrize("has_bias", [True, False])
def test_the_folded_embedding_of_pixels_is_that_of_normalised_pixels(has_bias):
    rng = np.random.default_rng(0)
    parameters = {KERNEL: rng.normal(size=(4, 4, 3, 8)), "other": np.ones(2)}
    parameters |= {BIAS: rng.normal(size=8)} if has_bias else {}
    normalisation = Normalisation((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    pixels = rng.uniform(size=(5, 4, 4, 3))
    normalised = (pixels - normalisation.mean) / normalisation.std
    expected = np.einsum("NhwC,hwCD->ND", normalised, parameters[KERNEL]) + parameters.get(BIAS, 0.0)
    folded = fold(parameters, normalisation)
    found = np.einsum("NhwC,hwCD->ND", 2 * pixels - 1, folded[KERNEL]) + folded[BIAS]
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-14 * np.abs(expected).max())
    np.testing.assert_array_equal(folded["other"], parameters["other"])
