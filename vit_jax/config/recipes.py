"""Files of recipes: found by path or name, executed, and listed with their descriptions."""

import dataclasses
import inspect
import pathlib
import re
import runpy
from typing import Any

from vit_jax.config import schema
from vit_jax.text.nearest import did_you_mean

_PACKAGE = pathlib.Path(__file__).parents[1]
_PROJECT = _PACKAGE.parent
_FOLDERS = (
    _PROJECT / "configs",
    _PACKAGE / "recipes",
)  # of a checkout, and of the installed package


@dataclasses.dataclass(frozen=True)
class Recipe:
    """An installed recipe; data and total are those without an argument."""

    name: str
    description: str
    verb: str  # "pretrain" or "finetune"
    argument: str  # form of the text after the colon
    choices: dict[
        str, tuple[str, ...]
    ]  # values that the form refers to, by the name of the table in the file
    data: str | None
    total: str


def list_recipes() -> list[Recipe]:
    """Return all recipes that are installed, by name."""
    return [_describe(name, file) for name, file in sorted(recipe_files().items())]


def _describe(name: str, file: pathlib.Path) -> Recipe:
    names = names_in(str(file))
    description = inspect.cleandoc(names.get("__doc__") or "").partition("\n\n")[0]
    form = (
        (names["get_config"].__doc__ or "").strip().partition("\n\n")[0].removeprefix("Argument: ")
    )
    tables = {table: names[table] for table in re.findall(r"`(\w+)`", form) if table in names}
    config = names["get_config"]("")
    return Recipe(
        name=name,
        description=" ".join(description.split()),
        verb="finetune" if isinstance(config, schema.FinetuneConfig) else "pretrain",
        argument=" ".join(form.split()),
        choices={table: tuple(map(_as_argument, rows)) for table, rows in tables.items()},
        data=config.data,
        total=config.total,
    )


def recipe_files() -> dict[str, pathlib.Path]:
    """Return the files of all recipes that are installed, by name."""
    return {file.stem: file for folder in reversed(_FOLDERS) for file in folder.glob("*.py")}


def names_in(path: str) -> dict[str, Any]:
    """Return what the file of a recipe defines, by name.

    Raises:
      ValueError: there is no such file, or it is not a recipe.
    """
    file = _find(path)
    names = runpy.run_path(str(file), run_name=f"recipe_{file.stem}")
    if "get_config" not in names:
        raise ValueError(f"{file} is not a recipe: it defines no get_config(argument).")
    return names


def _find(path: str) -> pathlib.Path:
    """Return the file of a recipe: a path, or a name of those in the checkout or in the installed package."""
    for candidate in (
        pathlib.Path(path),
        _PROJECT / path,
        *(folder / f"{path}.py" for folder in _FOLDERS),
    ):
        if candidate.suffix == ".py" and candidate.is_file():
            return candidate
    known = sorted(recipe_files())
    hint = did_you_mean(pathlib.Path(path).stem, known, "{}")
    raise ValueError(
        f"There is no recipe {path!r}.{hint} Use the path of a file, or one of {', '.join(known)}."
    )


def _as_argument(row: object) -> str:
    """Return a row of a recipe's table as its argument; a row of several values is a model and its epochs."""
    return f"{row[0]},epochs={row[1]}" if isinstance(row, tuple) else str(row)
