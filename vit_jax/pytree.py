"""Trees by path: names of leaves, ordered rules over names, differences of two trees.

A name is the path with "/" between its parts, without the `value` that Flax variables add at the end:
`blocks/attention/query/kernel`.
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


def path_name(path: Sequence[object]) -> str:
    """The name of a path as jax gives it."""
    name = jax.tree_util.keystr(tuple(path), simple=True, separator="/")
    return name.removesuffix("/value")


def named_leaves(tree: object) -> dict[str, Any]:
    """Leaves by name, in the order of the tree.

    Raises:
      ValueError: two leaves have the same name.
    """
    paths = jax.tree_util.tree_flatten_with_path(tree)[0]
    named = {path_name(path): leaf for path, leaf in paths}
    if len(named) != len(paths):
        raise ValueError("Two leaves of this tree have the same name; names must be unique.")
    return named


def from_named_leaves(template: T, leaves: Mapping[str, Any]) -> T:
    """The template's tree with its leaves replaced by those of the same names.

    Raises:
      KeyError: a name of the template is missing.
    """
    names = [path_name(path) for path, _ in jax.tree_util.tree_flatten_with_path(template)[0]]
    return jax.tree.unflatten(jax.tree.structure(template), [leaves[name] for name in names])


def map_with_names(function: Callable[..., Any], tree: T, *rest: object) -> T:
    """`jax.tree.map` whose function receives the leaf's name first."""
    return jax.tree_util.tree_map_with_path(
        lambda path, *leaves: function(path_name(path), *leaves), tree, *rest
    )


def first_match(rules: Iterable[tuple[str, T]], name: str) -> T:
    """The value of the first rule whose regular expression matches the full name.

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
    """Return one line for each name that only one side has or whose shapes differ, with the nearest name."""
    missing = expected.keys() - actual.keys()
    left = actual.keys() - expected.keys()
    lines = [
        f"missing: {name} {_shape(expected[name])}{near}"
        for name, near in _with_nearest(missing, left)
    ]
    lines += [
        f"left over: {name} {_shape(actual[name])}{near}"
        for name, near in _with_nearest(left, missing)
    ]
    for name in expected.keys() & actual.keys():
        if _shape(expected[name]) != _shape(actual[name]):
            lines.append(
                f"shape: {name} is {_shape(actual[name])}, the model has {_shape(expected[name])}"
            )
    return sorted(lines)


def listed(lines: Sequence[str], most: int = 30) -> str:
    """The first lines, each indented on one of its own, and the number of the others: the end of a message."""
    more = [f"and {len(lines) - most:,} more"] if len(lines) > most else []
    return "".join(f"\n  {line}" for line in [*lines[:most], *more])


def _with_nearest(names: Iterable[str], others: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Each name, and in words the nearest of the others; the names of all layers of one kind are compared once."""
    kinds: dict[str, list[str]] = {}
    for other in sorted(others):
        kinds.setdefault(_kind(other), []).append(other)
    nearest_kind = functools.cache(lambda kind: closest(kind, kinds, cutoff=0.5))
    for name in names:
        near = [other for kind in nearest_kind(_kind(name)) for other in kinds[kind]]
        same_layer = [other for other in near if _NUMBER.findall(other) == _NUMBER.findall(name)]
        yield name, f" (nearest: {(same_layer or near)[0]})" if near else ""


def _kind(name: str) -> str:
    return _NUMBER.sub("#", name)


def _shape(leaf: object) -> tuple[int, ...]:
    return tuple(getattr(leaf, "shape", ()))


def parameters_sha256(model: object) -> str:
    """Return the SHA-256 of the float32 bytes of all parameters in the order of their names."""
    digest = hashlib.sha256()
    for _, leaf in sorted(named_leaves(model).items()):
        is_spread = isinstance(leaf, jax.Array) and jax.process_count() > 1
        full = (
            multihost_utils.process_allgather(leaf, tiled=True)
            if is_spread
            else jax.device_get(leaf)
        )
        digest.update(np.ascontiguousarray(full, dtype=np.float32).tobytes())
    return digest.hexdigest()
