"""A photograph prepared as the weights state it, and its features, against what the libraries make of it.

`reference/photographs.py` recorded these, with the libraries' own processors.
"""

import pathlib

import numpy as np
import pytest

from tests.weights.reference.photographs import photograph
from tests.weights.test_families import write
from vit_jax import load_model

GOLDEN = np.load(pathlib.Path(__file__).parents[1] / "golden/photographs.npz")
CASES = sorted(name.removesuffix(" pixels") for name in GOLDEN if name.endswith(" pixels"))
FAST = ("huggingface/dinov2",)


@pytest.mark.parametrize(
    "case",
    [pytest.param(c, marks=[] if c in FAST else [pytest.mark.slow]) for c in CASES],
)
def test_pixels_and_features_of_a_photograph_are_those_of_the_library(case, tmp_path):
    folder = write(case, tmp_path)
    if f"{case} processor" in GOLDEN:
        (folder / "preprocessor_config.json").write_text(str(GOLDEN[f"{case} processor"]))

    model = load_model(folder)
    different = np.abs(model.preprocess([photograph()])[0] - GOLDEN[f"{case} pixels"].astype(int))
    is_timm = case.startswith("timm/")

    assert different.max() <= (
        0 if is_timm else 1
    )  # grey levels; the tensors of torchvision round otherwise

    expected = GOLDEN[f"{case} features"]
    field = "logits_BK" if len(expected) == model.architecture.num_classes else "features_BD"
    difference = (
        np.abs(next(model.stream([photograph()], field)) - expected).max() / np.abs(expected).max()
    )

    # transformers gives DINOv3 pixels that are not rounded.
    assert difference <= (1e-5 if is_timm else 5e-3 if case == "huggingface/dinov3" else 2e-3)
