"""Networks of current families, as timm and transformers compute them; `reference/run_families.py` recorded these."""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.weights.reference.families import full_names, pixels, values
from vit_jax.models import build_model
from vit_jax.weights.folding import unfold
from vit_jax.weights.load import load_weights
from vit_jax.weights.names import FORMATS, unstack
from vit_jax.weights.sidecar import read_sidecar

GOLDEN = json.loads((pathlib.Path(__file__).parents[1] / "golden/families.json").read_text())["cases"]
FAST = ("timm/dinov3", "timm/clip", "huggingface/dinov2", "huggingface/siglip_both")


def write(case, folder):
    """Write the files that a user downloads."""
    golden = GOLDEN[case]
    shapes = full_names(golden["shapes"], depth=2)
    save_file({name: values(name, shape) for name, shape in shapes.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(golden["config"]))
    return folder


def apply(weights, images):
    a = weights.architecture
    abstract = jax.eval_shape(lambda: build_model(a, jax.random.key(0)))
    leaves = [jnp.asarray(array) for array in weights.parameters.values()]
    return jax.tree.unflatten(jax.tree.structure(abstract), leaves)(jnp.asarray(images, jnp.float32))


def test_without_its_config_a_file_of_a_current_family_gives_a_warning(tmp_path):
    file = write("timm/clip", tmp_path) / "model.safetensors"
    (tmp_path / "config.json").unlink()
    assert any("WARNING: without the config.json" in note for note in load_weights(file, num_heads=2).notes)
    file = write("timm/dinov3", tmp_path) / "model.safetensors"
    (tmp_path / "config.json").unlink()
    with pytest.raises(ValueError, match="does not state its rotary positions: give the folder"):
        load_weights(file, num_heads=2)


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[] if case in FAST else [pytest.mark.slow]) for case in GOLDEN]
)
def test_the_features_are_those_of_the_library(case, tmp_path):
    """The input is pixels in [0, 1], so that their normalisation is compared too."""
    golden = GOLDEN[case]
    weights = load_weights(write(case, tmp_path))
    output = apply(weights, 2 * pixels(golden["size"]) - 1)
    compared = {"logits": output.logits_BK, "features": output.pooled_BD, "hidden": output.features_BD}
    names = compared.keys() & golden.keys()
    assert names
    for name in names:
        expected = np.array(golden[name])
        np.testing.assert_allclose(compared[name], expected, rtol=0, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("case", [case for case in GOLDEN if case.startswith("timm/")])
def test_the_table_of_timm_gives_the_names_and_values_of_the_file_back(case, tmp_path):
    weights = load_weights(write(case, tmp_path))
    unfolded = unfold(weights.parameters, read_sidecar(tmp_path).normalisation)
    apart = unstack(unfolded, weights.architecture.num_heads)
    written = {entry.name: entry.write(apart) for entry in FORMATS["timm"].entries(weights.architecture)}
    expected = {name: values(name, shape) for name, shape in full_names(GOLDEN[case]["shapes"], depth=2).items()}
    if "patch_embed.proj.bias" not in expected:  # folding made one, where the pixels of the file are not ours
        bias = written.pop("patch_embed.proj.bias", np.zeros(1))
        assert np.abs(bias).max() <= 1e-6
    assert written.keys() == expected.keys()
    for name, array in expected.items():  # a bias is a difference: it is exact to the rounding of its terms
        np.testing.assert_allclose(written[name], array, rtol=0, atol=1e-6 * np.abs(array).max(), err_msg=name)
