"""The recorded table of networks equals the networks."""

import os
import pathlib

import pytest

from vit_jax.cli import model_table
from vit_jax.config.variants import MODEL_NAMES
from vit_jax.weights.published import list_addresses

FILE = pathlib.Path(model_table.__file__).parent / model_table.FILE


def test_every_network_is_recorded_with_its_addresses():
    rows = model_table.read_models()

    assert list(rows) == list(MODEL_NAMES)
    recorded = {name: row.addresses for name, row in rows.items() if row.addresses}
    assert recorded == list_addresses()


@pytest.mark.parametrize("name", ["ViT-mu/16", "ViT-B/32", "R50x1", "R26+ViT-S/32"])
def test_a_recorded_network_is_measured_again(name):
    assert model_table.read_models()[name] == model_table.measure_model(name)


@pytest.mark.slow
def test_the_table_is_up_to_date():
    text = model_table.format_models(map(model_table.measure_model, MODEL_NAMES))
    if os.environ.get("UPDATE_GOLDEN") == "1":
        FILE.write_text(text)

    assert FILE.read_text() == text, "run once with UPDATE_GOLDEN=1"
