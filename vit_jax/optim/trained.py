"""Which parameters an optimiser changes: all, or those of the head alone, as in a linear probe of frozen features."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from vit_jax import pytree

HEAD = "head/"


def trained_part(tree: Any, trained: str) -> Any:
    """What of a tree like the parameters belongs to parameters that change.

    A step that uses only this part of its gradients lets the compiler drop the backward pass of all the rest.

    Args:
      tree: a model, or a tree of its shape.
      trained: "all" or "head".

    Returns:
      The tree itself, or a dictionary of the head's leaves by name.

    Raises:
      ValueError: the head is asked for, but the tree has none.
    """
    if trained == "all":
        return tree
    head = {name: leaf for name, leaf in pytree.named_leaves(tree).items() if name.startswith(HEAD)}
    if not head:
        raise ValueError(f"optimizer.trained='head': this model has no parameter under {HEAD}; use trained='all'.")
    return head


def train_head_only(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """Runs an optimiser on the head and leaves every other parameter as it is, to the bit.

    (All but subnormal numbers, below 1e-38: adding anything to them makes them 0 on many devices.)

    The optimiser sees a dictionary that holds the head and nothing else. So it keeps no moments of frozen parameters
    (with Adam and ViT-L/16 these would be 2.4 GB of zeros), and a norm to clip by is the norm of the head's gradients.
    A mask of optax would put placeholders into the tree, which a module need not accept.
    """

    def init(params: optax.Params) -> optax.OptState:
        return optimizer.init(trained_part(params, "head"))

    def update(updates: optax.Updates, state: optax.OptState, params: optax.Params | None = None) -> tuple:
        parameters = None if params is None else trained_part(params, "head")
        head, state = optimizer.update(trained_part(updates, "head"), state, parameters)

        def leaf(name: str, gradient: jax.Array) -> jax.Array:
            # -0.0 is what changes nothing when added: -0.0 + 0.0 is 0.0.
            return head[name] if name in head else jnp.full_like(gradient, -0.0)

        return pytree.map_with_names(leaf, updates), state

    return optax.GradientTransformation(init, update)
