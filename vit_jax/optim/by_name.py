"""Rules that match parameter names: which are trained, and the multipliers of their learning rates.

Patterns are those of file names, as in "encoder/*/bias"; "*" also matches "/".
"""

import dataclasses
import pathlib
import re
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax

from vit_jax import pytree
from vit_jax.config.network_options import LORA_FACTORS
from vit_jax.config.rules import count_last_blocks
from vit_jax.config.schema import OptimizerConfig
from vit_jax.text.nearest import closest

T = TypeVar("T")
_AFTER_BLOCKS = r"(head|pooling|pooled_norm|encoder/norm|norm)/.*"
_BLOCKS = "encoder/blocks/"


@dataclasses.dataclass(frozen=True)
class TrainedParameters:
    """The parameters that change in training, of a network that has frozen ones, too.

    Attributes:
      includes: returns whether the parameter of a name changes; of a parameter that is stacked over
        blocks, whether some of its layers do.
      num_last_blocks: number of blocks at the end that change; None: all of them.
      is_head_alone: nothing but the head changes.
    """

    includes: Callable[[str], bool]
    num_last_blocks: int | None = None
    is_head_alone: bool = False

    def select_layers(self, name: str, leaf: Any) -> Any:
        """Return the layers of a parameter that change, (N, ...) of (L, ...)."""
        if self.num_last_blocks is None or not name.startswith(_BLOCKS):
            return leaf
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return leaf.update(shape=(self.num_last_blocks, *leaf.shape[1:]))
        return leaf[-self.num_last_blocks :]


def find_trained(config: OptimizerConfig) -> TrainedParameters | None:
    """Return the parameters that change in training; None where all do."""
    num_last_blocks = count_last_blocks(config.trained)
    trains_all = config.trained == "all" and config.lora_rank is None
    if trains_all and not config.frozen:
        return None

    def includes(name: str) -> bool:
        if any(fnmatchcase(name, pattern) for pattern in config.frozen):
            return False
        if trains_all or name.startswith("head/"):
            return True
        if num_last_blocks is not None:
            return name.startswith(_BLOCKS) or re.fullmatch(_AFTER_BLOCKS, name) is not None
        return config.lora_rank is not None and name.endswith(LORA_FACTORS)

    return TrainedParameters(
        includes,
        num_last_blocks,
        is_head_alone=config.trained == "head",
    )


def select_trained(tree: object, trained: TrainedParameters | None) -> dict[str, jax.Array]:
    """Return the leaves of a network's tree that change in training, by name.

    All if `trained` is None; of stacked leaves the layers that change.
    """
    leaves = pytree.name_leaves(tree)
    if trained is None:
        return leaves

    selected = {}
    for name, leaf in leaves.items():
        if trained.includes(name):
            selected[name] = trained.select_layers(name, leaf)
    return selected


def count_trained_blocks(tree: object, trained: TrainedParameters | None) -> int | None:
    """Return the number of blocks at the end that have a backward pass; None: all layers have."""
    if trained is None:
        return None
    if trained.num_last_blocks is not None:
        return trained.num_last_blocks
    for name in select_trained(tree, trained):
        if re.fullmatch(_AFTER_BLOCKS, name) is None:
            return None
    return 0


def train_only(
    optimizer: optax.GradientTransformation, trained: TrainedParameters
) -> optax.GradientTransformation:
    """Run an optimiser on some parameters and leave every other as it is, to the bit.

    Subnormal numbers may become 0. The optimiser sees a dictionary of the trained parameters by
    name: it keeps no moments of frozen ones, and clips by the norm of the trained ones.
    """

    def init(params: optax.Params) -> optax.OptState:
        return optimizer.init(select_trained(params, trained))

    def update(
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None = None,
    ) -> tuple[optax.Updates, optax.OptState]:
        trained_gradients = select_trained(updates, trained)
        trained_params = None
        if params is not None:
            trained_params = select_trained(params, trained)
        trained_updates, state = optimizer.update(
            trained_gradients,
            state,
            trained_params,
        )

        def choose_update(name: str, gradient: jax.Array) -> jax.Array:
            unchanged = jnp.full_like(gradient, -0.0)  # adding it: -0.0 + 0.0 is 0.0
            if name not in trained_updates:
                return unchanged
            update = trained_updates[name]
            if update.shape == gradient.shape:
                return update
            return unchanged.at[-len(update) :].set(update)

        return pytree.map_with_names(choose_update, updates), state

    return optax.GradientTransformation(init, update)


def apply_updates(model: T, updates: T, trained: TrainedParameters | None) -> T:
    """Return the parameters after their updates. Blocks that are frozen are not read."""
    if trained is None or trained.num_last_blocks is None:
        return optax.apply_updates(model, updates)

    def add(name: str, parameter: jax.Array, update: jax.Array) -> jax.Array:
        update = trained.select_layers(name, update)
        if update.shape == parameter.shape:
            return parameter + update
        return parameter.at[-len(update) :].add(update)

    return pytree.map_with_names(add, model, updates)


def map_updates(function: Callable[..., jax.Array]) -> optax.GradientTransformation:
    """Return the transformation by a function (name, update, parameter) -> update."""

    def map_all(updates: optax.Updates, params: optax.Params | None) -> optax.Updates:
        return pytree.map_with_names(function, updates, params)

    return optax.stateless(map_all)


def scale_by_pattern(multipliers: Mapping[str, float]) -> optax.GradientTransformation:
    """Multiply every update by the factor of the first pattern that matches its name."""

    def find_factor(name: str) -> float:
        for pattern, factor in multipliers.items():
            if fnmatchcase(name, pattern):
                return factor
        return 1.0

    def scale(name: str, update: jax.Array) -> jax.Array:
        return update * jnp.asarray(find_factor(name), update.dtype)

    def scale_all(updates: optax.Updates, params: optax.Params | None) -> optax.Updates:
        return pytree.map_with_names(scale, updates)

    return optax.stateless(scale_all)


def scale_by_layer(layer_decay: float) -> optax.GradientTransformation:
    """Multiply every update by `layer_decay ** count_layers_to_head` (BEiT, MAE).

    Last in a chain it scales the complete step, weight decay included.
    """

    def scale_all(updates: optax.Updates, params: optax.Params | None) -> optax.Updates:
        layers_to_head = count_layers_to_head(updates)

        def scale(name: str, update: jax.Array) -> jax.Array:
            factor = layer_decay ** layers_to_head[name]
            return update * jnp.asarray(factor, update.dtype)

        return pytree.map_with_names(scale, updates)

    return optax.stateless(scale_all)


def count_layers_to_head(parameters: object) -> dict[str, np.ndarray]:
    """Return the number of layers between each parameter and the head, by name.

    * 0 for the head, the pooling and their norms;
    * L - i for block i of L, counted from 0; L + 1 for parameters before the blocks;
    * S - s + 1 for stage s of a ResNet with S stages, counted from 1; S + 1 for its root.

    Returns:
      Integers that broadcast against the leaf: a scalar, or (L, 1, ...) where blocks are stacked.

    Raises:
      ValueError: a parameter whose place in the network is not known.
    """
    leaves = pytree.name_leaves(parameters)
    rules = _list_distances(leaves)
    distances = {}
    for name, leaf in leaves.items():
        layers = pytree.find_first_match(rules, name)
        if layers.ndim:
            other_axes = (1,) * (leaf.ndim - 1)
            layers = layers.reshape(layers.shape + other_axes)
        distances[name] = layers
    return distances


def _list_distances(leaves: Mapping[str, jax.Array]) -> list[tuple[str, np.ndarray]]:
    """Return regular expressions of names, and layers to the head."""
    num_blocks = 0
    num_stages = 0
    for name, leaf in leaves.items():
        if name.startswith(_BLOCKS):
            num_blocks = max(num_blocks, leaf.shape[0])
        if match := re.match(r"body/stage(\d+)/", name):
            num_stages = max(num_stages, int(match[1]))

    before_blocks = r"(embedding|embedding_norm|class_token|register_tokens|positions|stem)(/.*)?"
    rules = [
        (_AFTER_BLOCKS, np.asarray(0)),
        (rf"{_BLOCKS}.*", num_blocks - np.arange(num_blocks)),
        (before_blocks, np.asarray(num_blocks + 1)),
        (r"body/root/.*", np.asarray(num_stages + 1)),
    ]
    for stage in range(1, num_stages + 1):
        rules.append((rf"body/stage{stage}/.*", np.asarray(num_stages - stage + 1)))
    return rules


def check_patterns(config: OptimizerConfig, parameters: object) -> None:
    """Check that every pattern matches a parameter, and that some parameters are trained.

    With LoRA, patterns must match trained parameters, and not freeze all factors.

    Raises:
      ValueError: a pattern matches none, or nothing is trained, or no factor of LoRA.
    """
    names = list(pytree.name_leaves(parameters))
    if config.lora_rank is not None:
        without_frozen = dataclasses.replace(config, frozen=())
        names = list(select_trained(parameters, find_trained(without_frozen)))
    _require_blocks(config, parameters)
    for pattern in config.frozen:
        _require_match("frozen", pattern, names)
    for pattern in config.learning_rate_multipliers:
        _require_match("learning_rate_multipliers", pattern, names)

    trained = find_trained(config)
    if trained is None:
        return
    trained_names = [name for name in names if trained.includes(name)]
    if trained_names:
        _require_factors(config, trained_names)
        return
    options = f"trained={config.trained!r}, frozen={config.frozen}"
    if config.lora_rank is not None:
        options += f", lora_rank={config.lora_rank}"
    raise ValueError(f"config.optimizer: {options} leaves no parameter of this model to train.")


def _require_factors(config: OptimizerConfig, trained_names: Sequence[str]) -> None:
    """Raise ValueError if LoRA is on and none of its factors is trained."""
    if config.lora_rank is None:
        return
    if any(name.endswith(LORA_FACTORS) for name in trained_names):
        return
    raise ValueError(
        f"config.optimizer.lora_rank={config.lora_rank}: has no effect with "
        f"optimizer.frozen={config.frozen}, which freezes all factors. Freeze fewer parameters, or "
        "use optimizer.trained='head'."
    )


def _require_blocks(config: OptimizerConfig, parameters: object) -> None:
    """Raise ValueError if the network has fewer blocks than a run trains."""
    num_last_blocks = count_last_blocks(config.trained)
    if num_last_blocks is None:
        return

    depth = 0
    for name, leaf in pytree.name_leaves(parameters).items():
        if name.startswith(_BLOCKS):
            depth = leaf.shape[0]
    if num_last_blocks > depth:
        rule = f"must have at most the {depth} blocks of the network"
        raise ValueError(f"config.optimizer.trained={config.trained!r}: {rule}. Use last:{depth}.")


def _require_match(field: str, pattern: str, names: Sequence[str]) -> None:
    """Raise ValueError, with the nearest names and folders, if a pattern matches no parameter."""
    if any(fnmatchcase(name, pattern) for name in names):
        return
    candidates = set(names)
    for name in names:
        parents = pathlib.PurePosixPath(name).parents
        candidates.update(f"{parent}/*" for parent in parents)
    candidates.discard("./*")

    nearest = ""
    near = closest(pattern, sorted(candidates), 3)
    if near:
        nearest = f" Nearest: {', '.join(map(repr, near))}."
    raise ValueError(
        f"config.optimizer.{field}: no parameter matches {pattern!r}.{nearest} The names: "
        f"{', '.join(names)}."
    )
