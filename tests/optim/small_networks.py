"""Small networks with made-up numbers in every leaf."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.config import ModelConfig, build_architecture
from vit_jax.models import build_model

DEPTH = 3


def abstract(name: str = "ViT-Ti/16", **options: Any) -> Any:
    """Shapes of a network of `DEPTH` blocks and width 8, or of a ResNet."""
    if "/" in name:
        options = {"width": 8, "depth": DEPTH, "mlp_dim": 8, "num_heads": 2, **options}
    architecture = build_architecture(ModelConfig(name=name, **options), image_size=(32, 32), num_classes=5)
    return jax.eval_shape(lambda: build_model(architecture, jax.random.key(0)))


def fill(tree: Any, seed: int) -> Any:
    """The tree with normal float32 numbers."""
    generator = np.random.default_rng(seed)
    return jax.tree.map(lambda leaf: jnp.asarray(generator.normal(size=leaf.shape), jnp.float32), tree)
