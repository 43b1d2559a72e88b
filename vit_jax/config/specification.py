"""The config that `--config=` names: a recipe in Python, or a config as JSON.

`recipes` finds the file of a recipe, `execution` executes it, `migration` converts a config of
another system.
"""

import dataclasses
import json
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from vit_jax.config.execution import call_get_config, import_beside
from vit_jax.config.parsing import apply_change, apply_override, flatten, from_dict, to_dict
from vit_jax.config.recipes import FOLDERS, find_file, is_shipped, run_recipe
from vit_jax.config.schema import FinetuneConfig, PretrainConfig, RunConfig
from vit_jax.storage.files import JsonObject, expand_path, read_json, reject_bucket

if TYPE_CHECKING:
    from vit_jax.config.migration.convert import Conversion

T = TypeVar("T")

REQUESTED = "requested"
"""Name in `config.json` of the requested values of fields that the run has resolved."""


def load_recipe(specification: str, overrides: Sequence[str] = ()) -> Any:
    """Load "configs/x.py:ARGUMENT", "digits" or "runs/a/config.json", and apply overrides.

    Args:
      specification: path of a Python file that defines `get_config(argument: str)`, relative to the
        working directory or the project, or the name of an installed recipe ("digits"); after a
        colon, the recipe's argument. The config may be of big_vision or vision_transformer. Or path
        of a config as JSON, from `vit-jax show --json` or from a workdir.
      overrides: `--config.section.field=value`, such as "--config.model.width=64"; later ones win.

    Returns:
      A frozen dataclass of `schema`, every field checked for name and type.

    Raises:
      ValueError: missing file, unknown field, or a value of the wrong type.
    """
    config, _ = _read_config(specification)
    values = to_dict(config)
    for override in overrides:
        apply_override(override, values, type(config))
    return from_dict(type(config), values)


def derive(config: T, changes: Mapping[str, Any]) -> T:
    """Return a config with other values of some fields: {"model.width": 96, "total": "20 epochs"}.

    A whole section is replaced by a section: {"schedule": ScheduleConfig(...)}.

    Raises:
      ValueError: unknown field, or a value of the wrong type.
    """
    values = to_dict(config)
    for name, value in changes.items():
        apply_change(name, value, values, type(config))
    return from_dict(type(config), values)


def load_studies(specification: str) -> Mapping[str, Mapping[str, Sequence[Any]]]:
    """Return `STUDIES` of a recipe's file: the values that suit its data, by study and option.

    Return {} for a recipe without studies.
    """
    path, _ = _split_specification(specification)
    if _is_json(path):
        return {}
    studies: Mapping[str, Mapping[str, Sequence[Any]]] = run_recipe(find_file(path)).get(
        "STUDIES", {}
    )
    return studies


def find_open_rule(specification: str) -> str | None:
    """Return a recipe up to the name of its rule, if it leaves this to the family of the weights.

    The file of such a recipe defines `find_open_rule(argument)`. Return None for other recipes,
    and for one that does not exist: `load_recipe` rejects it after the verb has examined its outputs.
    """
    path, argument = _split_specification(specification)
    if _is_json(path):
        return None
    try:
        file = find_file(path)
    except ValueError:
        return None
    find = run_recipe(file).get("find_open_rule")
    if find is None:
        return None
    completed = find(argument)
    if completed is None:
        return None
    return f"{path}:{completed}"


def describe_conversion(specification: str) -> str:
    """Return a line on the fields of another system that a recipe sets without effect; "" without."""
    _, conversion = _read_config(specification)
    if conversion is None or not conversion.ignored:
        return ""
    fields = ", ".join(conversion.ignored)
    return f"{specification} is of {conversion.system}; fields without effect here: {fields}"


def store_config(config: RunConfig, requested: RunConfig) -> JsonObject:
    """Return the content of `config.json`: the config of a run, and what it resolved.

    Args:
      config: the config with which the run computes.
      requested: the config that was requested, with `auto` where the run chooses a value.
    """
    values = to_dict(config)
    resolved = flatten(json.loads(json.dumps(values)))
    differences = {}
    for name, value in flatten(json.loads(json.dumps(to_dict(requested)))).items():
        if name in resolved and resolved[name] != value:
            differences[name] = value
    if differences:
        values[REQUESTED] = differences
    return values


def _read_config(specification: str) -> tuple[RunConfig, "Conversion | None"]:
    """Return the config of a recipe or of a JSON file, and its conversion if it is foreign."""
    path, argument = _split_specification(specification)
    if _is_json(path):
        if argument:
            raise ValueError(f"{specification}: a JSON file takes no argument. Use {path} alone.")
        return _read_json_config(path), None

    file = find_file(path)
    names = run_recipe(file)
    with import_beside(file, FOLDERS):
        config = call_get_config(names["get_config"], file, argument, is_shipped=is_shipped(file))
    if _is_config_dict(config):
        # Imported on use: other recipes do without eight modules.
        from vit_jax.config.migration.convert import convert

        try:
            conversion = convert(config)
        except Exception as error:
            message = " ".join(str(error).split()).rstrip(".")
            raise ValueError(f"{path}: {message}.") from error
        return conversion.config, conversion
    if not isinstance(config, RunConfig):
        kind = type(config).__name__
        raise ValueError(
            f"{path}: get_config must return a config such as PretrainConfig, not {kind}."
        )
    return config, None


def _is_config_dict(value: object) -> bool:
    """Return True for a ConfigDict; whoever made one has imported its library."""
    library = sys.modules.get("ml_collections")
    return library is not None and isinstance(value, library.ConfigDict)


def _split_specification(specification: str) -> tuple[str, str]:
    """Return the path and the argument of "PATH:ARGUMENT".

    Raises:
      ValueError: it is an address of a bucket.
    """
    reject_bucket(specification, f"--config={specification}")
    path, _, argument = specification.partition(":")
    return path, argument


def _is_json(path: str) -> bool:
    return pathlib.PurePath(path).suffix == ".json"


def _read_json_config(path: str) -> RunConfig:
    """Return the config in a JSON file, with the values that were requested.

    Raises:
      ValueError: the file cannot be read, or is no config; the message names it.
    """
    values = read_json(expand_path(path))
    names = {field.name for field in dataclasses.fields(PretrainConfig)}
    if not isinstance(values, dict) or not names & values.keys():
        source = "config.json of a workdir, or from vit-jax show --json"
        raise ValueError(f"{path}: must be the config of a run: {source}.")

    kind: type[RunConfig] = PretrainConfig
    if "search" in values:
        kind = FinetuneConfig
    requested = values.pop(REQUESTED, {})
    try:
        if not isinstance(requested, dict):
            raise ValueError(f"{REQUESTED} must be an object of fields and values.")
        for name, value in requested.items():
            apply_change(name, value, values, kind)
        return from_dict(kind, values)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
