"""Networks of vit_jax and of timm and Hugging Face, on the same seeded parameters.

See reference/README.md.
"""

import dataclasses
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.models.small_models import abstract, apply
from tests.weights.reference import networks
from tests.weights.small_networks import assert_same
from vit_jax import pytree
from vit_jax.weights import Weights, load_weights
from vit_jax.weights.formats import open_arrays
from vit_jax.weights.position_table import tabulate_positions
from vit_jax.weights.saving import save_weights

PATH = pathlib.Path(__file__).parents[1] / "golden/reference_logits.json"
GOLDEN = json.loads(PATH.read_text())["cases"]
CASES = GOLDEN.keys() | networks.CASES.keys()
# Relative to the largest logit. Both sides compute in float32 and sum in another order, over up to
# 512 channels: they were seen to differ by 8e-7. The GELU form alone makes 1e-3.
TOLERANCE = 1e-4


def distance(case: str, a) -> float:
    """Return the largest difference of logits from the library's, relative to the largest logit."""
    weights = networks.parameters(a)
    parameters = jax.tree.map(jnp.asarray, weights)
    model = pytree.from_named_leaves(abstract(a), parameters)
    output = apply(model, networks.images(a))
    logits = output.logits_BK if a.num_classes else output.features_BD
    expected = np.array(GOLDEN[case]["logits"])

    difference = np.abs(logits - expected)
    return float(difference.max() / np.abs(expected).max())


@pytest.mark.parametrize("case", sorted(CASES))
def test_logits_are_the_library_s(case):
    a = networks.CASES[case]

    assert distance(case, a) < TOLERANCE


@pytest.mark.parametrize(
    ("case", "change"),
    [
        ("timm_token", {"gelu": "tanh"}),
        ("timm_map", {"gelu": "exact"}),
        ("huggingface_token", {"layer_norm_epsilon": 1e-3}),
        ("timm_root_hybrid", {"standardization_epsilon": 1e-3}),
    ],
)
def test_other_constants_give_other_logits(case, change):
    changed = dataclasses.replace(networks.CASES[case], **change)

    assert distance(case, changed) > TOLERANCE


def read_shapes(path):
    shapes = {}
    with open_arrays(path) as file:
        for name, array in file.arrays.items():
            shapes[name] = list(array.shape)
    return shapes


@pytest.mark.parametrize("case", networks.CASES)
def test_files_have_the_library_s_arrays_and_come_back_the_same(case, tmp_path):
    a = networks.CASES[case]
    written = Weights(a, networks.parameters(a))
    expected = tabulate_positions(written)
    path = tmp_path / "w.safetensors"
    library, _, _ = case.partition("_")

    save_weights(written, path, library)
    read = load_weights(path)
    shapes = {}
    for name, shape in read_shapes(path).items():
        if not a.num_classes:
            # A ViTModel has no prefix in its files, and reads both.
            name = name.removeprefix("vit.")
        shapes[name] = shape

    assert shapes == GOLDEN[case]["arrays"]
    assert read.architecture == expected.architecture
    assert_same(read.parameters, expected.parameters)
