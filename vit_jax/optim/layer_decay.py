"""A learning rate that falls with the distance from the head (BEiT, MAE): fine-tuning changes late layers most.

Distances are read off the names and shapes of the parameters, so the optimiser need not know the architecture.
"""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from vit_jax import pytree

_BLOCK = re.compile(r"encoder/blocks/.*")
_STAGE = re.compile(r"body/stage(\d+)/.*")


def scale_by_layer(layer_decay: float) -> optax.GradientTransformation:
    """Multiplies every update by `layer_decay ** layers_to_head`; keeps no state.

    Last in a chain it scales the complete step, weight decay included.
    """

    def scale(updates: optax.Updates, params: optax.Params | None) -> optax.Updates:
        del params
        distances = layers_to_head(updates)

        def leaf(name: str, update: jax.Array) -> jax.Array:
            return update * jnp.asarray(layer_decay ** distances[name], update.dtype)

        return pytree.map_with_names(leaf, updates)

    return optax.stateless(scale)


def layers_to_head(parameters: Any) -> dict[str, np.ndarray]:
    """The number of layers between each parameter and the head.

    * The head, the pooling and the norm before them: 0.
    * Block i of a transformer with L blocks, counted from 0: L - i.
    * What comes before the blocks (embedding, class token, positions, the ResNet of a hybrid): L + 1.
    * Stage s of a ResNet with S stages, counted from 1: S - s + 1; its root: S + 1. A stage is one step because its
      many units would otherwise leave the root of a deep ResNet with no learning rate at all.

    Args:
      parameters: a model, or a tree of its shape; arrays or their abstract shapes.

    Returns:
      By name, integers that broadcast against the leaf: a scalar, or (L, 1, ...) where blocks are stacked.

    Raises:
      ValueError: a parameter whose place in the network is not known.
    """
    leaves = pytree.named_leaves(parameters)
    num_blocks = max((leaf.shape[0] for name, leaf in leaves.items() if _BLOCK.fullmatch(name)), default=0)
    num_stages = max((int(match[1]) for name in leaves if (match := _STAGE.fullmatch(name))), default=0)
    rules = (
        (r"(head|pooling|encoder/norm|norm)/.*", np.zeros((), int)),
        (_BLOCK.pattern, num_blocks - np.arange(num_blocks)),
        (r"(embedding|class_token|positions|stem)(/.*)?", np.asarray(num_blocks + 1)),
        *((rf"body/stage{stage}/.*", np.asarray(num_stages - stage + 1)) for stage in range(1, num_stages + 1)),
        (r"body/root/.*", np.asarray(num_stages + 1)),
    )

    def distance(name: str, leaf: Any) -> np.ndarray:
        layers = pytree.first_match(rules, name)
        return layers.reshape(layers.shape + (1,) * (leaf.ndim - 1)) if layers.ndim else layers

    return {name: distance(name, leaf) for name, leaf in leaves.items()}
