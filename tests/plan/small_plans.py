"""A recipe so small that it is planned and compiled in seconds."""

from vit_jax.config import load_recipe
from vit_jax.plan.dataset import choose_dataset

RECIPE = "configs/digits.py"
OVERRIDES = (
    "global_batch=32",
    "model.width=16",
    "model.mlp_dim=32",
    "model.depth=2",
    "model.num_heads=2",
    "model.scan_unroll=1",
    "input.mixup_alpha=0",
    "polyak.factor=None",
    "polyak.start=0 steps",
)
WORDS = tuple(f"--config.{override}" for override in OVERRIDES)


def recipe(*overrides):
    return load_recipe(RECIPE, [*WORDS, *(f"--config.{override}" for override in overrides)])


def dataset(config):
    return choose_dataset(RECIPE, config)
