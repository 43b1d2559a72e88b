"""Optimisers that see the arrays of each layer, although a network stacks those of alike layers on a leading axis.

Optimisers that use shapes or norms (Muon, LAMB, Adafactor) must not see that axis. Their state is stored stacked.
"""

import operator
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from optax.contrib import MuonDimensionNumbers

_STACKED = re.compile(r"(?:encoder/blocks|body/stage\d+/rest)/")
_LAYER = re.compile(rf"({_STACKED.pattern})(\d+)/")


def per_layer(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """Return a transformation of parameters by name that shows `optimizer` one array per layer, and stacks its updates.

    `optimizer` sees "encoder/blocks/3/mlp/expand/kernel" (D, M) instead of "encoder/blocks/mlp/expand/kernel" (L, D,
    M).
    """

    def init(params: optax.Params) -> optax.OptState:
        return _stack(optimizer.init(_unstack(params)))

    def update(
        updates: optax.Updates, state: optax.OptState, params: optax.Params | None = None
    ) -> tuple:
        layers = {name: len(update) for name, update in updates.items() if is_stacked(name)}
        state = jax.tree.map(
            lambda node: _split(node, layers) if isinstance(node, dict) else node,
            state,
            is_leaf=lambda node: isinstance(node, dict) and not layers.keys().isdisjoint(node),
        )
        updates, state = optimizer.update(
            _unstack(updates), state, None if params is None else _unstack(params)
        )
        return _stack(updates), _stack(state)

    return optax.GradientTransformation(init, update)


def describe_matrices(params: Mapping[str, jax.Array]) -> dict[str, MuonDimensionNumbers | None]:
    """Return the dimensions that make each kernel a matrix for Muon, by name; None for other parameters.

    The last dimension is the output: (patch height x patch width x C, D) for the embedding. Muon trains all kernels, as
    optax does with arrays of two dimensions, and Adam the biases, norms, tokens and positions.
    """

    def matrix(name: str, leaf: jax.Array) -> MuonDimensionNumbers | None:
        is_kernel = name.endswith("kernel") and leaf.ndim > 1
        return (
            MuonDimensionNumbers(tuple(range(leaf.ndim - 1)), leaf.ndim - 1) if is_kernel else None
        )

    return {name: matrix(name, leaf) for name, leaf in params.items()}


def is_stacked(name: str) -> bool:
    """Return whether the array of this name has a leading layer axis."""
    return _STACKED.match(name) is not None


def _unstack(leaves: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """Return the arrays by name, one per layer."""
    return _split(leaves, {name: len(leaf) for name, leaf in leaves.items() if is_stacked(name)})


def _split(entries: Mapping[str, Any], layers: Mapping[str, int]) -> dict[str, Any]:
    """Return the entries, those named in `layers` (number of layers by name) split into one per layer."""
    split: dict[str, Any] = {}
    for name, entry in entries.items():
        if name not in layers:
            split[name] = entry
            continue
        prefix = name[: _STACKED.match(name).end()]  # type: ignore[union-attr]
        for i in range(layers[name]):
            split[f"{prefix}{i}/{name.removeprefix(prefix)}"] = jax.tree.map(
                operator.itemgetter(i), entry
            )
    return split


def _stack(state: Any) -> Any:
    """Return the state with the entries of alike layers stacked, in every dictionary by parameter name.

    Entries that differ in structure, shape or dtype between layers stay as they are.
    """

    def stack(node: Any) -> Any:
        if not isinstance(node, dict):
            return node
        stacked: dict[str, Any] = {}
        stacks: dict[str, list[tuple[int, str]]] = {}
        for name, entry in node.items():
            if layer := _LAYER.match(name) if isinstance(name, str) else None:
                stacks.setdefault(layer[1] + name[layer.end() :], []).append((int(layer[2]), name))
            else:
                stacked[name] = entry
        for name, layers in stacks.items():
            entries = [node[layer] for _, layer in sorted(layers)]
            if _are_alike(entries):
                stacked[name] = jax.tree.map(lambda *leaves: jnp.stack(leaves), *entries)
            else:
                stacked |= {layer: node[layer] for _, layer in layers}
        return stacked

    def has_layers(node: Any) -> bool:
        return isinstance(node, dict) and any(
            isinstance(name, str) and _LAYER.match(name) for name in node
        )

    return jax.tree.map(stack, state, is_leaf=has_layers)


def _are_alike(entries: Sequence[Any]) -> bool:
    kinds = [
        jax.tree.map(lambda leaf: (jnp.shape(leaf), jnp.result_type(leaf)), entry)
        for entry in entries
    ]
    return all(kind == kinds[0] for kind in kinds)
