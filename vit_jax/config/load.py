"""From a recipe file and command-line overrides to a checked, frozen config, and to text and back.

A recipe's `get_config(argument)` returns one of the schema's dataclasses. Overrides go through
ml_collections' config_flags, which parses a value by the type of the field it replaces.
"""

import dataclasses
import difflib
import importlib.util
import json
import math
import pathlib
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from absl import flags
from ml_collections import config_dict, config_flags

from vit_jax.config import durations, schema

T = TypeVar("T")


def load_recipe(specification: str, overrides: Sequence[str] = ()) -> Any:
    """Loads "configs/x.py:ARGUMENT" and applies overrides such as "--config.model.width=64".

    Args:
      specification: path of a Python file that defines `get_config(argument: str)`, absolute or relative
        to the working directory or to the project; after a colon, the recipe's argument.
      overrides: `--config.section.field=value`, in any order; later ones win.

    Returns:
      A frozen dataclass of `schema`, every field checked for name and type.

    Raises:
      ValueError: missing file, unknown field (the nearest is named), or a value of the wrong type.
    """
    path, _, argument = specification.partition(":")
    config = _import_file(_find(path)).get_config(argument)
    if not dataclasses.is_dataclass(config):
        raise ValueError(
            f"{path}: get_config returned {type(config).__name__}, not a dataclass such as PretrainConfig."
        )
    if not overrides:
        return from_dict(type(config), to_dict(config))
    known = to_dict(config)
    for override in overrides:
        _check_override(override, known)
    mutable = _to_config_dict(config)
    for override in overrides:  # one at a time, so that an error is the error of this one
        _apply(override, mutable, type(config))
    return from_dict(type(config), mutable.to_dict())


def to_dict(config: Any) -> dict[str, Any]:
    """A config as nested plain dictionaries; tuples stay tuples."""
    return {
        field.name: to_dict(value) if dataclasses.is_dataclass(value := getattr(config, field.name)) else value
        for field in dataclasses.fields(config)
    }


def to_text(config: Any) -> str:
    """One sorted `name: value` line for each field: what golden files and comparisons use."""
    return "".join(f"{name}: {json.dumps(value)}\n" for name, value in sorted(flatten(to_dict(config)).items()))


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested dictionaries as one, names joined by dots."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        flat.update(flatten(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {prefix + name: value})
    return flat


def from_dict(kind: type[T], values: Mapping[str, Any], prefix: str = "") -> T:
    """Builds the dataclass `kind` from nested dictionaries, checking every name and type.

    Raises:
      ValueError: unknown or missing field, or a value of the wrong type.
    """
    hints = typing.get_type_hints(kind)
    if not isinstance(values, Mapping):
        raise ValueError(f"config.{prefix.rstrip('.')}={values!r} is not a section; its fields: {', '.join(hints)}.")
    for name in sorted(values.keys() - hints.keys()):
        raise ValueError(_unknown(prefix + name, [prefix + known for known in hints]))
    arguments: dict[str, Any] = {}
    for name, hint in hints.items():
        if name not in values:
            continue
        if dataclasses.is_dataclass(hint):
            arguments[name] = from_dict(typing.cast(type, hint), values[name], f"{prefix}{name}.")
        else:
            arguments[name] = _check_value(prefix + name, values[name], hint)
    try:
        return kind(**arguments)
    except TypeError:
        missing = [prefix + name for name in _required(kind) if name not in values]
        raise ValueError(f"These fields have no default and must be given: {', '.join(missing)}.") from None


def _required(kind: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(kind) if field.default is dataclasses.MISSING]


def _find(path: str) -> pathlib.Path:
    project = pathlib.Path(__file__).parents[2]
    for candidate in (pathlib.Path(path), project / path):
        if candidate.is_file():
            return candidate
    known = sorted(str(recipe.relative_to(project)) for recipe in (project / "configs").glob("*.py"))
    near = difflib.get_close_matches(path, known, n=1)
    hint = f" Did you mean {near[0]}?" if near else ""
    raise ValueError(f"There is no recipe {path!r}.{hint} Recipes at hand: {', '.join(known) or 'none'}.")


def _import_file(path: pathlib.Path) -> types.ModuleType:
    specification = importlib.util.spec_from_file_location(f"recipe_{path.stem}", path)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    if not hasattr(module, "get_config"):
        raise ValueError(f"{path} is not a recipe: it defines no get_config(argument).")
    return module


def _to_config_dict(config: Any) -> config_dict.ConfigDict:
    values: dict[str, Any] = {}
    hints = typing.get_type_hints(type(config))
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            values[field.name] = _to_config_dict(value)
        elif type(None) in _options(hints[field.name]):  # a type of its own even while it is None
            reference = config_dict.FieldReference(value, field_type=_plain_type(hints[field.name]))
            values[field.name] = reference
        else:
            values[field.name] = value
    return config_dict.ConfigDict(values)


def _plain_type(hint: Any) -> Any:
    kind = next(option for option in _options(hint) if option is not type(None))
    return type(typing.get_args(kind)[0]) if typing.get_origin(kind) is typing.Literal else kind


def _options(hint: Any) -> tuple[Any, ...]:
    """What a union is made of; of any other type, itself."""
    return typing.get_args(hint) if typing.get_origin(hint) in (types.UnionType, typing.Union) else (hint,)


def _check_override(override: str, known: dict[str, Any]) -> None:
    name, equals, _ = override.removeprefix("--").removeprefix("config.").partition("=")
    flat = flatten(known)
    if name not in flat:
        inside = [field for field in flat if field.startswith(f"{name}.")]
        if inside:
            raise ValueError(f"config.{name} is a section; set one of its fields: {', '.join(inside)}.")
        raise ValueError(_unknown(name, list(flat)))
    if not equals:
        raise ValueError(f"--config.{name} needs a value: --config.{name}=VALUE.")


def _unknown(name: str, known: list[str]) -> str:
    same_leaf = [field for field in known if field.rpartition(".")[2] == name.rpartition(".")[2]]
    near = same_leaf + difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    hint = f" Nearest: {', '.join(dict.fromkeys(near))}." if near else f" Fields here: {', '.join(sorted(known))}."
    return f"There is no field {name!r} in the config.{hint}"


def _apply(override: str, mutable: config_dict.ConfigDict, kind: type) -> None:
    """Parses the value by its field's type and sets it; "None" unsets a field that may be unset."""
    name, _, text = override.removeprefix("--").removeprefix("config.").partition("=")
    hint = _hint_of(kind, name)
    if text == "None" and type(None) in _options(hint):
        mutable.update_from_flattened_dict({name: None})
        return
    if _is_list(hint):
        mutable.update_from_flattened_dict({name: _parse_list(name, text, hint)})
        return
    arguments = ["vit-jax", f"--config.{name}={text}"]
    flag_values = flags.FlagValues()
    config_flags.DEFINE_config_dict("config", mutable, flag_values=flag_values, sys_argv=arguments)
    try:
        flag_values(arguments)
    except (flags.Error, TypeError, ValueError):
        raise ValueError(f"config.{name}={text!r} has the wrong type: {_describe(hint)} is needed.") from None


def _is_list(hint: Any) -> bool:
    """Whether this is a tuple of any length."""
    return typing.get_origin(hint) is tuple and typing.get_args(hint)[-1] is Ellipsis


def _parse_list(name: str, text: str, hint: Any) -> tuple[Any, ...]:
    """Reads "0.01,0.03", with or without brackets and quotes around words."""
    words = [word.strip().strip("'\"") for word in text.strip().strip("()[]").split(",")]
    try:
        return tuple(typing.get_args(hint)[0](word) for word in words if word)
    except ValueError:
        raise ValueError(f"config.{name}={text!r} has the wrong type: {_describe(hint)} is needed.") from None


def _hint_of(kind: type, name: str) -> Any:
    for part in name.split("."):
        kind = typing.get_type_hints(kind)[part]
    return kind


def _check_value(name: str, value: Any, hint: Any) -> Any:
    """The value in the field's type; an int is taken for a float and a list for a tuple."""
    options = _options(hint)
    if value is None and type(None) in options:
        return None
    declared, hint = hint, next(option for option in options if option is not type(None))
    if hint is schema.Duration:
        if not isinstance(value, str):
            raise ValueError(f"config.{name}={value!r} has the wrong type: {_describe(hint)} is needed.")
        try:
            durations.parse(value)
        except ValueError as error:
            raise ValueError(f"config.{name}: {error}") from None
        return value
    if typing.get_origin(hint) is typing.Literal:
        if value not in typing.get_args(hint):
            raise ValueError(f"config.{name}={value!r} is not allowed: {_describe(declared)} is needed.")
        return value
    if typing.get_origin(hint) is tuple:
        kinds = typing.get_args(hint)
        if _is_list(hint) and isinstance(value, (list, tuple)):
            kinds = kinds[:1] * len(value)
        if isinstance(value, (list, tuple)) and len(value) == len(kinds):
            return tuple(_check_value(name, item, kind) for item, kind in zip(value, kinds, strict=True))
    elif hint is float and isinstance(value, (int, float)) and not isinstance(value, bool):
        if not math.isfinite(value):
            raise ValueError(f"config.{name}={value!r} is not allowed: a finite number is needed.")
        return float(value)
    elif isinstance(value, hint) and not (hint is int and isinstance(value, bool)):
        return value
    raise ValueError(f"config.{name}={value!r} has the wrong type: {_describe(declared)} is needed.")


def _describe(hint: Any) -> str:
    if hint is schema.Duration:
        return "a duration such as '500 steps' or '90 epochs'"
    if typing.get_origin(hint) is typing.Literal:
        return "one of " + ", ".join(repr(option) for option in typing.get_args(hint))
    if _is_list(hint):
        return f"values of type {typing.get_args(hint)[0].__name__} with commas between them"
    if typing.get_origin(hint) is tuple:
        return "a tuple (" + ", ".join(kind.__name__ for kind in typing.get_args(hint)) + ")"
    if len(_options(hint)) > 1:
        return " or ".join("None" if option is type(None) else _describe(option) for option in _options(hint))
    return str(hint.__name__)
