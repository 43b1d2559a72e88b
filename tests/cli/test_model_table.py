"""The recorded table of networks equals the networks."""

import os

import pytest

from tests.tiny import ROOT
from vit_jax.cli.model_table import FILE, IMAGE_SIZE, NUM_CLASSES, ModelRow, read_models
from vit_jax.config import ModelConfig, build_architecture
from vit_jax.config.variants import MODEL_NAMES
from vit_jax.models.flops import FLOPS_PER_MAC, count_parameters, forward_macs
from vit_jax.weights.published import list_addresses

PATH = ROOT / "vit_jax" / "cli" / FILE


def measure_model(name):
    """Return the row of a network, built without values."""
    config = ModelConfig(name=name, head="linear")
    architecture = build_architecture(
        config,
        image_size=(IMAGE_SIZE, IMAGE_SIZE),
        num_classes=NUM_CLASSES,
    )
    return ModelRow(
        name,
        num_parameters=count_parameters(architecture),
        num_flops=FLOPS_PER_MAC * forward_macs(architecture),
        addresses=list_addresses().get(name, ()),
    )


def format_models(rows):
    """Return the text of the file: a line for each network, with tabs between its cells."""
    text = ""
    for row in rows:
        cells = [row.name, str(row.num_parameters), str(row.num_flops), *row.addresses]
        text += "\t".join(cells) + "\n"
    return text


def test_every_network_is_recorded_with_its_addresses():
    rows = read_models()

    assert list(rows) == list(MODEL_NAMES)
    recorded = {name: row.addresses for name, row in rows.items() if row.addresses}
    assert recorded == list_addresses()


@pytest.mark.parametrize("name", ["ViT-mu/16", "ViT-B/32", "R50x1", "R26+ViT-S/32"])
def test_a_recorded_network_is_measured_again(name):
    assert read_models()[name] == measure_model(name)


@pytest.mark.slow
def test_the_table_is_up_to_date():
    text = format_models(map(measure_model, MODEL_NAMES))
    if os.environ.get("UPDATE_GOLDEN") == "1":
        PATH.write_text(text)

    assert PATH.read_text() == text, "run once with UPDATE_GOLDEN=1"
