"""Rules that match parameter names: which are trained, and the multipliers of their learning rates.

Patterns are those of file names, as in "encoder/*/bias"; "*" also matches "/".
"""

import dataclasses
import pathlib
import re
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from vit_jax import pytree
from vit_jax.config.network_options import LORA_FACTORS
from vit_jax.config.schema import OptimizerConfig
from vit_jax.text.nearest import closest


def make_is_trained(config: OptimizerConfig) -> Callable[[str], bool] | None:
    """Return whether the parameter of a name changes in training; None where all do."""
    if config.trained == "head":
        return lambda name: name.startswith("head/")
    if config.lora_rank is None and not config.frozen:
        return None

    def is_trained(name: str) -> bool:
        is_adapted = (
            config.lora_rank is None or name.startswith("head/") or name.endswith(LORA_FACTORS)
        )
        return is_adapted and not any(fnmatchcase(name, pattern) for pattern in config.frozen)

    return is_trained


def trained_leaves(tree: Any, is_trained: Callable[[str], bool] | None) -> dict[str, Any]:
    """Return the leaves of a network's tree that change in training, by name; all if `is_trained` is None."""
    return {
        name: leaf
        for name, leaf in pytree.named_leaves(tree).items()
        if is_trained is None or is_trained(name)
    }


def train_only(
    optimizer: optax.GradientTransformation, is_trained: Callable[[str], bool]
) -> optax.GradientTransformation:
    """Run an optimiser on some parameters and leave every other as it is, to the bit (subnormal numbers may become 0).

    The optimiser sees a dictionary of the trained parameters by name: it keeps no moments of frozen ones, and clips by
    the norm of the trained ones.
    """

    def init(params: optax.Params) -> optax.OptState:
        return optimizer.init(trained_leaves(params, is_trained))

    def update(
        updates: optax.Updates, state: optax.OptState, params: optax.Params | None = None
    ) -> tuple:
        trained, state = optimizer.update(
            trained_leaves(updates, is_trained),
            state,
            None if params is None else trained_leaves(params, is_trained),
        )

        def leaf(name: str, gradient: jax.Array) -> jax.Array:
            # -0.0 is what changes nothing when added: -0.0 + 0.0 is 0.0.
            return trained[name] if name in trained else jnp.full_like(gradient, -0.0)

        return pytree.map_with_names(leaf, updates), state

    return optax.GradientTransformation(init, update)


def scale_by_pattern(multipliers: Mapping[str, float]) -> optax.GradientTransformation:
    """Multiply every update by the factor of the first pattern that matches its name."""

    def factor(name: str) -> float:
        return next(
            (factor for pattern, factor in multipliers.items() if fnmatchcase(name, pattern)), 1.0
        )

    return _scale(lambda updates: {name: factor(name) for name in pytree.named_leaves(updates)})


def scale_by_layer(layer_decay: float) -> optax.GradientTransformation:
    """Multiply every update by `layer_decay ** layers_to_head` (BEiT, MAE): fine-tuning changes late layers most.

    Last in a chain it scales the complete step, weight decay included.
    """
    return _scale(
        lambda updates: {
            name: layer_decay**layers for name, layers in layers_to_head(updates).items()
        }
    )


def _scale(factors_of: Callable[[Any], Mapping[str, Any]]) -> optax.GradientTransformation:
    def scale(updates: optax.Updates, params: optax.Params | None) -> optax.Updates:
        del params
        factors = factors_of(updates)
        return pytree.map_with_names(
            lambda name, x: x * jnp.asarray(factors[name], x.dtype), updates
        )

    return optax.stateless(scale)


def layers_to_head(parameters: Any) -> dict[str, np.ndarray]:
    """Return the number of layers between each parameter and the head, by name.

    0 for the head, the pooling and their norms; L - i for block i of L, counted from 0; L + 1 for what comes before the
    blocks. S - s + 1 for stage s of a ResNet with S stages, counted from 1; S + 1 for its root.

    Returns:
      Integers that broadcast against the leaf: a scalar, or (L, 1, ...) where blocks are stacked.

    Raises:
      ValueError: a parameter whose place in the network is not known.
    """
    leaves = pytree.named_leaves(parameters)
    num_blocks = max(
        (leaf.shape[0] for name, leaf in leaves.items() if name.startswith("encoder/blocks/")),
        default=0,
    )
    num_stages = max(
        (int(match[1]) for name in leaves if (match := re.match(r"body/stage(\d+)/", name))),
        default=0,
    )
    rules = (
        (r"(head|pooling|pooled_norm|encoder/norm|norm)/.*", np.zeros((), int)),
        (r"encoder/blocks/.*", num_blocks - np.arange(num_blocks)),
        (
            r"(embedding|embedding_norm|class_token|register_tokens|positions|stem)(/.*)?",
            np.asarray(num_blocks + 1),
        ),
        *(
            (rf"body/stage{stage}/.*", np.asarray(num_stages - stage + 1))
            for stage in range(1, num_stages + 1)
        ),
        (r"body/root/.*", np.asarray(num_stages + 1)),
    )

    def distance(name: str, leaf: Any) -> np.ndarray:
        layers = pytree.first_match(rules, name)
        return layers.reshape(layers.shape + (1,) * (leaf.ndim - 1)) if layers.ndim else layers

    return {name: distance(name, leaf) for name, leaf in leaves.items()}


def check_patterns(config: OptimizerConfig, parameters: Any) -> None:
    """Check that every pattern matches a parameter, with LoRA a trained one, and that some parameters are trained.

    Raises:
      ValueError: a pattern matches none, or nothing is trained.
    """
    names = list(pytree.named_leaves(parameters))
    if config.lora_rank is not None:
        names = [
            *trained_leaves(parameters, make_is_trained(dataclasses.replace(config, frozen=())))
        ]
    fields = {
        "frozen": config.frozen,
        "learning_rate_multipliers": tuple(config.learning_rate_multipliers),
    }
    for field, patterns in fields.items():
        for pattern in patterns:
            if not any(fnmatchcase(name, pattern) for name in names):
                folders = {
                    f"{parent}/*"
                    for name in names
                    for parent in pathlib.PurePosixPath(name).parents
                }
                near = closest(pattern, sorted({*names, *folders} - {"./*"}), 3)
                nearest = f" Nearest: {', '.join(map(repr, near))}." if near else ""
                reason = (
                    f"no parameter matches {pattern!r}.{nearest} The names: {', '.join(names)}."
                )
                raise ValueError(f"config.optimizer.{field}: {reason}")
    is_trained = make_is_trained(config)
    if is_trained is not None and not any(map(is_trained, names)):
        rank = "" if config.lora_rank is None else f", lora_rank={config.lora_rank}"
        options = f"trained={config.trained!r}, frozen={config.frozen}{rank}"
        raise ValueError(f"config.optimizer: {options} leaves no parameter of this model to train.")
