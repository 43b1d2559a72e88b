"""Execution of the Python file of a recipe, with errors of one line that name the file and the line.

Only a file that the user names is executed. It may import modules beside it and shipped recipes.
"""

import contextlib
import importlib
import importlib.abc
import importlib.machinery
import inspect
import pathlib
import runpy
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import ModuleType
from typing import Any

from vit_jax.text.printable import shorten

_MOST_SHOWN = 300  # characters of the message of an error
_FOREIGN_PACKAGE = "big_vision"
_FOLDER_NAME = "configs"
"""Name of the folder of recipes, here and in big_vision and vision_transformer."""
_PACKAGES = (_FOLDER_NAME, _FOREIGN_PACKAGE, f"{_FOREIGN_PACKAGE}.configs", "vit_jax.configs")
"""Packages by which recipes import modules beside them; installed packages come first."""


class _RecipePackages(importlib.abc.MetaPathFinder):
    """The packages `_PACKAGES`, as folders near the file of a recipe."""

    def __init__(self, file: pathlib.Path, shipped: Iterable[pathlib.Path]):
        folder = _find_configs_folder(file)
        self.folders: dict[str, list[pathlib.Path]] = {name: [folder] for name in _PACKAGES}
        self.folders[_FOREIGN_PACKAGE] = []
        self.folders[_FOLDER_NAME] = [*shipped]
        if folder.name == _FOLDER_NAME:
            self.folders[_FOREIGN_PACKAGE] = [folder.parent]
            self.folders[_FOLDER_NAME].insert(0, folder)
        self.found: set[str] = set()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the package of one of the names, without code; None for other names."""
        if fullname not in self.folders:
            return None
        if importlib.machinery.PathFinder.find_spec(fullname, path) is not None:
            return None  # it is installed
        spec = importlib.machinery.ModuleSpec(fullname, None, is_package=True)
        spec.submodule_search_locations = [*map(str, self.folders[fullname])]
        self.found.add(fullname)
        return spec

    def forget(self) -> None:
        """Remove the packages that were found, and their modules: another recipe has others."""
        for package in self.found:
            for name in list(sys.modules):
                if f"{name}.".startswith(f"{package}."):
                    del sys.modules[name]
            parent, _, child = package.rpartition(".")
            if parent in sys.modules:
                vars(sys.modules[parent]).pop(child, None)


def _find_configs_folder(file: pathlib.Path) -> pathlib.Path:
    """Return the folder `configs` that a file is in, at any depth, else its own folder."""
    for folder in file.absolute().parents:
        if folder.name == _FOLDER_NAME:
            return folder
    return file.absolute().parent


@contextlib.contextmanager
def import_beside(file: pathlib.Path, shipped: Iterable[pathlib.Path]) -> Iterator[None]:
    """Open a context in which a recipe can import modules beside it, and the shipped recipes."""
    packages = _RecipePackages(file, shipped)
    # Before the finder that explains names of vision_transformer's package.
    sys.meta_path.insert(0, packages)
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.meta_path.remove(packages)
        packages.forget()


def run_file(file: pathlib.Path) -> dict[str, Any]:
    """Return the names that a Python file defines, with their values.

    Raises:
      ValueError: it cannot be executed; the message has its line.
    """
    with _describe_errors(file):
        return runpy.run_path(str(file), run_name=f"recipe_{file.stem}")


def call_get_config(
    get_config: Callable[..., Any], file: pathlib.Path, argument: str, *, is_shipped: bool
) -> Any:
    """Return the config of a recipe.

    A function without a parameter is called without the argument. A parameter with a default gets
    it if the argument is empty.

    Raises:
      ValueError: the function fails, or takes no argument and there is one.
    """
    parameters = [*inspect.signature(get_config).parameters.values()]
    if argument and not parameters:
        raise ValueError(f"{file}:{argument}: get_config takes no argument. Use {file} alone.")

    arguments = [argument]
    hint = ""
    if not argument and (not parameters or parameters[0].default is not inspect.Parameter.empty):
        arguments = []
    elif not argument:
        hint = f" If it needs {parameters[0].name}, give it: {file}:{parameters[0].name.upper()}."
    with _describe_errors(file, hint, is_shipped=is_shipped):
        return get_config(*arguments)


@contextlib.contextmanager
def _describe_errors(
    file: pathlib.Path, hint: str = "", *, is_shipped: bool = False
) -> Iterator[None]:
    """Open a context that turns an error in a file into one line with the line of the file.

    The errors of shipped recipes about their argument stay.
    """
    try:
        yield
    except Exception as error:
        if is_shipped and isinstance(error, ValueError):
            raise
        message = shorten(" ".join(str(error).split()), _MOST_SHOWN)
        if not isinstance(error, ValueError):
            message = f"{type(error).__name__}: {message}"
        if isinstance(error, SyntaxError):
            message = f"SyntaxError: {error.msg}"
        if not message.endswith((".", "?")):
            message += "."
        hint += _suggest_module(error)
        raise ValueError(f"{file}{_find_line(error, file)}: {message}{hint}") from error


def _find_line(error: BaseException, file: pathlib.Path) -> str:
    """Return ", line N", the innermost line of a file at which an error was raised; "" without one."""
    if isinstance(error, SyntaxError) and error.filename == str(file):
        return f", line {error.lineno}"
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if frame.filename == str(file):
            return f", line {frame.lineno}"
    return ""


def _suggest_module(error: BaseException) -> str:
    """Return the fix for a module that a recipe imports and that does not exist."""
    if not isinstance(error, ModuleNotFoundError):
        return ""
    package, _, module = (error.name or "").rpartition(".")
    if package == _FOLDER_NAME:
        return " `vit-jax recipes` lists the recipes that can be imported from configs."
    if package in _PACKAGES:
        return f" Put {module}.py beside the recipe, or its package on PYTHONPATH."
    return " Install it, or put its folder on PYTHONPATH."
