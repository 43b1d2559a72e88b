"""Which parameters an optimiser changes: all, those of the head alone (a linear probe), or all but frozen ones."""

import fnmatch
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from vit_jax import pytree
from vit_jax.config.schema import OptimizerConfig

HEAD = "head/"


def match(pattern: str, name: str) -> bool:
    """Whether a pattern as of file names ("encoder/*/bias"; "*" also matches "/") matches the name of a parameter."""
    return fnmatch.fnmatchcase(name, pattern)


def make_is_trained(config: OptimizerConfig) -> Callable[[str], bool] | None:
    """Whether the parameter of a name changes in training; None where all do."""
    if config.trained == "head":
        return lambda name: name.startswith(HEAD)
    if config.frozen:
        return lambda name: not any(match(pattern, name) for pattern in config.frozen)
    return None


def train_only(
    optimizer: optax.GradientTransformation, is_trained: Callable[[str], bool]
) -> optax.GradientTransformation:
    """Runs an optimiser on some parameters and leaves every other as it is, to the bit.

    (All but subnormal numbers, below 1e-38: adding anything to them makes them 0 on many devices.)

    The optimiser sees a dictionary of the trained parameters by name. So it keeps no moments of frozen ones (with Adam
    and a linear probe of ViT-L/16 these would be 2.4 GB of zeros), and a norm to clip by is the norm of the trained
    ones' gradients. The compiler drops the unused part of the backward pass.
    """

    def trained_part(tree: Any) -> dict[str, Any]:
        return {name: leaf for name, leaf in pytree.named_leaves(tree).items() if is_trained(name)}

    def init(params: optax.Params) -> optax.OptState:
        return optimizer.init(trained_part(params))

    def update(updates: optax.Updates, state: optax.OptState, params: optax.Params | None = None) -> tuple:
        trained, state = optimizer.update(
            trained_part(updates), state, None if params is None else trained_part(params)
        )

        def leaf(name: str, gradient: jax.Array) -> jax.Array:
            # -0.0 is what changes nothing when added: -0.0 + 0.0 is 0.0.
            return trained[name] if name in trained else jnp.full_like(gradient, -0.0)

        return pytree.map_with_names(leaf, updates), state

    return optax.GradientTransformation(init, update)
