"""Trees by path: names of leaves, ordered rules over names, differences of two trees.

A name is the path with "/" between its parts, without the `value` that Flax variables add at the
end: `blocks/attention/query/kernel`.
"""

import functools
import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from vit_jax.text.nearest import closest

T = TypeVar("T")
_NUMBER = re.compile(r"\d+")


def build_path_name(path: Sequence[object]) -> str:
    """Return the name of a path of jax."""
    name = jax.tree_util.keystr(tuple(path), simple=True, separator="/")
    return name.removesuffix("/value")


def name_leaves(tree: object) -> dict[str, Any]:
    """Return the leaves by name, in the order of the tree.

    Raises:
      ValueError: two leaves have the same name.
    """
    named_leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    leaves = {}
    for path, leaf in named_leaves:
        name = build_path_name(path)
        if name in leaves:
            raise ValueError("Two leaves of this tree have the same name; names must be unique.")
        leaves[name] = leaf
    return leaves


def from_named_leaves(template: T, leaves: Mapping[str, Any]) -> T:
    """Return the tree of a template with the leaves of these names.

    Raises:
      KeyError: a name of the template is missing.
    """
    named_leaves, structure = jax.tree_util.tree_flatten_with_path(template)
    ordered = []
    for path, _ in named_leaves:
        name = build_path_name(path)
        ordered.append(leaves[name])
    return jax.tree.unflatten(structure, ordered)


def map_with_names(function: Callable[..., Any], tree: T, *rest: object) -> T:
    """Return `jax.tree.map` of a function that receives the leaf's name first."""

    def call(path: Sequence[object], *leaves: object) -> Any:
        return function(build_path_name(path), *leaves)

    return jax.tree_util.tree_map_with_path(call, tree, *rest)


def find_first_match(rules: Iterable[tuple[str, T]], name: str) -> T:
    """Return the value of the first rule whose regular expression matches the full name.

    Raises:
      ValueError: no rule matches: rules must cover every name.
    """
    for pattern, value in rules:
        if re.fullmatch(pattern, name):
            return value
    raise ValueError(
        f"No rule covers {name!r}; add one for it, or a final rule '.*' that covers the rest."
    )


def differences(expected: Mapping[str, object], actual: Mapping[str, object]) -> list[str]:
    """Return a line for each name that only one side has, or whose shapes differ.

    A line of a missing name has the nearest name of the other side.
    """
    missing = expected.keys() - actual.keys()
    surplus = actual.keys() - expected.keys()
    lines = []
    for name, hint in _find_nearest(missing, surplus):
        lines.append(f"missing: {name} {_get_shape(expected[name])}{hint}")
    for name, hint in _find_nearest(surplus, missing):
        lines.append(f"left over: {name} {_get_shape(actual[name])}{hint}")
    for name in expected.keys() & actual.keys():
        expected_shape = _get_shape(expected[name])
        shape = _get_shape(actual[name])
        if shape != expected_shape:
            lines.append(f"shape: {name} is {shape}, the model has {expected_shape}")
    return sorted(lines)


def list_lines(lines: Sequence[str], most: int = 30) -> str:
    """Return the end of a message: the first lines, indented, and the number of the others."""
    shown = list(lines[:most])
    if len(lines) > most:
        shown.append(f"and {len(lines) - most:,} more")
    return "".join(f"\n  {line}" for line in shown)


def _find_nearest(names: Iterable[str], others: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield each name with a hint that states the nearest of the others, or an empty hint.

    Names of all layers that differ in their numbers only are compared once.
    """
    kinds: dict[str, list[str]] = {}
    for other in sorted(others):
        members = kinds.setdefault(_get_kind(other), [])
        members.append(other)

    @functools.cache
    def find_similar(kind: str) -> list[str]:
        """Return the names of the kind that is spelled most similarly."""
        for similar_kind in closest(kind, kinds, cutoff=0.5):
            return kinds[similar_kind]
        return []

    for name in names:
        similar = find_similar(_get_kind(name))
        if not similar:
            yield name, ""
            continue
        nearest = similar[0]
        for other in similar:
            if _NUMBER.findall(other) == _NUMBER.findall(name):
                nearest = other
                break
        yield name, f" (nearest: {nearest})"


def _get_kind(name: str) -> str:
    """Return the name with a sign for each number."""
    return _NUMBER.sub("#", name)


def _get_shape(leaf: object) -> tuple[int, ...]:
    """Return the shape of an array; () for other leaves."""
    return tuple(getattr(leaf, "shape", ()))


def parameters_sha256(model: object) -> str:
    """Return the SHA-256 of the float32 bytes of all parameters in the order of their names."""
    digest = hashlib.sha256()
    for _, leaf in sorted(name_leaves(model).items()):
        if isinstance(leaf, jax.Array) and jax.process_count() > 1:
            full = multihost_utils.process_allgather(leaf, tiled=True)
        else:
            full = jax.device_get(leaf)
        values = np.ascontiguousarray(full, dtype=np.float32)
        digest.update(values.tobytes())
    return digest.hexdigest()
