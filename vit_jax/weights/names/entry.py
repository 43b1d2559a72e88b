"""The parts of a format: rules for names and layouts, the arrays that follow from them, and facts about a network.

Reading and writing both follow from the entries made of the rules, so neither can drift from the other.
"""

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from vit_jax.weights.names.ours import Shape, stacked_name

NAFLEX = (
    "it is a NaFlex model, whose patch embedding is a linear layer over images of any aspect ratio ({}), which our "
    "networks do not compute: use weights of SigLIP 2 for one resolution, such as google/siglip2-base-patch16-224"
)
STACKED = "stacked"  # a layout: all layers in one array, on a new leading axis


class Rule(NamedTuple):
    r"""Foreign name of the parameters whose full name `pattern` matches.

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
    """An array of a foreign file."""

    name: str  # there
    ours: tuple[str, ...]  # the parameters that it holds, in their order along its first axis, layers taken apart
    layout: str  # as in `Rule`
    part: Shape  # of one of `ours`; all have the same

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

    def status(self, *, reading: bool) -> str:
        """What happens to the numbers on their way into or out of our names."""
        order, _ = _parse(self.layout, len(self.part))
        words = []
        if self.layout != STACKED and len(self.ours) > 1:
            words.append("split" if reading else "joined")
        if list(order) != sorted(order):
            words.append("transposed")
        elif self.layout != STACKED and self._piece() != self.part:
            words.append("reshaped")
        if self.layout != STACKED and stacked_name(self.ours[0])[1] is not None:
            words.append("stacked" if reading else "unstacked")
        return ", ".join(words) or "copied"

    def _piece(self) -> Shape:
        _, groups = _parse(self.layout, len(self.part))
        return tuple(math.prod(self.part[axis] for axis in group) for group in groups)


def make_entries(rules: Sequence[Rule], shapes: Mapping[str, Shape]) -> list[Entry]:
    """The arrays of a file that holds exactly the parameters of `shapes`, ours taken apart, which have elements.

    The first rule that matches counts. ValueError lists all parameters for which the format has no name.
    """
    groups: dict[str, list[str]] = {}
    layouts: dict[str, str] = {}
    homeless = []
    for name in (name for name, shape in shapes.items() if math.prod(shape)):
        rule = next((rule for rule in rules if re.fullmatch(rule.pattern, name)), None)
        if rule is None:
            homeless.append(stacked_name(name)[0])
            continue
        foreign = name_of([rule], name)
        groups.setdefault(foreign, []).append(name)
        layouts[foreign] = rule.layout
    if homeless:
        raise ValueError(f"it has no name for {', '.join(dict.fromkeys(homeless))}")
    return [
        Entry(name, tuple(sorted(ours, key=_place_in_projection)), layouts[name], shapes[ours[0]])
        for name, ours in groups.items()
    ]


def name_of(rules: Sequence[Rule], ours: str) -> str:
    """Return the foreign name of a parameter, layers taken apart; "" if the format has none."""
    for rule in rules:
        if match := re.fullmatch(rule.pattern, ours):
            return match.expand(rule.name) if isinstance(rule.name, str) else rule.name(match)
    return ""


def _place_in_projection(name: str) -> int:
    """Queries come before keys before values, gates before what they gate; all else stays in its order."""
    parts = ("/query/", "/key/", "/value/", "/gate/", "/expand/")
    return next((place for place, part in enumerate(parts) if part in name), 0)


@functools.cache
def _parse(layout: str, ndim: int) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]:
    """Our axes in the file's order, and those that make up each of the file's axes."""
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
    """Rules for layers as PyTorch keeps them, by pattern and name as in `Rule`; those of one name are joined."""
    rules = []
    for ours, theirs in layers.items():
        kernel, bias = next(layouts for part, layouts in _PYTORCH.items() if part in ours)
        for leaf, suffix, layout in (("(?:kernel|scale)", ".weight", kernel), ("bias", ".bias", bias)):
            name = f"{theirs}{suffix}" if isinstance(theirs, str) else functools.partial(_suffixed, theirs, suffix)
            rules.append(Rule(f"{ours}/{leaf}", name, layout))
    return rules


def _suffixed(name_of: Callable[[re.Match[str]], str], suffix: str, match: re.Match[str]) -> str:
    return name_of(match) + suffix


# What names and shapes determine of a network. A file may contain anything: no shape is trusted.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Facts:
    """What names and shapes determine of a network; None is what they do not."""

    family: str = "vit"
    patch_size: tuple[int, int] = (1, 1)
    width: int
    depth: int = 0
    mlp_dim: int = 0
    num_heads: int | None = 0
    units: tuple[int, ...] = ()
    root_channels: int = 64
    pool: str
    head: str = "linear"
    num_classes: int
    position_rows: int | None = None  # length of the table of positions; None where there is none
    fixed_positions: str = "sincos2d"  # what then takes its place, or "none"
    prefix_rows: tuple[int, ...] | None = None  # how many of the rows may be of prefix tokens; None: any such number
    # Fields of the architecture that the format fixes but no file states: GELU form, epsilons.
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    # Fields of the architecture that the arrays decide: registers, biases, norms.
    parts: dict[str, Any] = dataclasses.field(default_factory=dict)
    needs_rope: bool = False  # the network has rotary positions, whose form is not in the file
    is_distilled: bool = False  # the file has a distillation token with a head, as `distilled` describes
    is_radio: bool = False  # the arrays are as `radio` describes
    absent: frozenset[str] = frozenset()  # parameters of ours that are zeros and not in the file


def shape_of(shapes: Mapping[str, Shape], name: str, ndim: int) -> Shape:
    """The shape of an array; ValueError where it is missing, has another number of axes, or an empty one."""
    if name not in shapes:
        raise ValueError(f"{name} is missing")
    if len(shapes[name]) != ndim or 0 in shapes[name]:
        raise ValueError(f"{name} has the shape {shapes[name]}, where {ndim} axes with elements are expected")
    return shapes[name]


def classes_of(shapes: Mapping[str, Shape], kernel: str, axis: int, bias: str) -> int:
    """How many classes the head has, on the first or last axis of its kernel; 0 where there is none.

    The bias gives it too, so that a kernel under another name is reported as missing.
    """
    return (shapes.get(kernel) or (0,))[axis] or (shapes.get(bias) or (0,))[0]


def count(names: Iterable[str], pattern: str) -> int:
    """How many numbers the one group of `pattern` takes at the beginning of names; gaps are found later, by name."""
    return len({match[1] for name in names if (match := re.match(pattern, name))})


def counts(names: Iterable[str], pattern: str) -> tuple[int, ...]:
    """For each number of the first group, how many the second takes: the units of every stage."""
    found: dict[str, set[str]] = {}
    for match in filter(None, (re.match(pattern, name) for name in names)):
        found.setdefault(match[1], set()).add(match[2])
    return tuple(len(found[stage]) for stage in sorted(found, key=lambda digits: (len(digits), digits)))


def invert(names: Mapping[str, str]) -> dict[str, str]:
    """Name in the file → another name, turned round; ValueError where two names become the same."""
    found: dict[str, str] = {}
    for given, name in names.items():
        if name in found:
            raise ValueError(f"{found[name]} and {given} are both {name}")
        found[name] = given
    return found
