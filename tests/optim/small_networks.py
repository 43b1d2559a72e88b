"""Small networks with made-up numbers in every leaf, and updates of them."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from vit_jax.config import ModelConfig, build_architecture
from vit_jax.models import build_model
from vit_jax.optim.optimizers import build_optimizer

DEPTH = 3


def abstract(name="ViT-Ti/16", **options):
    """Return the shapes of a network of `DEPTH` blocks and width 8, or of a ResNet."""
    if "/" in name:
        options = {
            "width": 8,
            "depth": DEPTH,
            "mlp_dim": 8,
            "num_heads": 2,
            **options,
        }

    architecture = build_architecture(
        ModelConfig(name=name, **options),
        image_size=(32, 32),
        num_classes=5,
    )

    def build():
        return build_model(architecture, jax.random.key(0))

    return jax.eval_shape(build)


def fill(tree, seed):
    """Return the tree with normal float32 numbers."""
    rng = np.random.default_rng(seed)

    def sample(leaf):
        return jnp.asarray(rng.normal(size=leaf.shape), jnp.float32)

    return jax.tree.map(sample, tree)


def run(
    config,
    parameters,
    gradients,
    schedule=lambda step: jnp.float32(0.1),
    peak=0.2,
):
    """Return the parameters after one update for each gradient."""
    optimizer = build_optimizer(config, schedule, peak)
    state = optimizer.init(parameters)
    update = jax.jit(optimizer.update)

    for gradient in gradients:
        updates, state = update(gradient, state, parameters)
        # Not compiled, because a compiler may remove + 0.
        parameters = optax.apply_updates(parameters, updates)

    return parameters
