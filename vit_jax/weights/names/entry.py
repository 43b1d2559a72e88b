"""Rules for names and layouts of a format, and the arrays of a file that follow from them.

Reading and writing both follow from the entries made of the rules, so neither can drift from the
other.
"""

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from vit_jax.weights.names.ours import Shape, stacked_name

QKV = ("query", "key", "value")
STACKED = "stacked"  # a layout: all layers in one array, on a new leading axis


class Rule(NamedTuple):
    r"""Foreign name of the parameters whose full name `pattern` matches.

    Attributes:
      pattern: regular expression over names with layers taken apart.
      name: with \1, \2 for the groups of the pattern, or a function of the match.
      layout: our axes, an arrow, the file's axes: "DTh->(Th)D" merges two axes and moves the first
        to the end, 1 is a new axis of that length. Empty: the same. Parameters with the same
        foreign name are joined along its first axis.
    """

    pattern: str
    name: str | Callable[[re.Match[str]], str]
    layout: str = ""


@dataclasses.dataclass(frozen=True)
class Entry:
    """An array of a file in another format."""

    name: str  # there
    ours: tuple[
        str, ...
    ]  # the parameters that it holds, in their order along its first axis, layers taken apart
    layout: str  # as in `Rule`
    parameter_shape: Shape  # of one of `ours`; all have the same

    @property
    def shape(self) -> Shape:
        """Shape of the array in the file."""
        piece = self._piece()
        return (len(self.ours) * piece[0], *piece[1:]) if len(self.ours) > 1 else piece

    def read(self, array: np.ndarray) -> dict[str, np.ndarray]:
        """Return our parameters from the array of the file."""
        order, _ = _parse(self.layout, len(self.parameter_shape))
        permuted = [self.parameter_shape[axis] for axis in order]
        pieces = np.split(array, len(self.ours)) if len(self.ours) > 1 else [array]
        ours = [piece.reshape(permuted).transpose(np.argsort(order)) for piece in pieces]
        return {name: np.ascontiguousarray(one) for name, one in zip(self.ours, ours, strict=True)}

    def write(self, parameters: Mapping[str, np.ndarray]) -> np.ndarray:
        """Return the array of the file from our parameters."""
        order, _ = _parse(self.layout, len(self.parameter_shape))
        pieces = [parameters[name].transpose(order).reshape(self._piece()) for name in self.ours]
        return np.ascontiguousarray(np.concatenate(pieces) if len(pieces) > 1 else pieces[0])

    def status(self, *, reading: bool) -> str:
        """Return how the array is changed on its way into or out of our parameters."""
        order, _ = _parse(self.layout, len(self.parameter_shape))
        words = []
        if self.layout != STACKED and len(self.ours) > 1:
            words.append("split" if reading else "joined")
        if list(order) != sorted(order):
            words.append("transposed")
        elif self.layout != STACKED and self._piece() != self.parameter_shape:
            words.append("reshaped")
        if self.layout != STACKED and stacked_name(self.ours[0])[1] is not None:
            words.append("stacked" if reading else "unstacked")
        return ", ".join(words) or "copied"

    def _piece(self) -> Shape:
        _, groups = _parse(self.layout, len(self.parameter_shape))
        return tuple(math.prod(self.parameter_shape[axis] for axis in group) for group in groups)


def with_shape(entries: Sequence[Entry], name: str, shape: Shape) -> list[Entry]:
    """Return the entries with another shape of one of our parameters, which has an array of its own."""
    return [
        dataclasses.replace(entry, parameter_shape=shape) if entry.ours == (name,) else entry
        for entry in entries
    ]


def make_entries(rules: Sequence[Rule], shapes: Mapping[str, Shape]) -> list[Entry]:
    """Return the arrays of a file that holds the parameters of `shapes`, ours taken apart, which have elements.

    Raises:
      ValueError: parameters have no name in the format; all are listed.
    """
    groups: dict[str, list[str]] = {}
    layouts: dict[str, str] = {}
    nameless = []
    for name, shape in shapes.items():
        if not math.prod(shape):
            continue
        rule = _find_rule(rules, name)
        foreign = name_of(rules, name)
        if rule is None or not foreign:
            nameless.append(stacked_name(name)[0])
            continue
        groups.setdefault(foreign, []).append(name)
        layouts[foreign] = rule.layout
    if nameless:
        raise ValueError(f"it has no name for {', '.join(dict.fromkeys(nameless))}")

    entries = []
    for foreign, names in groups.items():
        ordered = tuple(sorted(names, key=_place_in_projection))
        entries.append(Entry(foreign, ordered, layouts[foreign], shapes[names[0]]))
    return entries


def _find_rule(rules: Sequence[Rule], ours: str) -> Rule | None:
    """Return the first rule that matches a parameter."""
    for rule in rules:
        if re.fullmatch(rule.pattern, ours):
            return rule
    return None


def name_of(rules: Sequence[Rule], ours: str) -> str:
    """Return the name of a parameter by the first rule that matches, layers taken apart; "" if there is none."""
    for rule in rules:
        if match := re.fullmatch(rule.pattern, ours):
            if isinstance(rule.name, str):
                return match.expand(rule.name)
            return rule.name(match)
    return ""


def _place_in_projection(name: str) -> int:
    """Return a number to sort parts of a projection by: query, key, value; gate, expand; others keep their order."""
    layers = ("/query/", "/key/", "/value/", "/gate/", "/expand/")
    for place, layer in enumerate(layers):
        if layer in name:
            return place
    return 0


@functools.cache
def _parse(layout: str, ndim: int) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]:
    """Return our axes in the file's order, and our axes that each axis of the file has."""
    axes = tuple(range(ndim))
    if layout in ("", STACKED):
        return axes, (*(((),) if layout else ()), *((axis,) for axis in axes))
    ours, _, theirs = layout.partition("->")
    assert len(ours) == ndim, f"{layout} has {len(ours)} axes, the parameter {ndim}"
    words = [word.strip("()") for word in re.findall(r"\(\w+\)|\w", theirs)]
    groups = tuple(tuple(ours.index(axis) for axis in word if axis != "1") for word in words)
    return tuple(itertools.chain(*groups)), groups


_PYTORCH = {  # in the name of a layer of ours → layouts of its kernel and bias there; the first counts
    "attention/norm": ("", ""),
    "attention/out": ("ThD->D(Th)", ""),
    "attention/": ("DTh->(Th)D", "Th->(Th)"),
    "norm": ("", ""),
    "conv": ("hwio->oihw", ""),
    "embedding": ("hwio->oihw", ""),
    "": ("io->oi", ""),
}


def pytorch_rules(layers: Mapping[str, str | Callable[[re.Match[str]], str]]) -> list[Rule]:
    """Return rules for layers in PyTorch's layouts, by pattern and name as in `Rule`; layers of one name are joined."""
    rules = []
    for ours, theirs in layers.items():
        kernel, bias = _find_layouts(ours)
        rules.append(Rule(f"{ours}/(?:kernel|scale)", _add_suffix(theirs, ".weight"), kernel))
        rules.append(Rule(f"{ours}/bias", _add_suffix(theirs, ".bias"), bias))
    return rules


def _find_layouts(ours: str) -> tuple[str, str]:
    """Return the layouts of kernel and bias of a layer."""
    for part, layouts in _PYTORCH.items():
        if part in ours:
            return layouts
    raise AssertionError("the last part is in every name")


def _add_suffix(
    name: str | Callable[[re.Match[str]], str], suffix: str
) -> str | Callable[[re.Match[str]], str]:
    """Return a name, or the function of one, with a suffix."""
    if isinstance(name, str):
        return f"{name}{suffix}"
    return functools.partial(_suffixed, name, suffix)


def transformer_rules(
    block: str,
    layers: Mapping[str, str],
    arrays: Mapping[str, str],
    layouts: Mapping[str, str],
    prefix: str = "",
) -> list[Rule]:
    """Return rules for a transformer in PyTorch's layouts.

    `block` begins the names of a block, before its number. `layers` and single `arrays` map our
    names, regular expressions, to the file's, without `prefix`; a name that begins with a dot is in
    a block. `layouts` are those of single arrays.
    """

    def ours(name: str) -> str:
        return rf"encoder/blocks/(\d+)/{name[1:]}" if name.startswith(".") else name

    def theirs(name: str) -> str:
        return rf"{prefix}{block}\1{name}" if name.startswith(".") else f"{prefix}{name}"

    single = [
        Rule(ours(name), theirs(other), layouts.get(name, "")) for name, other in arrays.items()
    ]
    return [*single, *pytorch_rules({ours(name): theirs(other) for name, other in layers.items()})]


def _suffixed(name_of: Callable[[re.Match[str]], str], suffix: str, match: re.Match[str]) -> str:
    return name_of(match) + suffix


def invert(names: Mapping[str, str]) -> dict[str, str]:
    """Return a dictionary from values to keys; ValueError if two keys have the same value."""
    inverse: dict[str, str] = {}
    for key, value in names.items():
        if value in inverse:
            raise ValueError(f"{inverse[value]} and {key} are both {value}")
        inverse[value] = key
    return inverse
