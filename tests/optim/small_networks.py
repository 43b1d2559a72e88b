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
    """Shapes of a network of `DEPTH` blocks and width 8, or of a ResNet."""
    if "/" in name:
        options = {"width": 8, "depth": DEPTH, "mlp_dim": 8, "num_heads": 2, **options}

    architecture = build_architecture(
        ModelConfig(name=name, **options),
        image_size=(32, 32),
        num_classes=5,
    )
    return jax.eval_shape(lambda: build_model(architecture, jax.random.key(0)))


def fill(tree, seed):
    """The tree with normal float32 numbers."""
    generator = np.random.default_rng(seed)
    return jax.tree.map(
        lambda leaf: jnp.asarray(generator.normal(size=leaf.shape), jnp.float32),
        tree,
    )


def run(config, parameters, gradients, schedule=lambda step: jnp.float32(0.1), peak=0.2):
    """The parameters after one update for each gradient."""
    optimizer = build_optimizer(config, schedule, peak)
    state = optimizer.init(parameters)
    update = jax.jit(optimizer.update)

    for gradient in gradients:
        updates, state = update(gradient, state, parameters)
        parameters = optax.apply_updates(
            parameters,
            updates,
        )  # not compiled, for a compiler may leave + 0 out

    return parameters
