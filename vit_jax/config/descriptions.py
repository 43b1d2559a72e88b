"""The fields of the schema with their types, defaults and descriptions, for the documentation and the command line.

A description is the string below a field in `schema.py`.
"""

import ast
import dataclasses
import inspect
import re
from collections.abc import Iterator, Mapping
from typing import Any

from vit_jax.config import schema

_RUNS = ("_AnyRun", "PretrainConfig", "FinetuneConfig")


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
    module = ast.parse(inspect.getsource(schema))
    choices = {  # name of a type: the values that it allows
        ast.unparse(node.targets[0]): node.value
        for node in module.body
        if isinstance(node, ast.Assign) and ast.unparse(node.value).startswith("Literal[")
    }
    classes = {node.name: node for node in module.body if isinstance(node, ast.ClassDef)}
    prefixes = {name: prefix for run in _RUNS for name, prefix in _prefixes(run, "", classes)}
    return [
        Section(
            name=name.lstrip("_"),
            prefix=prefixes[name],
            description=_in_one_line(ast.get_docstring(node)),
            fields=tuple(_read_fields(node, choices)),
        )
        for name, node in classes.items()
    ]


def describe_fields(node: ast.ClassDef) -> dict[str, str]:
    """Return the string below each annotated field of a class; "" for a field without one."""
    texts = {}
    for statement, below in zip(node.body, [*node.body[1:], None], strict=True):
        if isinstance(statement, ast.AnnAssign):
            is_text = isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
            texts[ast.unparse(statement.target)] = _in_one_line(below.value.value if is_text else "")  # type: ignore[union-attr]
    return texts


def _read_fields(node: ast.ClassDef, choices: Mapping[str, ast.expr]) -> Iterator[Field]:
    defaults = {field.name: _default(field) for field in dataclasses.fields(getattr(schema, node.name))}
    types = {ast.unparse(field.target): field.annotation for field in _annotated(node)}
    for name, description in describe_fields(node).items():
        yield Field(name, _type_of(types[name], choices), defaults[name], description)


def _annotated(node: ast.ClassDef) -> list[ast.AnnAssign]:
    return [statement for statement in node.body if isinstance(statement, ast.AnnAssign)]


def _prefixes(name: str, prefix: str, classes: Mapping[str, ast.ClassDef]) -> Iterator[tuple[str, str]]:
    """Yield a section and all sections inside it, each with the prefix of its fields."""
    yield name, prefix
    for field in _annotated(classes[name]):
        inner = {part.id for part in ast.walk(field.annotation) if isinstance(part, ast.Name)} & classes.keys()
        key = "NAME." if ast.unparse(field.annotation).startswith("Mapping[") else ""
        for section in inner:
            yield from _prefixes(section, f"{prefix}{ast.unparse(field.target)}.{key}", classes)


def _default(field: "dataclasses.Field[Any]") -> str | None:
    if field.default is field.default_factory is dataclasses.MISSING:
        return None
    value = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    return f"{type(value).__name__}()" if dataclasses.is_dataclass(value) else repr(value)


def _type_of(annotation: ast.expr, choices: Mapping[str, ast.expr]) -> str:
    """Return a type, with the allowed values in place of their name or `Literal`."""

    class Spelt(ast.NodeTransformer):
        def visit_Name(self, node: ast.Name) -> ast.expr:
            return choices.get(node.id, node)

    spelt = ast.unparse(Spelt().visit(annotation))
    return re.sub(r"Literal\[(.*?)\]", lambda match: match[1].replace(", ", " | "), spelt)


def _in_one_line(text: str | None) -> str:
    return " ".join((text or "").split())
