"""Parsing of recipe files and command-line overrides into a frozen config, and its text form.

A recipe returns one of the dataclasses of the schema. Overrides of scalar fields go through
ml_collections' config_flags; the type of a field checks values of the command line, of Python and of JSON.
"""

import ast
import contextlib
import dataclasses
import json
import sys
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

from vit_jax.config import schema
from vit_jax.config.durations import parse_duration
from vit_jax.config.field_checks import reject
from vit_jax.config.recipes import names_in
from vit_jax.config.rules import Reference
from vit_jax.config.synonyms import absent, fields_meant, meant_value
from vit_jax.imports.references import is_reference
from vit_jax.text.printable import shortened

T = TypeVar("T")

_MOST_SHOWN = 200  # characters of a value in a message


def load_recipe(specification: str, overrides: Sequence[str] = ()) -> Any:
    """Load "configs/x.py:ARGUMENT" and apply overrides such as "--config.model.width=64"; later ones win.

    Args:
      specification: path of a Python file that defines `get_config(argument: str)`, relative to the working directory
        or the project, or the name of an installed recipe ("digits"); after a colon, the recipe's argument.
      overrides: `--config.section.field=value`.

    Returns:
      A frozen dataclass of `schema`, every field checked for name and type.

    Raises:
      ValueError: missing file, unknown field, or a value of the wrong type.
    """
    path, _, argument = specification.partition(":")
    config = names_in(path)["get_config"](argument)
    if not dataclasses.is_dataclass(config):
        raise ValueError(
            f"{path}: get_config must return a config such as PretrainConfig, not {type(config).__name__}."
        )
    values = to_dict(config)
    for override in overrides:
        _apply(override, values, type(config))
    return from_dict(type(config), values)


def load_studies(specification: str) -> Mapping[str, Mapping[str, Sequence[Any]]]:
    """Return `STUDIES` of a recipe's file, by study and option the values that suit its data; {} without it."""
    studies: Mapping[str, Mapping[str, Sequence[Any]]] = names_in(
        specification.partition(":")[0]
    ).get("STUDIES", {})
    return studies


def to_dict(config: Any) -> dict[str, Any]:
    """Return a config as nested plain dictionaries; tuples stay tuples."""
    return dataclasses.asdict(config)


def to_text(config: Any) -> str:
    """Return a sorted `name: value` line for each field, for golden files and comparisons."""
    return "".join(
        f"{name}: {json.dumps(value)}\n" for name, value in sorted(flatten(to_dict(config)).items())
    )


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested dictionaries as one, names joined by dots; an empty one is kept as the value {}."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        is_nested = isinstance(value, Mapping) and value
        flat.update(flatten(value, f"{prefix}{name}.") if is_nested else {prefix + name: value})
    return flat


def references(config: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield name and text of every reference in a config, of fields that may be one."""
    for name, hint in typing.get_type_hints(type(config)).items():
        value = getattr(config, name)
        sections = value if _is_mapping(hint) else {"": value}
        for key, section in sections.items():
            if dataclasses.is_dataclass(section):
                yield from references(section, f"{prefix}{name}.{key}{'.' if key else ''}")
        texts = value if _is_list(hint) else (value,)
        elements = [option for item in typing.get_args(hint) for option in _options(item)]
        if Reference in (*_options(hint), *elements):
            yield from ((prefix + name, text) for text in texts if is_reference(text))


def from_dict(kind: type[T], values: Mapping[str, Any], prefix: str = "") -> T:
    """Build the dataclass `kind` from nested dictionaries; check every name and type.

    Raises:
      ValueError: unknown or missing field, or a value of the wrong type.
    """
    hints = typing.get_type_hints(kind)
    if not isinstance(values, Mapping):
        first = f"config.{prefix}{next(iter(kind.__annotations__))}"
        raise ValueError(
            f"config.{prefix.rstrip('.')}={values!r}: must be a section of fields, such as {first}."
        )
    known = [prefix + name for name in hints]
    reject((_unknown(prefix + name, known) for name in sorted(values.keys() - hints.keys())), "")
    absent = [field for field in dataclasses.fields(kind) if field.name not in values]  # type: ignore[arg-type]
    missing = [
        prefix + f.name for f in absent if f.default is f.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise ValueError(f"config: must have values of {', '.join(missing)}. Set them.")
    return kind(
        **{
            name: check_value(f"config.{prefix}{name}", value, hints[name])
            for name, value in values.items()
        }
    )


def _apply(override: str, values: dict[str, Any], kind: type) -> None:
    """Set the value of an override in the nested dictionaries of a config of this kind."""
    name, equals, text = override.removeprefix("--").removeprefix("config.").partition("=")
    *sections, field = name.split(".")
    hint: object = kind
    for section in sections:
        hint = _hint_inside(hint, section, name, kind)
        values = values.setdefault(section, {})
    hint = _hint_inside(hint, field, name, kind)
    if dataclasses.is_dataclass(hint) or _is_mapping(hint):
        first = next(iter(hint.__annotations__)) if dataclasses.is_dataclass(hint) else "NAME"
        raise ValueError(
            f"config.{name}: must not be set, as a section. Set a field, as config.{name}.{first}={text}."
        )
    if not equals:
        raise ValueError(f"--config.{name}: must have a value. Use --config.{name}=VALUE.")
    values[field] = _parse_override(text, hint)


def _hint_inside(hint: object, field: str, name: str, kind: type) -> object:
    """Return the type of a field of a dataclass, or of every value of a mapping."""
    if _is_mapping(hint):
        return typing.get_args(hint)[1]
    hints = typing.get_type_hints(hint) if dataclasses.is_dataclass(hint) else {}
    if field not in hints:
        raise ValueError(_unknown(name, list(field_paths(kind))))
    return hints[field]


def field_paths(kind: Any, prefix: str = "") -> list[str]:
    """Return the names of all fields of a schema, sections joined by dots; those of a mapping's values under NAME."""
    names: list[str] = []
    for name, hint in typing.get_type_hints(kind).items():
        inner = typing.get_args(hint)[1] if _is_mapping(hint) else hint
        stem = f"{prefix}{name}.NAME" if _is_mapping(hint) else f"{prefix}{name}"
        names += field_paths(inner, f"{stem}.") if dataclasses.is_dataclass(inner) else [stem]
    return names


def _unknown(name: str, known: list[str]) -> str:
    near = fields_meant(name, known)
    hint = (
        f"Did you mean {' or '.join(near)}?"
        if near
        else "`vit-jax show --config=RECIPE` prints all fields."
    )
    hint = absent(name) or hint
    return f"There is no field {name!r} in the config. {hint}"


def parse_text(text: str, hint: object) -> object:
    """Return a word of the command line in a type, or unchanged where `check_value` rejects it.

    "None" unsets a field that may be unset. A value of any type is written as in Python; all other words are text.
    """
    if text == "None" and type(None) in _options(hint):
        return None
    if _is_list(hint):
        words = [word.strip().strip("'\"") for word in text.strip().strip("()[]").split(",")]
        return tuple(parse_text(word, typing.get_args(hint)[0]) for word in words if word)
    kind = _plain_type(hint)
    if kind is str:
        return text
    if kind is bool:
        return {"true": True, "1": True, "false": False, "0": False}.get(text.lower(), text)
    for read in (ast.literal_eval, float):
        with contextlib.suppress(ValueError, SyntaxError):
            return read(text)
    return text


def _parse_override(text: str, hint: object) -> object:
    """Return the value of an override as ml_collections' config_flags parse it, else as `parse_text` does."""
    if hint is Any or _is_list(hint) or (text == "None" and type(None) in _options(hint)):
        return parse_text(text, hint)
    from absl import flags  # here alone: other options and configs made in Python need neither
    from ml_collections import config_dict, config_flags

    reference = config_dict.FieldReference(None, field_type=_plain_type(hint))
    arguments = ["vit-jax", f"--config.value={text}"]
    parsed = config_dict.ConfigDict({"value": reference})
    flag_values = flags.FlagValues()
    config_flags.DEFINE_config_dict("config", parsed, flag_values=flag_values, sys_argv=arguments)
    try:
        flag_values(arguments)
    except (flags.Error, TypeError, ValueError):
        return parse_text(text, hint)
    return parsed.value


def _plain_type(hint: object) -> object:
    kind = next(option for option in _options(hint) if option is not type(None))
    kind = type(typing.get_args(kind)[0]) if typing.get_origin(kind) is typing.Literal else kind
    return str if isinstance(kind, typing.NewType) else typing.get_origin(kind) or kind


def _options(hint: object) -> tuple[object, ...]:
    """Return the members of a union; of any other type, itself."""
    return (
        typing.get_args(hint)
        if typing.get_origin(hint) in (types.UnionType, typing.Union)
        else (hint,)
    )


def _is_mapping(hint: object) -> bool:
    return typing.get_origin(hint) is Mapping


def _is_list(hint: object) -> bool:  # a tuple of any length
    return typing.get_origin(hint) is tuple and typing.get_args(hint)[-1] is Ellipsis


def check_value(name: str, value: Any, hint: object) -> Any:
    """Return a value in the type of its field, converting int to float, list to tuple, one size to height and width.

    `value` is as Python, JSON or `parse_text` have it; `name` is for the error: "config.seed", "--steps".

    Raises:
      ValueError: the value is not of this type.
    """
    if hint is Any:
        return _check_plain(name, value)
    if dataclasses.is_dataclass(hint):
        values = to_dict(value) if dataclasses.is_dataclass(value) else value
        return from_dict(typing.cast(type, hint), values, f"{name.removeprefix('config.')}.")
    if _is_mapping(hint) and isinstance(value, Mapping):
        return {
            key: check_value(f"{name}.{key}", item, typing.get_args(hint)[1])
            for key, item in value.items()
        }
    options = _options(hint)
    rule = ""
    meant = ""
    if value is None and type(None) in options:
        return None
    if schema.Duration in options and isinstance(value, str):
        try:
            parse_duration(value)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
        return value
    if Reference in options and is_reference(value):
        return value
    set_options = [option for option in options if option is not type(None)]
    option = next(
        (one for one in set_options if typing.get_origin(one) is typing.Literal), set_options[0]
    )
    kinds = typing.get_args(option)
    if typing.get_origin(option) is typing.Literal:
        if value in kinds:
            return value
        meant = meant_value(value, kinds)
    elif typing.get_origin(option) is tuple:
        if kinds == (int, int):
            value = value if isinstance(value, (list, tuple)) else (value,)
            value = (*value, *value) if len(value) == 1 else value
        if _is_list(option) and isinstance(value, (list, tuple)):
            kinds = kinds[:1] * len(value)
        if isinstance(value, (list, tuple)) and len(value) == len(kinds):
            return tuple(
                check_value(name, item, kind) for item, kind in zip(value, kinds, strict=True)
            )
    elif option is float and isinstance(value, (int, float)) and not isinstance(value, bool):
        if abs(value) <= sys.float_info.max:  # not whole numbers that no float can hold
            return float(value)
        rule = "finite"
    elif (
        isinstance(option, type)
        and isinstance(value, option)
        and not (option is int and isinstance(value, bool))
    ):
        return value
    raise ValueError(
        f"{name}={shortened(repr(value), _MOST_SHOWN)}: must be {rule or _describe(hint)}.{meant}"
    )


def _check_plain(name: str, value: object) -> object:
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        allowed = "numbers, text, True, False, None, or tuples of these, for config.json"
        raise ValueError(f"{name}={value!r}: must be {allowed}.") from None
    return value


def _describe(hint: Any) -> str:
    if hint is schema.Duration:
        return "a duration such as '500 steps' or '90 epochs'"
    if hint is Reference:
        return "a reference package.module:name"
    if typing.get_origin(hint) is typing.Literal:
        return "one of " + ", ".join(repr(option) for option in typing.get_args(hint))
    if _is_list(hint):
        return f"{_describe(typing.get_args(hint)[0])}, with commas between several"
    if typing.get_origin(hint) is tuple:
        return "a tuple (" + ", ".join(kind.__name__ for kind in typing.get_args(hint)) + ")"
    if _is_mapping(hint):
        return "a section of names and values"
    if len(_options(hint)) > 1:
        return " or ".join(
            "None" if option is type(None) else _describe(option) for option in _options(hint)
        )
    return {int: "int", float: "float", str: "text", bool: "true or false"}.get(hint) or str(
        hint.__name__
    )
