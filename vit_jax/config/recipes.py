"""Files of recipes: found by path or name, and listed with their descriptions."""

import dataclasses
import inspect
import pathlib
import re
from typing import Any

from vit_jax.config import schema
from vit_jax.config.execution import import_beside, run_file
from vit_jax.storage.files import expand_path
from vit_jax.text.nearest import did_you_mean

_PACKAGE = pathlib.Path(__file__).parents[1]
_PROJECT = _PACKAGE.parent
FOLDERS = (_PROJECT / "configs", _PACKAGE / "recipes")
"""Folders of recipes: in a checkout, and in the installed package."""
COUNTERPARTS = {
    "vit_s16_i1k": "pretrain_s16_baseline",
    "vit_i1k": "pretrain_augreg:B/16,data=i1k",
    "transfer": "finetune:any,cifar10,rule=paper,crop=resize_short_side,test_resize=short_side",
    "vit": "finetune:ViT-B/16,cifar10",
    "augreg": "finetune:any,pets",
}
"""Names of configs of big_vision and vision_transformer, and recipes here, as in docs/migration.md."""
CONFIG_FILE = "config.json"
"""The config of a run, in its workdir."""


@dataclasses.dataclass(frozen=True)
class Recipe:
    """An installed recipe.

    Attributes:
      name: the name of its file.
      description: the first paragraph of its docstring, on one line.
      verb: "pretrain" or "finetune".
      argument: the form of the text after the colon.
      choices: values that the form refers to, by the name of the table in the file.
      data: `config.data` without an argument.
      total: `config.total` without an argument.
    """

    name: str
    description: str
    verb: str
    argument: str
    choices: dict[str, tuple[str, ...]]
    data: str | None
    total: str


def list_recipes() -> list[Recipe]:
    """Return all recipes that are installed, by name."""
    return [_describe(name, file) for name, file in sorted(find_recipe_files().items())]


def _describe(name: str, file: pathlib.Path) -> Recipe:
    names = run_recipe(file)
    form = _read_first_paragraph(names["get_config"].__doc__).removeprefix("Argument: ")
    config = names["get_config"]("")
    verb = "pretrain"
    if isinstance(config, schema.FinetuneConfig):
        verb = "finetune"

    choices = {}
    for table in re.findall(r"`(\w+)`", form):
        if table in names:
            choices[table] = tuple(map(_format_argument, names[table]))
    return Recipe(
        name=name,
        description=_read_first_paragraph(names.get("__doc__")),
        verb=verb,
        argument=form,
        choices=choices,
        data=config.data,
        total=config.total,
    )


def _read_first_paragraph(text: str | None) -> str:
    """Return the first paragraph of a docstring on one line."""
    paragraph = inspect.cleandoc(text or "").partition("\n\n")[0]
    return " ".join(paragraph.split())


def find_recipe_files() -> dict[str, pathlib.Path]:
    """Return the files of all recipes that are installed, by name; the checkout's come first."""
    files: dict[str, pathlib.Path] = {}
    for folder in reversed(FOLDERS):
        for file in folder.glob("*.py"):
            files[file.stem] = file
    return files


def run_recipe(file: pathlib.Path) -> dict[str, Any]:
    """Return the names that the file of a recipe defines, with their values.

    Raises:
      ValueError: it cannot be executed, or is not a recipe.
    """
    with import_beside(file, FOLDERS):
        names = run_file(file)
    if not callable(names.get("get_config")):
        raise ValueError(f"{file} is not a recipe: it defines no get_config(argument).")
    return names


def is_shipped(file: pathlib.Path) -> bool:
    """Return True for a recipe of the checkout or of the installed package."""
    return file.absolute().parent in FOLDERS


def find_file(path: str) -> pathlib.Path:
    """Return the file of a recipe: a path, or a name in the checkout or in the installed package.

    Raises:
      ValueError: there is no such recipe.
    """
    given = expand_path(path)
    candidates = [given, _PROJECT / path]
    for folder in FOLDERS:
        candidates.append(folder / f"{path}.py")
    for candidate in candidates:
        if candidate.suffix == ".py" and candidate.is_file():
            return candidate
    raise ValueError(_describe_missing(path, given))


def _describe_missing(path: str, given: pathlib.Path) -> str:
    """Return the error for a path that is no recipe, with what may be meant."""
    if path and (given / CONFIG_FILE).is_file():
        return f"There is no recipe {path!r}. For the config of this run use {given / CONFIG_FILE}."
    script = given.with_name(f"{given.name}.py") if given.name else given
    if script.is_file():
        return f"There is no recipe {path!r}. Use {script}."
    if path and given.is_dir():
        return f"There is no recipe {path!r}: it is a folder. Use the path of a file in it."
    counterpart = COUNTERPARTS.get(given.stem)
    if counterpart is not None:
        return (
            f"There is no recipe {path!r}. For the config of this name in big_vision or "
            f"vision_transformer use --config={counterpart} (docs/migration.md), or its file."
        )
    known = sorted(find_recipe_files())
    hint = did_you_mean(given.stem, known, "{}")
    return (
        f"There is no recipe {path!r}.{hint} Use the path of a file, or one of {', '.join(known)}."
    )


def _format_argument(row: object) -> str:
    """Return a row of a recipe's table as its argument; two values are a model and epochs."""
    if isinstance(row, tuple):
        return f"{row[0]},epochs={row[1]}"
    return str(row)
