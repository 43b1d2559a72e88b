"""The fields of the schema with types, defaults and descriptions, for pages and the command line.

A description is the string below a field in the source, with the rules in its annotation.
"""

import ast
import dataclasses
import inspect
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from vit_jax.config import network_options, schema
from vit_jax.config.data_kinds import spell_quoted_forms
from vit_jax.config.rules import Component, Range, When, find_rules, get_default


@dataclasses.dataclass(frozen=True)
class Field:
    """One field; type and default as Python writes them. A required field has None."""

    name: str
    type: str
    default: str | None
    description: str


@dataclasses.dataclass(frozen=True)
class Section:
    """One dataclass of the schema; `prefix` begins its fields on the command line, as "model."."""

    name: str
    prefix: str
    description: str
    fields: tuple[Field, ...]


def read_sections() -> list[Section]:
    """Return every section of a run, in the order of the schema."""
    prefixes: dict[type, str] = {}
    for run in (schema.PretrainConfig, schema.FinetuneConfig):
        prefixes |= dict(_find_prefixes(run, ""))

    sections = []
    for module in (network_options, schema):
        for node in ast.parse(inspect.getsource(module)).body:
            if isinstance(node, ast.ClassDef):
                kind = getattr(module, node.name)
                sections.append(_read_section(kind, node, prefixes[kind]))
    return sections


def describe_fields(node: ast.ClassDef) -> dict[str, str]:
    """Return the string below each annotated field of a class; "" for a field without one."""
    texts = {}
    for statement, below in zip(node.body, [*node.body[1:], None], strict=True):
        if isinstance(statement, ast.AnnAssign):
            text = ""
            if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
                text = str(below.value.value)
            texts[ast.unparse(statement.target)] = _join_lines(text)
    return texts


def _read_section(kind: type, node: ast.ClassDef, prefix: str) -> Section:
    """Return a class of the schema with the descriptions in its source."""
    return Section(
        name=node.name.lstrip("_"),
        prefix=prefix,
        description=_join_lines(ast.get_docstring(node)),
        fields=tuple(_read_fields(kind, node)),
    )


def _read_fields(kind: type, node: ast.ClassDef) -> Iterator[Field]:
    """Yield the fields of a class of the schema, without those of its base classes."""
    hints = typing.get_type_hints(kind, include_extras=True)
    defaults = {field.name: get_default(field) for field in dataclasses.fields(kind)}
    kinds_of_data = spell_quoted_forms()
    for name, template in describe_fields(node).items():
        text = template.replace("KINDS_OF_DATA", kinds_of_data)
        yield Field(
            name=name,
            type=_spell_type(hints[name]),
            default=_spell_default(defaults[name]),
            description=_add_rules(text, list(find_rules(hints[name]))),
        )


def _spell_default(default: object) -> str | None:
    """Return a default as Python writes it, None for a required field."""
    if default is dataclasses.MISSING:
        return None
    if dataclasses.is_dataclass(default):
        return f"{type(default).__name__}()"
    return repr(default)


def _add_rules(text: str, rules: Iterable[object]) -> str:
    """Return a description with the component that it is about and the fields that it needs."""
    needed = []
    component = ""
    for rule in rules:
        if isinstance(rule, Component):
            component = component or rule.name
        elif isinstance(rule, When):
            needed.append(rule.describe_requirement())

    is_acronym = text[:2].isupper()  # "MLP of each block"
    if component and not is_acronym:
        text = text[:1].lower() + text[1:]
    if component:
        text = f"{component}: {text}"
    if needed:
        text += f" Needs {' and '.join(needed)}."
    return text


def _find_prefixes(kind: type, prefix: str) -> Iterator[tuple[type, str]]:
    """Yield a section, its base classes and inner sections, each with the prefix of its fields."""
    for base in kind.__mro__:
        if dataclasses.is_dataclass(base):
            yield base, prefix
    for name, hint in typing.get_type_hints(kind).items():
        inner_prefix = f"{prefix}{name}."
        if typing.get_origin(hint) is Mapping:
            inner_prefix += "NAME."
        for section in typing.get_args(hint) or (hint,):
            if isinstance(section, type) and dataclasses.is_dataclass(section):
                yield from _find_prefixes(section, inner_prefix)


_SIGNS = {"": "", "[0, inf)": " >= 0", "(0, inf)": " > 0", "[1, inf)": " >= 1"}
"""Intervals as a type states them."""


def _spell_type(hint: Any) -> str:
    """Return a type as Python writes it, with the values of `Literal` and ranges of numbers."""
    if hasattr(hint, "__metadata__"):
        interval = _find_interval(hint.__metadata__)
        return _spell_type(hint.__origin__) + _SIGNS.get(interval, f" in {interval}")

    origin = typing.get_origin(hint)
    arguments = typing.get_args(hint)
    if origin is typing.Literal:
        return " | ".join(map(repr, arguments))
    if origin in (types.UnionType, typing.Union):
        return " | ".join(map(_spell_type, arguments))
    if origin is not None:
        return f"{origin.__name__}[{', '.join(map(_spell_type, arguments))}]"
    if hint is types.NoneType:
        return "None"
    if hint is Ellipsis:
        return "..."
    return str(hint.__name__)


def _find_interval(rules: Iterable[object]) -> str:
    """Return the interval of the first range among the rules of a number; "" without one."""
    for rule in rules:
        if isinstance(rule, Range):
            return rule.interval
    return ""


def _join_lines(text: str | None) -> str:
    """Return a text on one line."""
    return " ".join((text or "").split())
