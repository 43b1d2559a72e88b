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

from vit_jax.weights.names.ours import Shape, find_stacked_name

QKV = ("query", "key", "value")
STACKED = "stacked"
"""A layout: all layers in one array, on a new leading axis."""


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

    name: str
    """Name of the array in the file."""
    ours: tuple[str, ...]
    """Our parameters that it holds, in order along its first axis, layers taken apart."""
    layout: str
    """Layout as in `Rule`."""
    parameter_shape: Shape
    """Shape of each of `ours`."""

    @property
    def shape(self) -> Shape:
        """Shape of the array in the file."""
        piece = self._compute_piece_shape()
        if len(self.ours) == 1:
            return piece
        return (len(self.ours) * piece[0], *piece[1:])

    def read(self, array: np.ndarray) -> dict[str, np.ndarray]:
        """Return our parameters from the array of the file."""
        order, _ = _parse(self.layout, len(self.parameter_shape))
        inverse_order = np.argsort(order)
        permuted_shape = [self.parameter_shape[axis] for axis in order]

        pieces = [array]
        if len(self.ours) > 1:
            pieces = np.split(array, len(self.ours))

        parameters = {}
        for name, piece in zip(self.ours, pieces, strict=True):
            parameter = piece.reshape(permuted_shape).transpose(inverse_order)
            parameters[name] = np.ascontiguousarray(parameter)
        return parameters

    def write(self, parameters: Mapping[str, np.ndarray]) -> np.ndarray:
        """Return the array of the file from our parameters."""
        order, _ = _parse(self.layout, len(self.parameter_shape))
        piece_shape = self._compute_piece_shape()
        pieces = []
        for name in self.ours:
            permuted = parameters[name].transpose(order)
            pieces.append(permuted.reshape(piece_shape))

        if len(pieces) == 1:
            return np.ascontiguousarray(pieces[0])
        return np.ascontiguousarray(np.concatenate(pieces))

    def describe_use(self, *, reading: bool) -> str:
        """Return how the array is changed on its way into or out of our parameters."""
        if self.layout == STACKED:
            return "copied"

        words = []
        if len(self.ours) > 1:
            words.append("split" if reading else "joined")

        order, _ = _parse(self.layout, len(self.parameter_shape))
        if list(order) != sorted(order):
            words.append("transposed")
        elif self._compute_piece_shape() != self.parameter_shape:
            words.append("reshaped")

        _, layer = find_stacked_name(self.ours[0])
        if layer is not None:
            words.append("stacked" if reading else "unstacked")
        return ", ".join(words) or "copied"

    def _compute_piece_shape(self) -> Shape:
        """Return the shape of one parameter in the file."""
        _, groups = _parse(self.layout, len(self.parameter_shape))
        piece = []
        for group in groups:
            lengths = [self.parameter_shape[axis] for axis in group]
            piece.append(math.prod(lengths))
        return tuple(piece)


def replace_shape(entries: Sequence[Entry], name: str, shape: Shape) -> list[Entry]:
    """Return the entries with another shape of one parameter, whose array holds no other."""
    changed = []
    for entry in entries:
        if entry.ours == (name,):
            entry = dataclasses.replace(entry, parameter_shape=shape)
        changed.append(entry)
    return changed


def make_entries(rules: Sequence[Rule], shapes: Mapping[str, Shape]) -> list[Entry]:
    """Return the arrays of a file that holds the parameters of `shapes`, ours taken apart.

    Parameters without elements have none.

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
        foreign = find_name(rules, name)
        if rule is None or not foreign:
            stacked, _ = find_stacked_name(name)
            nameless.append(stacked)
            continue

        groups.setdefault(foreign, []).append(name)
        layouts[foreign] = rule.layout

    if nameless:
        raise ValueError(f"it has no name for {', '.join(dict.fromkeys(nameless))}")

    entries = []
    for foreign, names in groups.items():
        ordered = sorted(names, key=_rank_in_projection)
        entry = Entry(
            name=foreign,
            ours=tuple(ordered),
            layout=layouts[foreign],
            parameter_shape=shapes[names[0]],
        )
        entries.append(entry)
    return entries


def _find_rule(rules: Sequence[Rule], ours: str) -> Rule | None:
    """Return the first rule that matches a parameter."""
    for rule in rules:
        if re.fullmatch(rule.pattern, ours):
            return rule
    return None


def find_name(rules: Sequence[Rule], ours: str) -> str:
    """Return the name of a parameter by the first rule that matches; "" if there is none.

    `ours` is its name with layers taken apart.
    """
    for rule in rules:
        match = re.fullmatch(rule.pattern, ours)
        if match is None:
            continue
        if isinstance(rule.name, str):
            return match.expand(rule.name)
        return rule.name(match)
    return ""


_PROJECTION_ORDER = ("/query/", "/key/", "/value/", "/gate/", "/expand/")


def _rank_in_projection(name: str) -> int:
    """Return a number to sort parts of a projection by; other parts keep their order."""
    for place, layer in enumerate(_PROJECTION_ORDER):
        if layer in name:
            return place
    return 0


@functools.cache
def _parse(layout: str, ndim: int) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]:
    """Return our axes in the file's order, and our axes that each axis of the file has."""
    if layout in ("", STACKED):
        axes = tuple(range(ndim))
        unchanged = tuple((axis,) for axis in axes)
        if layout == STACKED:
            return axes, ((), *unchanged)
        return axes, unchanged

    ours, _, theirs = layout.partition("->")
    assert len(ours) == ndim, f"{layout} has {len(ours)} axes, the parameter {ndim}"

    groups = []
    for word in re.findall(r"\(\w+\)|\w", theirs):
        letters = word.strip("()").replace("1", "")
        group = tuple(map(ours.index, letters))
        groups.append(group)
    order = tuple(itertools.chain(*groups))
    return order, tuple(groups)


# Part of the name of our layer → layouts of its kernel and bias in PyTorch; the first one counts.
_PYTORCH = {
    "attention/norm": ("", ""),
    "attention/out": ("ThD->D(Th)", ""),
    "attention/": ("DTh->(Th)D", "Th->(Th)"),
    "norm": ("", ""),
    "conv": ("hwio->oihw", ""),
    "embedding": ("hwio->oihw", ""),
    "": ("io->oi", ""),
}


def make_pytorch_rules(layers: Mapping[str, str | Callable[[re.Match[str]], str]]) -> list[Rule]:
    """Return rules for layers in PyTorch's layouts, by pattern and name as in `Rule`.

    Layers of one name are joined.
    """
    rules = []
    for ours, theirs in layers.items():
        kernel_layout, bias_layout = _find_layouts(ours)
        kernel_name = _add_suffix(theirs, ".weight")
        bias_name = _add_suffix(theirs, ".bias")
        rules.append(Rule(f"{ours}/(?:kernel|scale)", kernel_name, kernel_layout))
        rules.append(Rule(f"{ours}/bias", bias_name, bias_layout))
    return rules


def _find_layouts(ours: str) -> tuple[str, str]:
    """Return the layouts of kernel and bias of a layer."""
    for part, layouts in _PYTORCH.items():
        if part in ours:
            return layouts
    raise AssertionError("the last part is in every name")


def _add_suffix(
    name: str | Callable[[re.Match[str]], str],
    suffix: str,
) -> str | Callable[[re.Match[str]], str]:
    """Return a name, or the function that makes one, with a suffix."""
    if isinstance(name, str):
        return f"{name}{suffix}"
    return functools.partial(_make_suffixed, name, suffix)


def _make_suffixed(
    make_name: Callable[[re.Match[str]], str],
    suffix: str,
    match: re.Match[str],
) -> str:
    return make_name(match) + suffix


def make_transformer_rules(
    block: str,
    layers: Mapping[str, str],
    arrays: Mapping[str, str],
    layouts: Mapping[str, str],
    prefix: str = "",
) -> list[Rule]:
    """Return rules for a transformer in PyTorch's layouts.

    `block` begins the names of a block, before its number. `layers` and single `arrays` map our
    names, regular expressions, to the file's, without `prefix`; a name that begins with a dot is in
    a block. `layouts` are layouts of single arrays.
    """

    def complete_name(name: str) -> str:
        if name.startswith("."):
            return rf"{prefix}{block}\1{name}"
        return f"{prefix}{name}"

    rules = []
    for ours, theirs in arrays.items():
        layout = layouts.get(ours, "")
        rules.append(Rule(_complete_pattern(ours), complete_name(theirs), layout))

    complete_layers = {}
    for ours, theirs in layers.items():
        complete_layers[_complete_pattern(ours)] = complete_name(theirs)
    return rules + make_pytorch_rules(complete_layers)


def _complete_pattern(name: str) -> str:
    """Return the pattern of a parameter; a name that begins with a dot is in a block."""
    if name.startswith("."):
        return rf"encoder/blocks/(\d+)/{name[1:]}"
    return name


def invert(names: Mapping[str, str]) -> dict[str, str]:
    """Return a dictionary from values to keys.

    Raises:
      ValueError: two keys have the same value.
    """
    inverse: dict[str, str] = {}
    for key, value in names.items():
        if value in inverse:
            raise ValueError(f"{inverse[value]} and {key} are both {value}")
        inverse[value] = key
    return inverse
