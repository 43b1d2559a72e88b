"""Optimisers that see the arrays of each layer, although a network stacks alike layers.

Optimisers that use shapes or norms (Muon, LAMB, Adafactor) must not see that axis. Their state is
stored stacked.
"""

import operator
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from optax.contrib import MuonDimensionNumbers

from vit_jax.optim.by_name import TrainedParameters, train_only
from vit_jax.optim.moment_dtypes import allow_mixed_dtypes

_STACKED = re.compile(r"(?:encoder/blocks|body/stage\d+/rest)/")
_LAYER = re.compile(rf"({_STACKED.pattern})(\d+)/")


def per_layer(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """Return a transformation of parameters by name that shows `optimizer` one array per layer.

    `optimizer` sees "encoder/blocks/3/mlp/expand/kernel" (D, M) instead of
    "encoder/blocks/mlp/expand/kernel" (L, D, M). Its updates and its state are stacked again.
    """

    def init(params: optax.Params) -> optax.OptState:
        return _stack(optimizer.init(_unstack(params)))

    def update(
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None = None,
    ) -> tuple[optax.Updates, optax.OptState]:
        layer_updates = _unstack(updates)
        layer_state = _unstack_state(state, _count_layers(updates))
        layer_params = None
        if params is not None:
            layer_params = _unstack(params)

        layer_updates, layer_state = optimizer.update(
            layer_updates,
            layer_state,
            layer_params,
        )
        return _stack(layer_updates), _stack(layer_state)

    return optax.GradientTransformation(init, update)


def adapt_optimizer(
    optimizer: optax.GradientTransformation, trained: TrainedParameters | None = None
) -> optax.GradientTransformation:
    """Return an optimiser that sees the trained parameters by name and layer (`per_layer`).

    They are a dictionary, because transformations that mask put placeholders into the tree, which a
    module need not accept.
    """
    if trained is None:
        trained = TrainedParameters(lambda name: True)
    return train_only(allow_mixed_dtypes(per_layer(optimizer)), trained)


def describe_matrices(params: Mapping[str, jax.Array]) -> dict[str, MuonDimensionNumbers | None]:
    """Return the dimensions that make each kernel a matrix for Muon, by name.

    Return None for other parameters.

    The last dimension is the output: (patch height x patch width x C, D) for the embedding. Muon
    trains all kernels, as optax does with arrays of two dimensions, and Adam the biases, norms,
    tokens and positions.
    """
    matrices: dict[str, MuonDimensionNumbers | None] = {}
    for name, leaf in params.items():
        matrices[name] = None
        if name.endswith("kernel") and leaf.ndim > 1:
            last = leaf.ndim - 1
            inputs = tuple(range(last))
            matrices[name] = MuonDimensionNumbers(inputs, last)

    return matrices


def is_stacked(name: str) -> bool:
    """Return whether the array of this name has a leading layer axis."""
    return _STACKED.match(name) is not None


def list_axes_within_layer(name: str, ndim: int) -> tuple[int, ...]:
    """Return the axes of one layer in the array of this name: not the axis of stacked layers."""
    first_axis = 1 if is_stacked(name) else 0
    return tuple(range(first_axis, ndim))


def _count_layers(leaves: Mapping[str, jax.Array]) -> dict[str, int]:
    """Return the number of layers of each stacked array."""
    return {name: len(leaf) for name, leaf in leaves.items() if is_stacked(name)}


def _unstack(leaves: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """Return the arrays by name, one per layer."""
    return _split(leaves, _count_layers(leaves))


def _unstack_state(state: optax.OptState, layers: Mapping[str, int]) -> optax.OptState:
    """Return the state with one entry per layer, in every dictionary by parameter name."""

    def has_stacked_entries(node: object) -> bool:
        return isinstance(node, dict) and not layers.keys().isdisjoint(node)

    def split_if_dictionary(node: object) -> Any:
        if not isinstance(node, dict):
            return node
        return _split(node, layers)

    return jax.tree.map(
        split_if_dictionary,
        state,
        is_leaf=has_stacked_entries,
    )


def _split(entries: Mapping[str, Any], layers: Mapping[str, int]) -> dict[str, Any]:
    """Return the entries; those named in `layers` are split into that many."""
    split: dict[str, Any] = {}
    for name, entry in entries.items():
        if name not in layers:
            split[name] = entry
            continue

        match = _STACKED.match(name)
        assert match is not None
        folder = match[0]
        rest = name[match.end() :]
        for i in range(layers[name]):
            layer_entry = jax.tree.map(operator.itemgetter(i), entry)
            split[f"{folder}{i}/{rest}"] = layer_entry

    return split


def _stack(state: Any) -> Any:
    """Return the state with stacked entries of alike layers in dictionaries by parameter.

    Entries that differ in structure, shape or dtype between layers stay as they are.
    """

    def stack_if_dictionary(node: object) -> Any:
        if not isinstance(node, dict):
            return node
        return _stack_entries(node)

    def has_layers(node: object) -> bool:
        return isinstance(node, dict) and any(map(_match_layer, node))

    return jax.tree.map(
        stack_if_dictionary,
        state,
        is_leaf=has_layers,
    )


def _stack_entries(entries: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return the entries of a dictionary by parameter, those of alike layers stacked."""
    stacked: dict[Any, Any] = {}
    layers_by_name: dict[str, dict[int, str]] = {}  # number and name of each layer, by stacked name
    for name, entry in entries.items():
        match = _match_layer(name)
        if match is None:
            stacked[name] = entry
            continue

        number = int(match[2])
        stacked_name = match[1] + name[match.end() :]
        names_by_number = layers_by_name.setdefault(stacked_name, {})
        names_by_number[number] = name

    for stacked_name, names_by_number in layers_by_name.items():
        names = []
        layers = []
        for number in sorted(names_by_number):
            name = names_by_number[number]
            names.append(name)
            layers.append(entries[name])

        if _are_alike(layers):
            stacked[stacked_name] = jax.tree.map(_stack_leaves, *layers)
        else:
            stacked.update(zip(names, layers, strict=True))

    return stacked


def _stack_leaves(*leaves: jax.Array) -> jax.Array:
    return jnp.stack(leaves)


def _match_layer(name: object) -> re.Match[str] | None:
    """Return the match of the name of an entry of one layer; None for any other key."""
    if not isinstance(name, str):
        return None
    return _LAYER.match(name)


def _are_alike(entries: Sequence[object]) -> bool:
    """Return whether all entries have the same structure, shapes and dtypes."""
    first, *others = map(_describe_leaves, entries)
    return all(other == first for other in others)


def _describe_leaves(entry: object) -> object:
    """Return the shape and dtype of each leaf, in the structure of the entry."""

    def describe(leaf: Any) -> tuple[tuple[int, ...], Any]:
        return jnp.shape(leaf), jnp.result_type(leaf)

    return jax.tree.map(describe, entry)
