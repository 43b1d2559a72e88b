"""Trees by path: names of leaves, ordered rules over names, differences of two trees.

A name is the path with "/" between its parts, without the `value` that Flax variables add at the end:
`blocks/attention/query/kernel`.
"""

import difflib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import jax

T = TypeVar("T")


def path_name(path: Sequence[Any]) -> str:
    """The name of a path as jax gives it."""
    name = jax.tree_util.keystr(tuple(path), simple=True, separator="/")
    return name.removesuffix("/value")


def named_leaves(tree: Any) -> dict[str, Any]:
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


def map_with_names(function: Callable[..., Any], tree: T, *rest: Any) -> T:
    """`jax.tree.map` whose function receives the leaf's name first."""
    return jax.tree_util.tree_map_with_path(lambda path, *leaves: function(path_name(path), *leaves), tree, *rest)


def first_match(rules: Iterable[tuple[str, T]], name: str) -> T:
    """The value of the first rule whose regular expression matches the whole name.

    Raises:
      ValueError: no rule matches: rules must cover every name.
    """
    for pattern, value in rules:
        if re.fullmatch(pattern, name):
            return value
    raise ValueError(f"No rule covers {name!r}; add one for it, or a final rule '.*' that covers the rest.")


def differences(expected: Mapping[str, Any], given: Mapping[str, Any]) -> list[str]:
    """One line for each name that only one side has or whose shapes differ, the nearest name offered."""
    missing, left = expected.keys() - given.keys(), given.keys() - expected.keys()
    lines = [f"missing: {name} {_shape(expected[name])}{_nearest(name, left)}" for name in missing]
    lines += [f"left over: {name} {_shape(given[name])}{_nearest(name, missing)}" for name in left]
    for name in expected.keys() & given.keys():
        if _shape(expected[name]) != _shape(given[name]):
            lines.append(f"shape: {name} is {_shape(given[name])}, the model has {_shape(expected[name])}")
    return sorted(lines)


def _nearest(name: str, others: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, sorted(others), n=1, cutoff=0.5)
    return f" (nearest: {near[0]})" if near else ""


def _shape(leaf: Any) -> tuple[int, ...]:
    return tuple(getattr(leaf, "shape", ()))
