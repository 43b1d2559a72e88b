"""Rules of single values, which annotations of fields state: ranges, and the options that make a field effective.

`schema` and the options of verbs are annotated so; `check`, `architecture` and `cli` apply the rules.
"""

import dataclasses
import functools
import math
import sys
import typing
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, NewType, TypeVar

from vit_jax.imports.references import is_reference

T = TypeVar("T")

Reference = NewType("Reference", str)
"""A user-defined component: "package.module:name", imported by `vit_jax.imports.references`."""


@dataclasses.dataclass(frozen=True)
class Range:
    """An interval of numbers such as "[0, 1)", and the fix for a number outside."""

    interval: str
    fix: str = ""

    def allows(self, value: float) -> bool:
        """Return True for a number in the interval."""
        low, high = map(float, self.interval[1:-1].split(","))
        is_above = value >= low if self.interval[0] == "[" else value > low
        return is_above and (value <= high if self.interval[-1] == "]" else value < high)

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
      field: a path from the config's root such as "schedule.decay"; without a dot, a field of the same section.
      values: `Reference` stands for every reference; none: anything but None, 0, False and empty.
    """

    def __init__(self, field: str, *values: object):
        self.field = field
        self.values = values

    def holds(self, value: object) -> bool:
        """Return True if the field is effective with this value of the other one."""
        is_known = value in self.values or (Reference in self.values and is_reference(value))
        return is_known if self.values else bool(value)

    def needed(self, prefix: str = "") -> str:
        """Return the other field, in the section `prefix`, with the values that make this one effective."""
        values = [
            "package.module:name" if value is Reference else repr(value) for value in self.values
        ]
        return self._path(prefix) + ("=" if values else "") + " or ".join(values)

    def problem(self, section: object, root: object, prefix: str) -> str | None:
        """Return the value of the other field that makes this one ineffective, with its path."""
        value = functools.reduce(
            getattr, self.field.split("."), root if "." in self.field else section
        )
        return None if self.holds(value) else f"{self._path(prefix)}={value!r}"

    def _path(self, prefix: str) -> str:
        return self.field if "." in self.field else prefix + self.field


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


def rules_of(kind: type) -> dict[str, tuple[object, ...]]:
    """Return the rules of each field of a dataclass."""
    return {
        name: tuple(rules_in(hint))
        for name, hint in typing.get_type_hints(kind, include_extras=True).items()
    }


def rules_in(hint: Any) -> Iterator[object]:
    """Yield the annotations of a type, at any depth."""
    yield from getattr(hint, "__metadata__", ())
    inner = [hint.__origin__] if hasattr(hint, "__metadata__") else typing.get_args(hint)
    for argument in inner if typing.get_origin(hint) is not typing.Literal else ():
        yield from rules_in(argument)


def default_of_field(field: "dataclasses.Field[Any]") -> Any:
    """Return the default of a field, MISSING for one without."""
    return (
        field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    )


def out_of_range(
    section: Any, prefix: str = "", rules_by_field: Mapping[str, Iterable[object]] | None = None
) -> Iterator[str]:
    """Yield every number of a section, and of the sections in it, that its range does not allow.

    Rules are those of the annotations, or of `rules_by_field`.
    """
    for name, rules in (rules_by_field or rules_of(type(section))).items():
        for path, value in _leaves(getattr(section, name), f"{prefix}{name}"):
            if dataclasses.is_dataclass(value):
                yield from out_of_range(value, f"{path}.")
            for rule in rules if type(value) in (int, float) else ():
                if isinstance(rule, Range) and not rule.allows(value):
                    shown = (
                        getattr(section, name)
                        if isinstance(getattr(section, name), tuple)
                        else value
                    )
                    yield f"{path}={shown}: {rule.rule}.{rule.fix and ' '}{rule.fix}"


def without_effect(section: Any, root: object, prefix: str = "") -> Iterator[str]:
    """Yield every field that is not at its default and that another field makes ineffective."""
    for field in dataclasses.fields(section):
        name = field.name
        value = getattr(section, field.name)
        default = default_of_field(field)
        for path, inner in _leaves(value, f"{prefix}{name}"):
            if dataclasses.is_dataclass(inner):
                yield from without_effect(inner, root, f"{path}.")
        for rule in rules_of(type(section))[name] if value != default else ():
            if isinstance(rule, When) and (reason := rule.problem(section, root, prefix)):
                is_plain = default is None or isinstance(default, str | int | float)
                other = (
                    f"--config.{prefix}{name}={default}"
                    if is_plain
                    else f"{prefix}{name}={default!r}"
                )
                yield (
                    f"{prefix}{name}={value!r}: has no effect with {reason}. Set {rule.needed(prefix)}, or add {other}."
                )


def reject(problems: Iterable[str], prefix: str = "config.") -> None:
    """Raise ValueError with the first of these problems."""
    for problem in problems:
        raise ValueError(prefix + problem)


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield a value, or those of a mapping or a tuple, each with its path."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield f"{path}.{key}", inner
    else:
        yield from ((path, inner) for inner in (value if isinstance(value, tuple) else (value,)))


DURATION_UNITS = ("steps", "epochs", "examples", "fraction")


def parse_duration(text: str) -> tuple[float, str]:
    """Split "300 epochs" into (300.0, "epochs").

    Raises:
      ValueError: the text is not a number followed by one of `DURATION_UNITS`, or the number is negative.
    """
    number, _, unit = text.strip().partition(" ")
    unit = unit.strip()
    if unit in ("step", "epoch", "example"):
        unit += "s"
    try:
        value = float(number.replace("_", ""))
    except ValueError:
        value = math.nan
    most = 1 if unit == "fraction" else sys.float_info.max
    if unit not in DURATION_UNITS or not 0 <= value <= most:
        forms = "'500 steps', '90 epochs', '1e6 examples' or '0.1 fraction' (in [0, 1])"
        raise ValueError(f"{text!r} is no duration: must be a number and a unit. Write {forms}.")
    return value, unit
