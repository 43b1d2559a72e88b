"""A family in one new module: read, written and listed, and unknown again without it."""

import dataclasses
import json
import sys

import pytest

from tests.weights.small_networks import VIT, arrays_of, assert_same, weights_of
from vit_jax.weights import families, load_weights
from vit_jax.weights.architectures import find_unsupported, is_known
from vit_jax.weights.formats import open_arrays, write_safetensors
from vit_jax.weights.names import require_writable
from vit_jax.weights.published import find_licence, list_addresses, list_releases
from vit_jax.weights.saving import save_weights

MODULE = """
from vit_jax.weights.family import Family, RejectedArrays, RejectedModels, Release, Sizes
from vit_jax.weights.library_models import ANY, TransformersModel
from vit_jax.weights.names.huggingface_names import ATTENTION, NORMS, TOKENS, TWO_LAYERS, HuggingFaceNames
from vit_jax.weights.names.original_names import OriginalNames

_NAMES = HuggingFaceNames(
    prefixes=("acme.",),
    patches="embeddings.squares",
    block="encoder.layer.",
    layers={**ATTENTION, **NORMS, **TWO_LAYERS, "encoder/norm": "layernorm"},
    arrays=TOKENS,
    epsilon=1e-3,
)
_MODEL = TransformersModel(
    name="AcmeModel",
    classifier="AcmeForImageClassification",
    model_type="acme",
    prefix="acme.",
    keeps_prefix=True,
    names=_NAMES,
    held={"gelu": ANY, "registers": (3,), "pool": ("token",), "head": ("linear",)},
    arguments=lambda a, pixels: {"num_register_tokens": a.registers},
)
FAMILY = Family(
    releases=(
        Release("Acme", ("hf://acme/acme-{s,b}",), "acme", "tests", "mit", "both sides 12"),
    ),
    addresses={"ViT-Acme/4": ("hf://acme/acme-s",)},
    models={"vit_acme_patch4": Sizes(16, 2, 2)},
    named_fields={"^vit_acme_": {"gelu": "quick"}},
    model_types={"acme": {"gelu": "quick"}},
    rejected_models=(RejectedModels("vit_acmex_", "Acme X", "a part of its own"),),
    rejected_arrays=(RejectedArrays("acme_parts", "Acme Y", "other parts"),),
    original=OriginalNames("acme_patches.weight", {"^acme_patches": "patch_embed.proj"}),
    huggingface=(_NAMES,),
    transformers_models=(_MODEL,),
)
"""
A = dataclasses.replace(VIT, image_size=(12, 12), gelu="exact")


@pytest.fixture
def acme(tmp_path, monkeypatch):
    """Make the family known, with one module and its name in the list of families."""
    folder = tmp_path / "modules"
    folder.mkdir()
    (folder / "acme.py").write_text(MODULE)
    monkeypatch.setattr(families, "__path__", [*families.__path__, str(folder)])
    monkeypatch.setattr(families, "NAMES", (*families.NAMES, "acme"))
    yield
    sys.modules.pop(f"{families.__name__}.acme", None)


def test_its_names_are_unknown_without_the_module():
    assert not is_known("vit_acme_patch4")
    assert find_licence("acme/acme-s") == ""

    message = "The format huggingface cannot hold"
    with pytest.raises(ValueError, match=message):
        require_writable("huggingface", dataclasses.replace(A, registers=3))


def test_its_names_and_releases_are_known(acme):
    assert is_known("vit_acme_patch4.tag")
    assert is_known("acme")
    assert find_unsupported("vit_acmex_4") == "Acme X is not supported: it has a part of its own"
    assert find_licence("acme/acme-s") == "mit"
    assert list_releases()[-1].name == "Acme"
    assert list_addresses()["ViT-Acme/4"] == ("hf://acme/acme-s",)


def test_a_file_of_its_authors_is_read_with_timm_s_configuration(acme, tmp_path):
    arrays = arrays_of(A, "timm")
    renamed = {}
    for name, array in arrays.items():
        renamed[name.replace("patch_embed.proj", "acme_patches")] = array

    write_safetensors(tmp_path / "model.safetensors", renamed, {})
    (tmp_path / "config.json").write_text(json.dumps({"architecture": "vit_acme_patch4"}))
    weights = load_weights(tmp_path)

    assert weights.architecture == dataclasses.replace(A, gelu="quick")
    assert weights.licence == "mit"

    write_safetensors(
        tmp_path / "model.safetensors",
        {**renamed, "acme_parts": arrays["cls_token"]},
        {},
    )
    message = "the file is of Acme Y: it has other parts"

    with pytest.raises(ValueError, match=message):
        load_weights(tmp_path)


def test_its_class_of_transformers_is_written_and_read(acme, tmp_path):
    a = dataclasses.replace(A, gelu="quick", registers=3)
    written = weights_of(a)
    save_weights(written, tmp_path / "out", "huggingface")
    config = json.loads((tmp_path / "out/config.json").read_text())

    assert config["architectures"] == ["AcmeForImageClassification"]
    assert config["num_register_tokens"] == 3

    path = tmp_path / "out/model.safetensors"
    with open_arrays(path) as file:
        arrays = {name: file.read(name) for name in file.arrays}

    assert "acme.embeddings.squares.weight" in arrays

    write_safetensors(path, arrays, {})  # without our metadata
    read = load_weights(tmp_path / "out")

    assert read.architecture == a
    assert read.format == "huggingface"
    assert_same(read.parameters, written.parameters)
