"""The number of parameters by formula, against published counts (golden/parameter_counts.json)."""

import json
import pathlib

import pytest

from tests.models.small_models import abstract, size
from tests.rejections import rejects
from vit_jax.config import ModelConfig, build_architecture
from vit_jax.cost.parameters import count_parameters

ROWS = json.loads((pathlib.Path(__file__).parents[1] / "golden/parameter_counts.json").read_text())


def build(name="ViT-mu/16", num_classes=1000, pixels=224, **options):
    return build_architecture(ModelConfig(name=name, **options), image_size=(pixels, pixels), num_classes=num_classes)


@pytest.mark.parametrize("name", sorted({row["name"] for row in ROWS}))
def test_golden_counts(name):
    for row in (row for row in ROWS if row["name"] == name):
        head = "linear" if row["head"] == "none" else row["head"]
        a = build(name, row["num_classes"], row["image_size"], pool=row["pool"], head=head)
        assert count_parameters(a) == row["parameters"], row


def test_masked_patches_count_as_the_built_network():
    a = build_architecture(ModelConfig(name="ViT-mu/16"), image_size=(32, 32), num_classes=0, patch_outputs=512)
    assert count_parameters(a) == size(abstract(a))


@pytest.mark.parametrize(
    "options",
    [
        {"pool": "map"},
        {"position_embedding": "sincos2d"},
        {"position_layers": "every"},
        {"block": "axial", "pool": "gap"},
        {"network": "mine:Net"},
    ],
)
def test_other_forms_are_rejected(options):
    with rejects("formula"):
        count_parameters(build(**options))
