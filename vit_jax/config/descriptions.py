"""The fields of the schema with their types, defaults and descriptions, for the documentation and the command line.

A description is the string below a field in the source, with the rules in its annotation.
"""

import ast
import dataclasses
import inspect
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any

from vit_jax.config import network_options, schema
from vit_jax.config.data_kinds import spell_quoted_forms
from vit_jax.config.rules import Component, Range, When, default_of_field, rules_in


@dataclasses.dataclass(frozen=True)
class Field:
    """One field; type and default as Python writes them, without a default where the field is required."""

    name: str
    type: str
    default: str | None
    description: str


@dataclasses.dataclass(frozen=True)
class Section:
    """One dataclass of the schema and the prefix of its fields on the command line, such as "model."."""

    name: str
    prefix: str
    description: str
    fields: tuple[Field, ...]


def read_sections() -> list[Section]:
    """Return every section of a run, in the order of the schema."""
    prefixes: dict[type, str] = {}
    for run in (schema.PretrainConfig, schema.FinetuneConfig):
        prefixes |= dict(_prefixes(run, ""))
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
            texts[ast.unparse(statement.target)] = _in_one_line(text)
    return texts


def _read_section(kind: type, node: ast.ClassDef, prefix: str) -> Section:
    return Section(
        name=node.name.lstrip("_"),
        prefix=prefix,
        description=_in_one_line(ast.get_docstring(node)),
        fields=tuple(_read_fields(kind, node)),
    )


def _read_fields(kind: type, node: ast.ClassDef) -> Iterator[Field]:
    hints = typing.get_type_hints(kind, include_extras=True)
    kinds_of_data = spell_quoted_forms()
    fields = {field.name: default_of_field(field) for field in dataclasses.fields(kind)}
    for name, template in describe_fields(node).items():
        text = template.replace("KINDS_OF_DATA", kinds_of_data)
        rules = [*rules_in(hints[name])]
        default = fields[name]
        component = next((f"{rule.name}: " for rule in rules if isinstance(rule, Component)), "")
        if component and not text[:2].isupper():  # "MLP of each block"
            text = text[0].lower() + text[1:]
        needed = " and ".join(rule.needed() for rule in rules if isinstance(rule, When))
        if default is dataclasses.MISSING:
            shown = None
        else:
            shown = (
                f"{type(default).__name__}()"
                if dataclasses.is_dataclass(default)
                else repr(default)
            )
        yield Field(
            name, _spelled(hints[name]), shown, f"{component}{text}{needed and f' Needs {needed}.'}"
        )


def _prefixes(kind: type, prefix: str) -> Iterator[tuple[type, str]]:
    """Yield a section, its base classes and all sections inside it, each with the prefix of its fields."""
    yield from ((base, prefix) for base in kind.__mro__ if dataclasses.is_dataclass(base))
    for name, hint in typing.get_type_hints(kind).items():
        is_mapping = typing.get_origin(hint) is Mapping
        for section in typing.get_args(hint) or (hint,):
            if dataclasses.is_dataclass(section):
                yield from _prefixes(
                    typing.cast(type, section), f"{prefix}{name}.{'NAME.' if is_mapping else ''}"
                )


def _spelled(hint: Any) -> str:
    """Return a type as Python writes it, with allowed values in place of `Literal` and ranges of numbers."""
    if hasattr(hint, "__metadata__"):
        interval = next(
            (rule.interval for rule in hint.__metadata__ if isinstance(rule, Range)), ""
        )
        signs = {"": "", "[0, inf)": " >= 0", "(0, inf)": " > 0", "[1, inf)": " >= 1"}
        return _spelled(hint.__origin__) + signs.get(interval, f" in {interval}")
    origin = typing.get_origin(hint)
    arguments = typing.get_args(hint)
    if origin is typing.Literal:
        return " | ".join(map(repr, arguments))
    if origin in (types.UnionType, typing.Union):
        return " | ".join(map(_spelled, arguments))
    if origin is not None:
        return f"{origin.__name__}[{', '.join(map(_spelled, arguments))}]"
    return {types.NoneType: "None", Ellipsis: "..."}.get(hint) or str(hint.__name__)


def _in_one_line(text: str | None) -> str:
    return " ".join((text or "").split())
