"""Names of timm's models in the modules of families, as `reference/compare_registry.py` writes them."""

import pytest

from tests.weights.reference.compare_registry import (
    FAMILIES,
    deprecated_blocks,
    find_row,
    models_blocks,
    replace_block,
)
from vit_jax.weights.architectures import list_deprecated_names, list_models
from vit_jax.weights.families import NAMES, load_families


def test_each_model_is_in_the_family_that_its_name_gives():
    for module, family in zip(NAMES, load_families(), strict=True):
        for name in family.models:
            assert find_row(name)[0] == module, name


@pytest.mark.parametrize(
    ("constant", "blocks"),
    [
        ("_MODELS", models_blocks(list_models())),
        ("_DEPRECATED", deprecated_blocks(list_deprecated_names())),
    ],
)
def test_writing_the_same_names_again_changes_no_module(constant, blocks):
    assert blocks

    for module, lines in blocks.items():
        text = (FAMILIES / f"{module}.py").read_text()
        assert replace_block(text, constant, lines) == text
        assert replace_block(text, constant, ["other"]) != text


def test_a_module_without_the_constant_is_named():
    with pytest.raises(ValueError, match="_MODELS"):
        replace_block("FAMILY = Family()\n", "_MODELS", ["vit_acme"])
