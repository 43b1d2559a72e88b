"""A recipe so small that it is planned and compiled in seconds."""

from tests.tiny import NETWORK, flags
from vit_jax.config import load_recipe
from vit_jax.tools.plan.dataset import choose_dataset

RECIPE = "configs/digits.py"
POLYAK = ("polyak.factor=None", "polyak.start=0 steps")
OVERRIDES = ("global_batch=32", *NETWORK, "model.scan_unroll=1", "input.mixup_alpha=0", *POLYAK)
WORDS = flags(*OVERRIDES)


def recipe(*overrides):
    return load_recipe(RECIPE, flags(*OVERRIDES, *overrides))


def dataset(config):
    return choose_dataset(RECIPE, config)
