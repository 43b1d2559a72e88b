"""Types of fields, as annotations state them."""

import functools
import types
import typing
from collections.abc import Mapping
from typing import Any

from vit_jax.config.rules import LastBlocks, Reference
from vit_jax.config.schema import Duration


def field_types(kind: Any) -> Mapping[str, Any]:
    """Return the types of the fields of a dataclass, without the rules that annotate them."""
    return _resolve_types(kind)


@functools.cache
def _resolve_types(kind: Any) -> Mapping[str, Any]:
    return typing.get_type_hints(kind)


def union_members(hint: object) -> tuple[object, ...]:
    """Return the members of a union; of any other type, itself."""
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        return typing.get_args(hint)
    return (hint,)


def allows_none(hint: object) -> bool:
    """Return True for a field that may be None."""
    return type(None) in union_members(hint)


def is_mapping(hint: object) -> bool:
    """Return True for a section of names and values."""
    return typing.get_origin(hint) is Mapping


def is_list(hint: object) -> bool:
    """Return True for a tuple of any length."""
    return typing.get_origin(hint) is tuple and typing.get_args(hint)[-1] is Ellipsis


def plain_type(hint: object) -> object:
    """Return the class of the values of a field, other than None."""
    member, *others = union_members(hint)
    if member is type(None):
        member = others[0]
    if isinstance(member, typing.NewType):
        return str
    if typing.get_origin(member) is typing.Literal:
        return type(typing.get_args(member)[0])
    return typing.get_origin(member) or member


_DESCRIPTIONS = {
    Duration: "a duration such as '500 steps' or '90 epochs'",
    Reference: "a reference package.module:name",
    LastBlocks: "'last:N' with a number of blocks",
    bool: "true or false",
    str: "text",
    type(None): "None",
}


def describe_type(hint: Any) -> str:
    """Return the values of a type in words, for errors."""
    if hint in _DESCRIPTIONS:
        return _DESCRIPTIONS[hint]
    origin = typing.get_origin(hint)
    arguments = typing.get_args(hint)
    if origin is typing.Literal:
        return "one of " + ", ".join(map(repr, arguments))
    if is_list(hint):
        return f"{describe_type(arguments[0])}, with commas between several"
    if origin is tuple:
        names = [kind.__name__ for kind in arguments]
        return f"a tuple ({', '.join(names)})"
    if is_mapping(hint):
        return "a section of names and values"
    members = union_members(hint)
    if len(members) > 1:
        return " or ".join(map(describe_type, members))
    return str(hint.__name__)
