"""References to custom code: the text "package.module:name", and the object that it names.

A config accepts a reference in place of a built-in component. Nothing is imported until a run
starts.

References of the user (recipe, command line, Python) are imported. References in a file of weights
are imported only if the caller allows their package: readers of metadata mark them with
`mark_stored`.
"""

import contextlib
import importlib
import importlib.util
import inspect
import os
import re
import sys
import types
from collections.abc import Iterable, Iterator
from typing import Any

from vit_jax.imports.reference_form import is_reference
from vit_jax.text.nearest import did_you_mean

ALLOWED_VARIABLE = "VIT_JAX_ALLOW_CODE"
"""Environment variable with packages whose code every file may name, separated by commas."""

_PACKAGE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
_FEW_NAMES = 20
"""Number of names of a module that an error lists at most."""
_WAY_TO_MODULE = (
    " Run from the folder that contains it (of a trained network, the folder where it was "
    "trained), or add that folder to PYTHONPATH."
)


class CodeNotAllowed(ValueError):
    """A file names code of a package that the caller does not allow."""


class StoredReference(str):
    """A reference in the metadata of a file. `resolve` imports it only from an allowed package.

    Copies by `dataclasses`, `copy` and `pickle` stay marked. `str(reference)` is plain text: do not
    resolve that.

    Attributes:
      file: the file, for errors.
      field: the field of the metadata, such as "architecture.network".
      allowed: packages and references from `parse_allowed_code`.
    """

    file: str = "a file"
    field: str = ""
    allowed: tuple[str, ...] = ()

    def require_allowed(self, module: str | None = None) -> None:
        """Raise CodeNotAllowed unless the caller allows code of `module`.

        None stands for the module that the reference names.
        """
        if self in self.allowed:  # a reference that is allowed may be defined in any package
            return
        if module is None:
            module = self.partition(":")[0]
        if any(_is_inside(module, package) for package in self.allowed):
            return
        package = module.partition(".")[0]
        packages = [name for name in self.allowed if ":" not in name]
        packages.append(package)
        raise CodeNotAllowed(
            f"{self.field}={self!r}: {self.file} names code of {package}, which is not an allowed "
            f"package. If you trust that code, add --weights.allow_code={','.join(packages)} "
            f"(in Python: allow_code={tuple(packages)!r})."
        )


def _is_inside(module: str, package: str) -> bool:
    """Return True if a module is a package or below it."""
    return f"{module}.".startswith(f"{package}.")


def parse_allowed_code(allow_code: str | Iterable[str]) -> tuple[str, ...]:
    """Return the packages whose code files may name, those of `VIT_JAX_ALLOW_CODE` included.

    They are given as names or as a text with commas. A reference in the place of a package allows
    itself alone.

    Raises:
      ValueError: an entry is neither a package nor a reference.
    """
    if isinstance(allow_code, str):
        allow_code = allow_code.split(",")
    names = tuple(filter(None, allow_code))
    always_allowed = tuple(filter(None, os.environ.get(ALLOWED_VARIABLE, "").split(",")))
    _require_packages(names, "allow_code")
    _require_packages(always_allowed, ALLOWED_VARIABLE)
    return tuple(dict.fromkeys((*names, *always_allowed)))


def _require_packages(names: Iterable[object], field: str) -> None:
    """Raise ValueError for a name that is neither a package nor a reference."""
    for name in names:
        is_package = isinstance(name, str) and _PACKAGE.fullmatch(name)
        if not is_package and not is_reference(name):
            raise ValueError(
                f"{field}={name!r}: must be the name of a package. "
                "Write it as in an import: mypackage."
            )


def mark_stored(metadata: Any, file: str, allowed: tuple[str, ...]) -> Any:
    """Mark every reference in metadata from JSON, at any depth and in place; return the metadata.

    Args:
      metadata: dictionaries and lists.
      file: the file that has them, for errors.
      allowed: packages that the caller allows, from `parse_allowed_code`.
    """
    pending: list[tuple[str, Any]] = [("", metadata)]
    while pending:
        prefix, section = pending.pop()
        items = section.items() if isinstance(section, dict) else enumerate(section)
        for key, value in list(items):
            if isinstance(value, dict | list):
                pending.append((f"{prefix}{key}.", value))
            elif is_reference(value):
                reference = StoredReference(value)
                reference.file = file
                reference.field = f"{prefix}{key}"
                reference.allowed = allowed
                section[key] = reference
    return metadata


@contextlib.contextmanager
def explain_call(subject: str, arguments: str) -> Iterator[None]:
    """Add the arguments to the error of a call of user-defined code that does not accept them."""
    try:
        yield
    except TypeError as error:
        raise ValueError(f"{subject} cannot be called with {arguments}: {error}") from error


def resolve(text: str, field: str) -> Any:
    """Return the object that a reference names.

    Modules in the working directory are found after installed ones. The name may be an attribute of
    an attribute, "Class.method". `field` is the name of the option, for the error.

    Raises:
      CodeNotAllowed: a file names it, and the caller does not allow its package. Nothing is
        imported.
      ValueError: another form, no such module or name, or the module fails to import.
    """
    if not is_reference(text):
        raise ValueError(f"{field}={text!r} is not a reference: write package.module:name.")
    if isinstance(text, StoredReference):
        text.require_allowed()
    module_name, _, name = text.partition(":")
    value = _import_module(module_name, f"{field}={text!r}")
    for attribute in name.split("."):
        try:
            value = getattr(value, attribute)
        except AttributeError:
            known = _describe_names(name, module_name)
            raise ValueError(f"{field}={text!r}: {module_name} has no {name!r}{known}") from None
        if isinstance(text, StoredReference):
            # An allowed module may import others: mypackage:os.system.
            home = _find_home(value)
            if home is not None:
                text.require_allowed(home)
    return value


def _import_module(name: str, subject: str) -> Any:
    """Import a module; an error begins with the subject."""
    try:
        folder = os.getcwd()
        if folder not in sys.path and not _is_installed(name):
            sys.path.append(folder)  # last, so that a file here never hides an installed package
        return importlib.import_module(name)
    except Exception as error:
        is_missing = isinstance(error, ModuleNotFoundError) and _is_inside(name, f"{error.name}")
        if is_missing:
            reason = "there is no such module"
            fix = _WAY_TO_MODULE
        else:
            reason = f"importing it failed with {type(error).__name__}: {error}"
            fix = ""
        raise ValueError(
            f"{subject}: {reason}. Modules are looked for in the environment of this Python and "
            f"in the working directory, {os.getcwd()}.{fix}"
        ) from error


def _describe_names(name: str, module_name: str) -> str:
    """Return the end of a sentence with the nearest names of a module, or with all of few names."""
    public = [word for word in vars(sys.modules[module_name]) if not word.startswith("_")]
    hint = did_you_mean(name, public)
    has_many = len(public) > _FEW_NAMES
    if hint and has_many:
        return f".{hint}"
    listed = ", ".join(public[:_FEW_NAMES]) or "nothing"
    if has_many:
        listed += ", ..."
    return f"; it has {listed}.{hint}"


def _is_installed(module_name: str) -> bool:
    """Return True if the package is found without the working directory."""
    package = module_name.partition(".")[0]  # nothing is imported to find a top package
    try:
        spec = importlib.util.find_spec(package)
    except ValueError:  # the same as for __main__
        return False
    # A folder without __init__.py has no origin, and may go on in the working directory.
    return spec is not None and spec.origin is not None


def _find_home(value: object) -> str | None:
    """Return the module that defines a module, class or function; None for other objects."""
    if isinstance(value, types.ModuleType):
        return value.__name__
    if inspect.isclass(value) or inspect.isroutine(value):
        return getattr(value, "__module__", None) or "builtins"
    return None
