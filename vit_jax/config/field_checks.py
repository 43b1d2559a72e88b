"""Checks of single fields by the rules in their annotations."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

from vit_jax.config.rules import Range, When, get_default, read_rules

T = TypeVar("T")


def find_out_of_range(
    section: Any,
    prefix: str = "",
    rules_by_field: Mapping[str, Iterable[object]] | None = None,
) -> Iterator[str]:
    """Yield every number of a section that its range does not allow, also in inner sections.

    Args:
      section: a dataclass of the schema.
      prefix: path of the section with a dot, such as "model."; "" for the config.
      rules_by_field: rules in place of those in the annotations.
    """
    if rules_by_field is None:
        rules_by_field = read_rules(type(section))

    for name, rules in rules_by_field.items():
        given = getattr(section, name)
        for path, value in _find_leaves(given, f"{prefix}{name}"):
            if dataclasses.is_dataclass(value):
                yield from find_out_of_range(value, f"{path}.")
            if type(value) not in (int, float):
                continue
            shown = given if isinstance(given, tuple) else value
            for rule in rules:
                if isinstance(rule, Range) and not rule.allows(value):
                    yield f"{path}={shown}: {rule.rule}. {rule.fix}".rstrip()


def find_ineffective_fields(section: Any, root: object, prefix: str = "") -> Iterator[str]:
    """Yield every field that is not at its default and that another field makes ineffective.

    Args:
      section: a dataclass of the schema.
      root: the config, for paths from its root.
      prefix: path of the section with a dot, such as "model."; "" for the config.
    """
    rules_by_field = read_rules(type(section))

    for field in dataclasses.fields(section):
        value = getattr(section, field.name)
        path = f"{prefix}{field.name}"
        for inner_path, inner in _find_leaves(value, path):
            if dataclasses.is_dataclass(inner):
                yield from find_ineffective_fields(inner, root, f"{inner_path}.")

        default = get_default(field)
        if value == default:
            continue
        for rule in rules_by_field[field.name]:
            if not isinstance(rule, When):
                continue
            reason = rule.problem(section, root, prefix)
            if reason is None:
                continue
            fix = f"Set {rule.describe_requirement(prefix)}, or add {_spell_default(path, default)}"
            yield f"{path}={value!r}: has no effect with {reason}. {fix}."


def _spell_default(path: str, default: object) -> str:
    """Return an override that sets a field to its default.

    A default that the command line cannot state is described.
    """
    if default is None or isinstance(default, str | int | float):
        return f"--config.{path}={default}"
    return f"{path}={default!r}"


def apply_rules(rules: Iterable[Callable[[T], str | None]], subject: T) -> Iterator[str]:
    """Yield the problem of each rule that a subject does not keep."""
    for rule in rules:
        problem = rule(subject)
        if problem is not None:
            yield problem


def is_value_range(value: object) -> bool:
    """Return True for a pair of finite numbers, the first of them lower."""
    if not isinstance(value, tuple | list) or len(value) != 2:
        return False
    are_finite = all(type(number) in (int, float) and math.isfinite(number) for number in value)
    return are_finite and value[0] < value[1]


def reject(problems: Iterable[str], prefix: str = "config.") -> None:
    """Raise ValueError with the first of these problems."""
    for problem in problems:
        raise ValueError(prefix + problem)


def _find_leaves(value: object, path: str) -> Iterator[tuple[str, Any]]:
    """Yield a value, or the values of a mapping or a tuple, each with its path."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield f"{path}.{key}", inner
    elif isinstance(value, tuple):
        for inner in value:
            yield path, inner
    else:
        yield path, value
