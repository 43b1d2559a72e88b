"""The tiny run of the tests: one network, one dataset, one recipe.

Runs with equal configs share their compiled programs (`compiled_once` in conftest.py), so a test
changes few fields.
"""

import pathlib

import numpy as np

from vit_jax.config import load_recipe
from vit_jax.data.kinds.in_memory import MemorySource

ROOT = pathlib.Path(__file__).parents[1]
RECIPE = ROOT / "configs" / "digits.py"
MIXUP = "input.mixup_alpha=0.4"
NETWORK = ("model.width=16", "model.mlp_dim=32", "model.depth=2", "model.num_heads=2")
RUN = (
    *NETWORK,
    "global_batch=16",
    "input.mixup_alpha=0",  # it doubles the time of compiling
    "evaluation.global_batch=120",  # three batches
    "schedule.warmup=5 steps",
    "logging.tensorboard=False",
)
LENGTH = (
    "total=6 steps",
    "evaluation.every=3 steps",
    "checkpoint.every=2 steps",
    "logging.every=1 steps",
)


def flags(*fields):
    """Return the arguments that set fields of the config on the command line."""
    return [f"--config.{field}" for field in fields]


def config(*fields):
    """Return the config of a tiny run of 20 steps with these fields changed."""
    return load_recipe(str(RECIPE), flags(*RUN, "total=20 steps", *fields))


def source(count, class_names=tuple("0123456789"), seed=0, size=(8, 8)):
    """Return a source of random gray images, of every class in turn."""
    pixels = np.random.default_rng(seed).integers(
        0,
        256,
        (count, *size, 1),
        np.uint8,
    )
    return MemorySource(
        pixels,
        np.arange(count) % len(class_names),
        class_names,
    )
