"""The config room alone: no jax, so recipes load on a machine that has none."""

import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[2]

CODE = """
import sys
from vit_jax.config import load_recipe, resolve
resolve(load_recipe("configs/digits.py", ["--config.seed=1"]), num_examples=1437, num_devices=1)
print(*sorted({"jax", "jaxlib", "flax", "optax", "tensorflow"} & sys.modules.keys()))
"""


def test_a_recipe_is_loaded_and_resolved_without_jax():
    result = subprocess.run([sys.executable, "-c", CODE], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout.split() == []
