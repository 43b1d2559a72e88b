"""Parsing of dictionaries and command-line overrides into a frozen config, and its text form.

The type of a field checks values of the command line, of Python and of JSON; `value_text` reads
those of the command line. `specification` reads recipes.
"""

import dataclasses
import json
import sys
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from vit_jax.config.durations import parse_duration, split_duration
from vit_jax.config.hints import describe_type, field_types, is_list, is_mapping, union_members
from vit_jax.config.rules import LastBlocks, Reference, count_last_blocks
from vit_jax.config.schema import Duration
from vit_jax.config.synonyms import find_advice, find_meant_fields, suggest_value
from vit_jax.config.value_text import parse_override
from vit_jax.imports.reference_form import is_reference
from vit_jax.text.printable import shorten

T = TypeVar("T")

_MOST_SHOWN = 200  # characters of a value in a message
_NOT_CONVERTED = object()
"""Result of a conversion for a value of another type."""


def to_dict(config: Any) -> dict[str, Any]:
    """Return a config as nested plain dictionaries; tuples stay tuples."""
    return dataclasses.asdict(config)


def to_text(config: Any) -> str:
    """Return a sorted `name: value` line for each field, for golden files and comparisons."""
    text = ""
    for name, value in sorted(flatten(to_dict(config)).items()):
        text += f"{name}: {json.dumps(value)}\n"
    return text


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested dictionaries as one, names joined by dots; the value {} stays."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value
    return flat


def is_within(name: str, fields: Iterable[str]) -> bool:
    """Return True if a name of `flatten` is one of these fields, or in one of these sections."""
    return f"{name}.".startswith(tuple(f"{field}." for field in fields))


def find_references(config: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield the name and the text of every reference in a config."""
    for name, hint in field_types(type(config)).items():
        value = getattr(config, name)
        path = f"{prefix}{name}"
        if is_mapping(hint):
            for key, section in value.items():
                if dataclasses.is_dataclass(section):
                    yield from find_references(section, f"{path}.{key}.")
        elif dataclasses.is_dataclass(value):
            yield from find_references(value, f"{path}.")
        if _allows_reference(hint):
            texts = value if is_list(hint) else (value,)
            for text in texts:
                if is_reference(text):
                    yield path, text


def _allows_reference(hint: object) -> bool:
    """Return True for a field that may be a reference, or have one in a list."""
    if Reference in union_members(hint):
        return True
    return any(Reference in union_members(item) for item in typing.get_args(hint))


def from_dict(kind: type[T], values: Mapping[str, Any], prefix: str = "") -> T:
    """Build the dataclass `kind` from nested dictionaries; check every name and type.

    Raises:
      ValueError: unknown or missing field, or a value of the wrong type.
    """
    if not isinstance(values, Mapping):
        section = prefix.rstrip(".")
        first = f"config.{prefix}{next(iter(kind.__annotations__))}"
        rule = f"must be a section of fields, such as {first}"
        raise ValueError(f"config.{section}={values!r}: {rule}.")

    hints = field_types(kind)
    unknown = sorted(values.keys() - hints.keys())
    if unknown:
        known = [prefix + name for name in hints]
        raise ValueError(_describe_unknown(prefix + unknown[0], known))
    missing = [prefix + name for name in _list_required(kind) if name not in values]
    if missing:
        raise ValueError(f"config: must have values of {', '.join(missing)}. Set them.")

    checked = {}
    for name, value in values.items():
        checked[name] = check_value(f"config.{prefix}{name}", value, hints[name])
    return kind(**checked)


def _list_required(kind: Any) -> list[str]:
    """Return the names of the fields of a dataclass that have no default."""
    names = []
    for field in dataclasses.fields(kind):
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            names.append(field.name)
    return names


def apply_override(override: str, values: dict[str, Any], kind: type) -> None:
    """Set the value of an override in the nested dictionaries of a config of this kind."""
    name, equals, text = override.removeprefix("--").removeprefix("config.").partition("=")
    section, field, hint = _locate_field(name, values, kind)
    if is_section(hint):
        raise ValueError(_describe_section(name, hint, text))
    if not equals:
        raise ValueError(f"--config.{name}: must have a value. Use --config.{name}=VALUE.")
    section[field] = parse_override(text, hint)


def apply_change(name: str, value: Any, values: dict[str, Any], kind: type) -> None:
    """Set the value of a field of Python in the nested dictionaries of a config of this kind."""
    section, field, hint = _locate_field(name.removeprefix("config."), values, kind)
    if dataclasses.is_dataclass(hint) and isinstance(value, Mapping):
        raise ValueError(_describe_section(name, hint, "VALUE"))
    section[field] = value


def is_section(hint: object) -> bool:
    """Return True for a field that holds other fields."""
    return dataclasses.is_dataclass(hint) or is_mapping(hint)


def _locate_field(
    name: str, values: dict[str, Any], kind: type
) -> tuple[dict[str, Any], str, object]:
    """Return the section of a field in the nested dictionaries, its name there and its type."""
    *sections, field = name.split(".")
    hint: object = kind
    for section in sections:
        hint = _find_hint(hint, section, name, kind)
        values = values.setdefault(section, {})
    return values, field, _find_hint(hint, field, name, kind)


def _describe_section(name: str, hint: object, text: str) -> str:
    """Return the error for a value in the place of a section."""
    first = "NAME"
    if dataclasses.is_dataclass(hint):
        first = next(iter(hint.__annotations__))
    fix = f"Set a field, as config.{name}.{first}={text}"
    return f"config.{name}: must not be set, as a section. {fix}."


def _find_hint(hint: object, field: str, name: str, kind: type) -> object:
    """Return the type of a field of a dataclass, or of every value of a mapping.

    Raises:
      ValueError: there is no such field; `name` is its complete path, `kind` the whole config.
    """
    if is_mapping(hint):
        return typing.get_args(hint)[1]
    if dataclasses.is_dataclass(hint):
        hints = field_types(hint)
        if field in hints:
            return hints[field]
    raise ValueError(_describe_unknown(name, list_field_paths(kind)))


def list_field_paths(kind: Any, prefix: str = "") -> list[str]:
    """Return the names of all fields of a schema, joined by dots.

    Fields of the values of a mapping are under NAME.
    """
    names: list[str] = []
    for name, hint in field_types(kind).items():
        path = f"{prefix}{name}"
        if is_mapping(hint):
            path = f"{path}.NAME"
            hint = typing.get_args(hint)[1]
        if dataclasses.is_dataclass(hint):
            names += list_field_paths(hint, f"{path}.")
        else:
            names.append(path)
    return names


def _describe_unknown(name: str, known: list[str]) -> str:
    """Return the error for a field that does not exist, with the fields that may be meant."""
    near = find_meant_fields(name, known)
    advice = find_advice(name)
    if advice is None and near:
        advice = f"Did you mean {' or '.join(near)}?"
    if advice is None:
        advice = "`vit-jax show --config=RECIPE` prints all fields."
    return f"There is no field {name!r} in the config. {advice}"


def check_value(name: str, value: Any, hint: object) -> Any:
    """Return a value in the type of its field.

    Whole numbers become floats, lists tuples, one size height and width.

    Args:
      name: name of the option, for the error: "config.seed", "--steps".
      value: from Python, JSON or `parse_text`.
      hint: type of the field.

    Raises:
      ValueError: the value is not of this type.
    """
    if hint is Any:
        return _check_plain(name, value)
    if dataclasses.is_dataclass(hint):
        return _check_section(name, value, typing.cast(type, hint))
    if is_mapping(hint) and isinstance(value, Mapping):
        inner = typing.get_args(hint)[1]
        checked = {}
        for key, item in value.items():
            checked[key] = check_value(f"{name}.{key}", item, inner)
        return checked
    return _check_member(name, value, hint)


def _check_section(name: str, value: Any, kind: type) -> Any:
    """Return a section, from a dictionary or from a dataclass, as this dataclass."""
    if dataclasses.is_dataclass(value):
        value = to_dict(value)
    return from_dict(kind, value, f"{name.removeprefix('config.')}.")


def _check_member(name: str, value: Any, hint: object) -> Any:
    """Return a value in the member of a union that it belongs to."""
    members = union_members(hint)
    if value is None and type(None) in members:
        return None
    if Duration in members and isinstance(value, str):
        return _check_duration(name, value)
    if Reference in members and is_reference(value):
        return value
    if LastBlocks in members and count_last_blocks(value):
        return value

    member = _choose_member(members)
    converted = _convert(name, value, member)
    if converted is not _NOT_CONVERTED:
        return converted

    shown = shorten(repr(value), _MOST_SHOWN)
    if member is float and _is_number(value):
        raise ValueError(f"{name}={shown}: must be finite.")
    meant = ""
    if typing.get_origin(member) is typing.Literal:
        meant = suggest_value(value, typing.get_args(member))
    raise ValueError(f"{name}={shown}: must be {describe_type(hint)}.{meant}")


def _choose_member(members: Sequence[object]) -> object:
    """Return the allowed values of a union, or its first type."""
    types_without_none = [member for member in members if member is not type(None)]
    for member in types_without_none:
        if typing.get_origin(member) is typing.Literal:
            return member
    return types_without_none[0]


def _convert(name: str, value: Any, kind: object) -> Any:
    """Return a value in this type, or `_NOT_CONVERTED`."""
    origin = typing.get_origin(kind)
    if origin is tuple:
        return _convert_tuple(name, value, kind)
    if origin is typing.Literal:
        is_allowed = value in typing.get_args(kind)
        return value if is_allowed else _NOT_CONVERTED
    if kind is float and _is_number(value):
        fits_float = abs(value) <= sys.float_info.max  # whole numbers may be larger
        return float(value) if fits_float else _NOT_CONVERTED
    if kind is int and isinstance(value, bool):
        return _NOT_CONVERTED
    if isinstance(kind, type) and isinstance(value, kind):
        return value
    return _NOT_CONVERTED


def _convert_tuple(name: str, value: Any, kind: object) -> Any:
    """Return a list or tuple as a tuple with checked items; one size as height and width."""
    kinds = typing.get_args(kind)
    if kinds == (int, int) and not isinstance(value, (list, tuple)):
        value = (value, value)
    elif kinds == (int, int) and len(value) == 1:
        value = (*value, *value)
    if not isinstance(value, (list, tuple)):
        return _NOT_CONVERTED
    if is_list(kind):
        kinds = kinds[:1] * len(value)
    if len(value) != len(kinds):
        return _NOT_CONVERTED

    items = []
    for item, item_kind in zip(value, kinds, strict=True):
        items.append(check_value(name, item, item_kind))
    return tuple(items)


def _is_number(value: object) -> bool:
    """Return True for an int or a float; a bool is no number."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _check_duration(name: str, value: str) -> str:
    """Return the text of a duration, with one blank before the unit.

    Raises:
      ValueError: it is none.
    """
    try:
        parse_duration(value)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    number, unit = split_duration(value)
    return f"{number} {unit}"


def _check_plain(name: str, value: object) -> object:
    """Return a value of any type that config.json can store.

    Raises:
      ValueError: JSON has no such value.
    """
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        allowed = "numbers, text, True, False, None, or tuples of these, for config.json"
        raise ValueError(f"{name}={value!r}: must be {allowed}.") from None
    return value
