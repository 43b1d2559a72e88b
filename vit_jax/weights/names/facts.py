"""What the names and shapes of a foreign file tell of its network, and how to ask them safely.

Each format fills in a `Facts`; what stays None the file does not tell. Nothing here trusts a shape: a file may say
anything.
"""

import dataclasses
import re
from collections.abc import Iterable, Mapping
from typing import Any

from vit_jax.weights.names.ours import Shape


@dataclasses.dataclass(frozen=True, kw_only=True)
class Facts:
    """Of a network, as far as names and shapes tell.

    Attributes:
      position_rows: length of the table of positions; None where there is none.
      fixed_positions: what then stands in its place: "sincos2d" or "none".
      class_rows: how many of them may be the class token's.
      defaults: fields of the architecture that the format fixes but no file states: GELU form, epsilons.
      The others as in `Architecture`.
    """

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
    position_rows: int | None = None
    fixed_positions: str = "sincos2d"
    class_rows: tuple[int, ...] = (0,)
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def shape_of(shapes: Mapping[str, Shape], name: str, ndim: int) -> Shape:
    """The shape of an array that must be there.

    Raises:
      ValueError: it is missing, has another number of axes, or an empty one.
    """
    if name not in shapes:
        raise ValueError(f"{name} is missing")
    if len(shapes[name]) != ndim or 0 in shapes[name]:
        raise ValueError(f"{name} has the shape {shapes[name]}, where {ndim} axes with elements are expected")
    return shapes[name]


def classes_of(shapes: Mapping[str, Shape], kernel: str, axis: int, bias: str) -> int:
    """How many classes the head has; 0 where there is none.

    The bias tells it too, so that a kernel under another name is missed and its name is told.
    """
    return _length_of(shapes.get(kernel, ()), axis) or _length_of(shapes.get(bias, ()), 0)


def _length_of(shape: Shape, axis: int) -> int:
    return shape[axis] if -len(shape) <= axis < len(shape) else 0


def count(names: Iterable[str], pattern: str) -> int:
    """How many numbers the one group of `pattern` takes at the beginning of names.

    Gaps do not matter: what is missing between is found when names are compared.
    """
    return len({match[1] for name in names if (match := re.match(pattern, name))})


def counts(names: Iterable[str], pattern: str) -> tuple[int, ...]:
    """For each number of the first group, how many the second takes: the units of every stage."""
    found = {(match[1], match[2]) for name in names if (match := re.match(pattern, name))}
    return tuple(
        count((f"{b}/" for a, b in found if a == stage), r"(\w+)/")
        for stage in sorted({a for a, _ in found}, key=lambda digits: (len(digits), digits))
    )


def invert(names: Mapping[str, str]) -> dict[str, str]:
    """Name in the file → another name, turned round.

    Raises:
      ValueError: two names become the same.
    """
    found: dict[str, str] = {}
    for given, name in names.items():
        if name in found:
            raise ValueError(f"{found[name]} and {given} are both {name}")
        found[name] = given
    return found
