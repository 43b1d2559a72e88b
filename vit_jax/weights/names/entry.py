"""One array of a foreign file and the parameters of ours that it holds: the same numbers, laid out differently.

A format is a list of rules that give our parameters their foreign names. Reading and writing both follow from the
entries made of them, so neither can drift from the other. No format stands here.
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

STACKED = "stacked"  # a layout: all layers in one array, on a new leading axis


class Rule(NamedTuple):
    r"""Foreign name of the parameters whose whole name `pattern` matches.

    Attributes:
      pattern: regular expression over names with layers taken apart.
      name: with \1, \2 for the groups of the pattern, or a function of the match.
      layout: our axes, an arrow, the file's axes: "DTh->(Th)D" merges two axes and moves the first to the end, 1 is a
        new axis of that length. Empty: the same. Parameters with the same foreign name are joined along its first axis.
    """

    pattern: str
    name: str | Callable[[re.Match[str]], str]
    layout: str = ""


@dataclasses.dataclass(frozen=True)
class Entry:
    """An array of a foreign file.

    Attributes:
      name: there.
      ours: the parameters that it holds, in their order along its first axis, layers taken apart.
      layout: as in `Rule`.
      part: shape of one of `ours`; all have the same.
    """

    name: str
    ours: tuple[str, ...]
    layout: str
    part: Shape

    @property
    def shape(self) -> Shape:
        """Of the foreign array."""
        piece = self._piece()
        return (len(self.ours) * piece[0], *piece[1:]) if len(self.ours) > 1 else piece

    def read(self, array: np.ndarray) -> dict[str, np.ndarray]:
        """Our parameters, from the foreign array."""
        order, _ = _parse(self.layout, len(self.part))
        permuted = [self.part[axis] for axis in order]
        pieces = np.split(array, len(self.ours)) if len(self.ours) > 1 else [array]
        ours = [piece.reshape(permuted).transpose(np.argsort(order)) for piece in pieces]
        return {name: np.ascontiguousarray(one) for name, one in zip(self.ours, ours, strict=True)}

    def write(self, parameters: Mapping[str, np.ndarray]) -> np.ndarray:
        """The foreign array, from our parameters."""
        order, _ = _parse(self.layout, len(self.part))
        pieces = [parameters[name].transpose(order).reshape(self._piece()) for name in self.ours]
        return np.ascontiguousarray(np.concatenate(pieces) if len(pieces) > 1 else pieces[0])

    def fate(self, *, reading: bool) -> str:
        """What happens to the numbers on their way into or out of our names."""
        order, _ = _parse(self.layout, len(self.part))
        words = []
        has_layers = stacked_name(self.ours[0])[1] is not None
        if self.layout != STACKED and len(self.ours) > 1:
            words.append("split" if reading else "joined")
        if list(order) != sorted(order):
            words.append("transposed")
        elif self.layout != STACKED and self._piece() != self.part:
            words.append("reshaped")
        if has_layers and self.layout != STACKED:
            words.append("stacked" if reading else "unstacked")
        return ", ".join(words) or "copied"

    def _piece(self) -> Shape:
        _, groups = _parse(self.layout, len(self.part))
        return tuple(math.prod(self.part[axis] for axis in group) for group in groups)


def make_entries(rules: Sequence[Rule], shapes: Mapping[str, Shape]) -> list[Entry]:
    """The arrays of a file that holds exactly the parameters of `shapes` which have elements.

    Args:
      rules: of a format; the first whose pattern matches counts.
      shapes: ours, layers taken apart.

    Raises:
      ValueError: the format has no name for some of the parameters; all are listed.
    """
    groups: dict[str, list[str]] = {}
    layouts: dict[str, str] = {}
    homeless = []
    for name in (name for name, shape in shapes.items() if math.prod(shape)):
        match, rule = next(((m, rule) for rule in rules if (m := re.fullmatch(rule.pattern, name))), (None, None))
        if match is None or rule is None:
            homeless.append(name)
            continue
        foreign = match.expand(rule.name) if isinstance(rule.name, str) else rule.name(match)
        groups.setdefault(foreign, []).append(name)
        layouts[foreign] = rule.layout
    if homeless:
        raise ValueError(f"it has no name for {', '.join(dict.fromkeys(stacked_name(name)[0] for name in homeless))}")
    return [Entry(name, tuple(ours), layouts[name], shapes[ours[0]]) for name, ours in groups.items()]


@functools.cache
def _parse(layout: str, ndim: int) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]:
    """Our axes in the file's order, and those that make up each of the file's axes."""
    axes = tuple(range(ndim))
    if not layout:
        return axes, tuple((axis,) for axis in axes)
    if layout == STACKED:
        return axes, ((), *((axis,) for axis in axes))
    ours, _, theirs = layout.partition("->")
    assert len(ours) == ndim, f"{layout} has {len(ours)} axes, the parameter {ndim}"
    words = [word.strip("()") for word in re.findall(r"\(\w+\)|\w", theirs)]
    groups = tuple(tuple(ours.index(axis) for axis in word if axis != "1") for word in words)
    return tuple(itertools.chain(*groups)), groups
