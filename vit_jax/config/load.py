"""From a recipe file and command-line overrides to a validated, frozen config, and to text and back.

A recipe's `get_config(argument)` returns one of the schema's dataclasses. Overrides go through
ml_collections' config_flags, which parses a value by the type of the field it replaces.
"""

import ast
import dataclasses
import json
import sys
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

from vit_jax.config import durations, schema
from vit_jax.config.recipes import names_in
from vit_jax.config.synonyms import absent, fields_meant, meant_value
from vit_jax.files import shortened
from vit_jax.references import is_reference

T = TypeVar("T")

_MOST_SHOWN = 200  # characters of a value in a message


def load_recipe(specification: str, overrides: Sequence[str] = ()) -> Any:
    """Loads "configs/x.py:ARGUMENT" and applies overrides such as "--config.model.width=64".

    Args:
      specification: path of a Python file that defines `get_config(argument: str)`, absolute or relative to the
        working directory or to the project, or the name of a recipe that comes with vit_jax ("digits"); after a colon,
        the recipe's argument.
      overrides: `--config.section.field=value`, in any order; later ones win.

    Returns:
      A frozen dataclass of `schema`, every field checked for name and type.

    Raises:
      ValueError: missing file, unknown field (the one that is meant is named), or a value of the wrong type.
    """
    path, _, argument = specification.partition(":")
    config = names_in(path)["get_config"](argument)
    if not dataclasses.is_dataclass(config):
        raise ValueError(
            f"{path}: get_config returned {type(config).__name__}, not a dataclass such as PretrainConfig."
        )
    values = to_dict(config)
    for override in overrides:
        _apply(override, values, type(config))
    return from_dict(type(config), values)


def load_studies(specification: str) -> Mapping[str, Mapping[str, Sequence[Any]]]:
    """`STUDIES` of a recipe's file: by study and option the values that suit its data; {} where it has none."""
    studies: Mapping[str, Mapping[str, Sequence[Any]]] = names_in(specification.partition(":")[0]).get("STUDIES", {})
    return studies


def to_dict(config: Any) -> dict[str, Any]:
    """A config as nested plain dictionaries; tuples stay tuples."""
    return dataclasses.asdict(config)


def to_text(config: Any) -> str:
    """One sorted `name: value` line for each field: what golden files and comparisons use."""
    return "".join(f"{name}: {json.dumps(value)}\n" for name, value in sorted(flatten(to_dict(config)).items()))


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested dictionaries as one, names joined by dots; an empty one is kept as the value {}."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        is_nested = isinstance(value, Mapping) and value
        flat.update(flatten(value, f"{prefix}{name}.") if is_nested else {prefix + name: value})
    return flat


def references(config: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Name and text of every reference in a config: of fields that may be one, whatever else looks like it."""
    for name, hint in typing.get_type_hints(type(config)).items():
        value = getattr(config, name)
        sections = value if _is_mapping(hint) else {"": value}
        for key, section in sections.items():
            if dataclasses.is_dataclass(section):
                yield from references(section, f"{prefix}{name}.{key}{'.' if key else ''}")
        texts = value if _is_list(hint) else (value,)
        if schema.Reference in (*_options(hint), *typing.get_args(hint)):
            yield from ((prefix + name, text) for text in texts if is_reference(text))


def from_dict(kind: type[T], values: Mapping[str, Any], prefix: str = "") -> T:
    """Builds the dataclass `kind` from nested dictionaries, checking every name and type.

    Raises:
      ValueError: unknown or missing field, or a value of the wrong type.
    """
    hints = typing.get_type_hints(kind)
    if not isinstance(values, Mapping):
        first = f"{prefix}{next(iter(hints))}"
        raise ValueError(f"config.{prefix.rstrip('.')}={values!r} is not a section of fields, such as config.{first}.")
    for name in sorted(values.keys() - hints.keys()):
        raise ValueError(_unknown(prefix + name, [prefix + known for known in hints]))
    absent = [field for field in dataclasses.fields(kind) if field.name not in values]  # type: ignore[arg-type]
    missing = [prefix + f.name for f in absent if f.default is f.default_factory is dataclasses.MISSING]
    if missing:
        raise ValueError(f"These fields have no default and must be given: {', '.join(missing)}.")
    return kind(**{name: _check_value(prefix + name, value, hints[name]) for name, value in values.items()})


def _apply(override: str, values: dict[str, Any], kind: type) -> None:
    """Parses the value by its field's type and sets it in the nested dictionaries of a config of this kind."""
    name, equals, text = override.removeprefix("--").removeprefix("config.").partition("=")
    *sections, field = name.split(".")
    hint: Any = kind
    for section in sections:
        hint = _hint_inside(hint, section, name, kind)
        values = values.setdefault(section, {})
    hint = _hint_inside(hint, field, name, kind)
    if dataclasses.is_dataclass(hint) or _is_mapping(hint):
        first = next(iter(typing.get_type_hints(hint))) if dataclasses.is_dataclass(hint) else "NAME"
        raise ValueError(f"config.{name} is a section: set one of its fields, such as config.{name}.{first}={text}.")
    if not equals:
        raise ValueError(f"--config.{name} needs a value: --config.{name}=VALUE.")
    values[field] = _parse(name, text, hint)


def _hint_inside(hint: Any, field: str, name: str, kind: type) -> Any:
    """The type of a field of a dataclass, or of every value of a mapping."""
    if _is_mapping(hint):
        return typing.get_args(hint)[1]
    hints = typing.get_type_hints(hint) if dataclasses.is_dataclass(hint) else {}
    if field not in hints:
        raise ValueError(_unknown(name, list(field_paths(kind))))
    return hints[field]


def field_paths(kind: Any, prefix: str = "") -> list[str]:
    """Names of all fields of a schema, sections joined by dots; those of a mapping's values under NAME."""
    names: list[str] = []
    for name, hint in typing.get_type_hints(kind).items():
        inner = typing.get_args(hint)[1] if _is_mapping(hint) else hint
        stem = f"{prefix}{name}.NAME" if _is_mapping(hint) else f"{prefix}{name}"
        names += field_paths(inner, f"{stem}.") if dataclasses.is_dataclass(inner) else [stem]
    return names


def _unknown(name: str, known: list[str]) -> str:
    near = fields_meant(name, known)
    hint = f"Did you mean {' or '.join(near)}?" if near else "`vit-jax show --config=RECIPE` prints all fields."
    hint = absent(name) or hint
    return f"There is no field {name!r} in the config. {hint}"


def _parse(name: str, text: str, hint: Any) -> Any:
    """A value from the command line; "None" unsets a field that may be unset."""
    options = _options(hint)
    if text == "None" and type(None) in options:
        return None
    if hint is Any:  # a number, True, None, a tuple and the like as Python writes them; anything else is text
        try:
            return ast.literal_eval(text)
        except (ValueError, SyntaxError):
            return text
    if _is_list(hint):
        return _parse_list(name, text, hint)
    from absl import flags  # here alone: a config that is made in Python needs neither
    from ml_collections import config_dict, config_flags

    reference = config_dict.FieldReference(None, field_type=_plain_type(hint))
    arguments, parsed = ["vit-jax", f"--config.value={text}"], config_dict.ConfigDict({"value": reference})
    flag_values = flags.FlagValues()
    config_flags.DEFINE_config_dict("config", parsed, flag_values=flag_values, sys_argv=arguments)
    try:
        flag_values(arguments)
    except (flags.Error, TypeError, ValueError):
        raise ValueError(f"config.{name}={text!r} has the wrong type: {_describe(hint)} is needed.") from None
    return parsed.value


def _plain_type(hint: Any) -> Any:
    kind = next(option for option in _options(hint) if option is not type(None))
    kind = type(typing.get_args(kind)[0]) if typing.get_origin(kind) is typing.Literal else kind
    return str if isinstance(kind, typing.NewType) else typing.get_origin(kind) or kind


def _options(hint: Any) -> tuple[Any, ...]:
    """What a union is made of; of any other type, itself."""
    return typing.get_args(hint) if typing.get_origin(hint) in (types.UnionType, typing.Union) else (hint,)


def _is_mapping(hint: Any) -> bool:
    return typing.get_origin(hint) is Mapping


def _is_list(hint: Any) -> bool:  # a tuple of any length
    return typing.get_origin(hint) is tuple and typing.get_args(hint)[-1] is Ellipsis


def _parse_list(name: str, text: str, hint: Any) -> tuple[Any, ...]:
    """Reads "0.01,0.03", with or without brackets and quotes around words."""
    words = [word.strip().strip("'\"") for word in text.strip().strip("()[]").split(",")]
    try:
        return tuple(_plain_type(typing.get_args(hint)[0])(word) for word in words if word)
    except ValueError:
        raise ValueError(f"config.{name}={text!r} has the wrong type: {_describe(hint)} is needed.") from None


def _check_value(name: str, value: Any, hint: Any) -> Any:
    """The value in the field's type; an int is taken for a float, a list for a tuple, one size for height and width."""
    if hint is Any:
        return _check_plain(name, value)
    if dataclasses.is_dataclass(hint):
        values = to_dict(value) if dataclasses.is_dataclass(value) else value
        return from_dict(typing.cast(type, hint), values, f"{name}.")
    if _is_mapping(hint) and isinstance(value, Mapping):
        return {key: _check_value(f"{name}.{key}", item, typing.get_args(hint)[1]) for key, item in value.items()}
    options = _options(hint)
    if value is None and type(None) in options:
        return None
    if schema.Duration in options and isinstance(value, str):
        try:
            durations.parse(value)
        except ValueError as error:
            raise ValueError(f"config.{name}: {error}") from None
        return value
    if schema.Reference in options and is_reference(value):
        return value
    literals = [option for option in options if typing.get_origin(option) is typing.Literal]
    if literals:
        known = typing.get_args(literals[0])
        if value in known:
            return value
        meant = meant_value(value, known)
        raise ValueError(f"config.{name}={_shown(value)} is not allowed: {_describe(hint)} is needed.{meant}")
    option = next(option for option in options if option is not type(None))
    if typing.get_origin(option) is tuple:
        kinds = typing.get_args(option)
        if kinds == (int, int):
            value = value if isinstance(value, (list, tuple)) else (value,)
            value = (*value, *value) if len(value) == 1 else value
        if _is_list(option) and isinstance(value, (list, tuple)):
            kinds = kinds[:1] * len(value)
        if isinstance(value, (list, tuple)) and len(value) == len(kinds):
            return tuple(_check_value(name, item, kind) for item, kind in zip(value, kinds, strict=True))
    elif option is float and isinstance(value, (int, float)) and not isinstance(value, bool):
        if not abs(value) <= sys.float_info.max:  # also whole numbers that no float can hold
            raise ValueError(f"config.{name}={_shown(value)} is not allowed: a finite number is needed.")
        return float(value)
    elif isinstance(option, type) and isinstance(value, option) and not (option is int and isinstance(value, bool)):
        return value
    raise ValueError(f"config.{name}={_shown(value)} has the wrong type: {_describe(hint)} is needed.")


def _shown(value: Any) -> str:
    """Return a value of a file as it can be printed: of bounded length."""
    return shortened(repr(value), _MOST_SHOWN)


def _check_plain(name: str, value: Any) -> Any:
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        raise ValueError(
            f"config.{name}={value!r} cannot be written to config.json: numbers, text, True, False, None, and tuples "
            "of these can."
        ) from None
    return value


def _describe(hint: Any) -> str:
    if hint is schema.Duration:
        return "a duration such as '500 steps' or '90 epochs'"
    if hint is schema.Reference:
        return "a reference package.module:name"
    if typing.get_origin(hint) is typing.Literal:
        return "one of " + ", ".join(repr(option) for option in typing.get_args(hint))
    if _is_list(hint):
        return f"values of type {_plain_type(typing.get_args(hint)[0]).__name__} with commas between them"
    if typing.get_origin(hint) is tuple:
        return "a tuple (" + ", ".join(kind.__name__ for kind in typing.get_args(hint)) + ")"
    if _is_mapping(hint):
        return "a section of names and values"
    if len(_options(hint)) > 1:
        return " or ".join("None" if option is type(None) else _describe(option) for option in _options(hint))
    return str(hint.__name__)
