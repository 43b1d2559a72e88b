"""Rules of single values, which annotations of fields state: ranges, and needed options.

The fields of `schema` and the options of verbs are annotated with them. `field_checks` and `cli`
apply them.
"""

import dataclasses
import functools
import re
import typing
from collections.abc import Iterator
from typing import Annotated, Any, NewType, TypeVar

from vit_jax.imports.reference_form import is_reference

T = TypeVar("T")

Reference = NewType("Reference", str)
"""A user-defined component: "package.module:name", imported by `vit_jax.imports.references`."""
LastBlocks = NewType("LastBlocks", str)
"""A number of blocks at the end of a transformer: "last:4"."""
_LAST_BLOCKS = re.compile(r"last:([1-9]\d{0,5})")


def count_last_blocks(value: object) -> int | None:
    """Return the number of blocks in "last:N"; None for another value."""
    match = _LAST_BLOCKS.fullmatch(str(value))
    return int(match[1]) if match else None


@dataclasses.dataclass(frozen=True)
class Range:
    """An interval of numbers such as "[0, 1)", and the fix for a number outside."""

    interval: str
    fix: str = ""

    def allows(self, value: float) -> bool:
        """Return True for a number in the interval."""
        low, high = map(float, self.interval[1:-1].split(","))
        if value == low and self.interval.startswith("["):
            return True
        if value == high and self.interval.endswith("]"):
            return True
        return low < value < high

    @property
    def rule(self) -> str:
        """The interval in words."""
        words = {
            "[0, inf)": "must not be negative",
            "(0, inf)": "must be positive",
            "[1, inf)": "must be at least 1",
        }
        return words.get(self.interval, f"must lie in {self.interval}")


class When:
    """A condition: the field has an effect only if another one is set, or has one of these values.

    Args:
      field: a path from the config's root such as "schedule.decay"; without a dot, a field of the
        same section.
      values: `Reference` stands for every reference, `LastBlocks` for every "last:N"; none:
        anything but None, 0, False and empty.
    """

    def __init__(self, field: str, *values: object):
        self.field = field
        self.values = values

    def holds(self, value: object) -> bool:
        """Return True if the field is effective with this value of the other one."""
        if not self.values:
            return bool(value)
        if Reference in self.values and is_reference(value):
            return True
        if LastBlocks in self.values and count_last_blocks(value):
            return True
        return value in self.values

    def describe_requirement(self, prefix: str = "") -> str:
        """Return the other field, in the section `prefix`, with its effective values."""
        path = self._find_path(prefix)
        if not self.values:
            return path
        return f"{path}={' or '.join(map(_spell_value, self.values))}"

    def problem(self, section: object, root: object, prefix: str) -> str | None:
        """Return the value of the other field that makes this one ineffective, with its path."""
        start = root if "." in self.field else section
        value = functools.reduce(getattr, self.field.split("."), start)
        if self.holds(value):
            return None
        return f"{self._find_path(prefix)}={value!r}"

    def _find_path(self, prefix: str) -> str:
        """Return the path of the other field from the config's root."""
        if "." in self.field:
            return self.field
        return prefix + self.field


def _spell_value(value: object) -> str:
    if value is Reference:
        return "package.module:name"
    if value is LastBlocks:
        return "last:N"
    return repr(value)


@dataclasses.dataclass(frozen=True)
class Component:
    """The component of a network that a field describes: "Transformer" or "ResNet"."""

    name: str


Transformer = Annotated[T, Component("Transformer")]
ResNet = Annotated[T, Component("ResNet")]
Fraction = Annotated[float, Range("[0, 1)")]
Share = Annotated[float, Range("[0, 1]")]
NotNegative = Annotated[float, Range("[0, inf)")]
Positive = Annotated[float, Range("(0, inf)")]
Number = Annotated[int, Range("[0, inf)")]
Count = Annotated[int, Range("[1, inf)")]


def read_rules(kind: type) -> dict[str, tuple[object, ...]]:
    """Return the rules of each field of a dataclass."""
    hints = typing.get_type_hints(kind, include_extras=True)
    return {name: tuple(find_rules(hint)) for name, hint in hints.items()}


def find_rules(hint: Any) -> Iterator[object]:
    """Yield the rules that annotate a type, also inside unions and containers."""
    if typing.get_origin(hint) is typing.Literal:
        return
    if hasattr(hint, "__metadata__"):
        yield from hint.__metadata__
        yield from find_rules(hint.__origin__)
        return
    for argument in typing.get_args(hint):
        yield from find_rules(argument)


def get_default(field: "dataclasses.Field") -> Any:
    """Return the default of a field, MISSING for one without."""
    if field.default_factory is dataclasses.MISSING:
        return field.default
    return field.default_factory()
