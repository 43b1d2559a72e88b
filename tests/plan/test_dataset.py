"""How many images and classes are planned with, and what says so."""

import dataclasses

import pytest

from vit_jax.config import load_recipe
from vit_jax.plan.dataset import IMAGENET, JFT, choose_dataset

RECIPE = "configs/pretrain_jft.py:ViT-H/14"


@pytest.fixture(scope="module")
def config():
    return load_recipe(RECIPE)


def test_the_recipe_names_the_data_of_its_paper(config):
    assert choose_dataset(RECIPE, config) == JFT
    assert choose_dataset("/elsewhere/configs/pretrain_jft.py:ViT-H/14", config) == JFT


def test_data_that_are_chosen_come_first(config):
    chosen = dataclasses.replace(config, data="tfds:imagenet2012")
    assert choose_dataset(RECIPE, chosen) == IMAGENET


def test_the_command_line_replaces_either_number(config):
    both = choose_dataset(RECIPE, config, num_examples=5, num_classes=7)
    assert (both.num_examples, both.num_classes, both.source) == (5, 7, "the command line")
    one = choose_dataset(RECIPE, config, num_classes=7)
    assert (one.num_examples, one.num_classes) == (JFT.num_examples, 7)
    assert "command line" in one.source


def test_unknown_data(config):
    chosen = dataclasses.replace(config, data="folder:/my/images")
    with pytest.raises(ValueError, match="--num_examples=N and --num_classes=N"):
        choose_dataset(RECIPE, chosen)
    with pytest.raises(ValueError, match="not known here"):
        choose_dataset("own.py", config, num_examples=5)
    assert choose_dataset("own.py", config, num_examples=5, num_classes=2).num_classes == 2
