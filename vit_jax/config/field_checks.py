"""Checks of single fields by the rules in their annotations."""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from vit_jax.config.rules import Range, When, default_of_field, rules_of


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
