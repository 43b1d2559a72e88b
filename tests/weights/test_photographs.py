"""A photograph prepared as the weights state it, and its features, held to the libraries.

`reference/photographs.py` recorded the expected values, with the libraries' own processors.
"""

import pathlib

import numpy as np
import pytest

from tests.weights.reference.photographs import photograph
from tests.weights.test_families import write
from vit_jax import load_model


def read_cases():
    """Return the recorded cases as parameters, all slow but one."""
    parameters = []
    for name in sorted(GOLDEN):
        if name.endswith(" pixels"):
            case = name.removesuffix(" pixels")
            marks = [] if case == FAST else [pytest.mark.slow]
            parameters.append(pytest.param(case, marks=marks))
    return parameters


def find_tolerances(case):
    """Return the largest difference of a pixel in grey levels, and of features relative to the largest."""
    if case.startswith("timm/"):
        return 0, 1e-5
    # The tensors of torchvision round otherwise.
    if case == "huggingface/dinov3":
        # transformers gives DINOv3 pixels that are not rounded.
        return 1, 5e-3
    return 1, 2e-3


GOLDEN = np.load(pathlib.Path(__file__).parents[1] / "golden/photographs.npz")
FAST = "huggingface/dinov2"


@pytest.mark.parametrize("case", read_cases())
def test_pixels_and_features_of_a_photograph_are_those_of_the_library(case, tmp_path):
    folder = write(case, tmp_path)
    if f"{case} processor" in GOLDEN:
        (folder / "preprocessor_config.json").write_text(str(GOLDEN[f"{case} processor"]))
    expected_pixels = GOLDEN[f"{case} pixels"].astype(int)
    expected = GOLDEN[f"{case} features"]
    grey_levels, tolerance = find_tolerances(case)

    model = load_model(folder)
    has_logits = len(expected) == model.architecture.num_classes
    field = "logits_BK" if has_logits else "features_BD"
    pixels = model.preprocess([photograph()])[0]
    features = next(model.stream([photograph()], field))

    assert np.abs(pixels - expected_pixels).max() <= grey_levels
    assert np.abs(features - expected).max() <= tolerance * np.abs(expected).max()
