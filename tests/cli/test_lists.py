"""The verbs that list models, weights and recipes."""

import json

import pytest

from tests.integration.commands import succeed
from tests.rejections import rejects
from tests.tiny import ROOT
from vit_jax import cli
from vit_jax.config import load_recipe
from vit_jax.config.recipes import list_recipes
from vit_jax.config.variants import MODEL_NAMES


def show(*words):
    return succeed(words)


def read_models(*words):
    """Return the cells of each model of a list, without its name."""
    models = {}
    for line in show("models", *words).splitlines():
        if line.startswith("|"):
            name, *cells = (cell.strip() for cell in line.split("|")[1:-1])
            models[name] = cells
    return models


def test_models_lists_every_network():
    assert set(MODEL_NAMES) <= read_models().keys()


def test_models_shows_size_cost_and_weights():
    cells = read_models("ViT-[Be]/16") | read_models("R50x1")

    assert cells["ViT-B/16"] == ["86.6", "35.1", "ViT, AugReg, SAM, Hugging Face, timm"]
    assert cells["R50x1"][0] == "25.5"
    assert cells["ViT-e/16"] == ["3,807.4", "1,514.2", ""]


def test_models_lists_addresses_on_request():
    text = show("models", "R26+ViT-B/32", "--weights")

    assert "R26+ViT-B/32:\n  gs://vit_models/imagenet21k/R26+ViT-B_32.npz\n" in text
    assert "ViT-e/14:\n  none\n" in show("models", "ViT-e/14", "--weights")
    assert "gs://" not in show("models", "R26+ViT-B/32")


def test_models_as_json():
    (row,) = json.loads(show("models", "ViT-H/14", "--json"))

    assert row["parameters"] == 632045800  # as in golden/parameter_counts.json
    assert "hf://google/vit-huge-patch14-224-in21k" in row["weights"]


def test_weights_lists_families_with_licence_accuracy_and_addresses():
    text = show("weights", "--list")
    (row,) = (line for line in text.splitlines() if line.startswith("| DINOv2  "))

    assert "| apache-2.0 " in row
    assert "k-NN S 79.0, B 82.1" in row
    assert "\n\nSigLIP 2:\n  hf://google/siglip2-{base-patch16-224," in text
    assert "apache" not in show("weights", "dinov2")


def test_weights_of_a_pattern():
    (family,) = json.loads(show("weights", "dinov3", "--list", "--json"))

    assert family["licence"] == "dinov3-license"
    with rejects("PATTERN=nothing", "DINOv3"):
        cli.VERBS["weights"](["nothing", "--list"])


def test_unknown_models_and_recipes_are_rejected():
    with rejects("PATTERN=ViT-B/61", "ViT-B/16"):
        cli.VERBS["models"](["ViT-B/61"])

    with rejects("PATTERN=nothing", "digits"):
        cli.VERBS["recipes"](["nothing"])


def test_recipes_shows_what_each_takes():
    text = " ".join(show("recipes").split())
    names = {path.stem for path in (ROOT / "configs").glob("*.py")}

    assert names <= set(text.split())
    assert "vit-jax finetune, data by --config.data=, 20 epochs by default" in text
    assert "TASKS: cifar10 cifar100" in text
    assert "LEARNING_RATES: ViT-B/16,epochs=7" in text


def test_recipes_as_json():
    (row,) = json.loads(show("recipes", "digits_masked", "--json"))

    assert row["verb"] == "pretrain"
    assert row["data"] == "digits"
    assert row["total"] == "100 epochs"


# The arguments before some choices of the recipe finetune
BEFORE = {"TASKS": "any,", "RULES": "any,pets,rule="}


@pytest.mark.parametrize("recipe", list_recipes(), ids=lambda recipe: recipe.name)
def test_a_recipe_has_a_description_and_takes_the_choices_that_are_listed(recipe):
    before = BEFORE if recipe.name == "finetune" else {}

    assert recipe.description
    assert recipe.argument.endswith(".")
    for name, choices in recipe.choices.items():
        for choice in choices:
            load_recipe(f"{recipe.name}:{before.get(name, '')}{choice}")
