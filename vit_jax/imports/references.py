"""References to a user's own code: the text "package.module:name" in a config, and the object that it names.

Wherever a config names a built-in component, it also takes such a reference. Nothing is imported until a run starts.

Who wrote a reference decides whether it is imported. Text of the user (recipe, command line, Python) is. Text of a file
of weights is not, unless the caller allows its package: readers of metadata mark it with `mark_stored`.
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

from vit_jax.text.nearest import did_you_mean

_FORM = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
_PACKAGE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


_FEW_NAMES = 20  # of a module, which an error lists
_ELSEWHERE = (
    " Run from the folder that contains it (of a trained network, the folder where it was trained), or add that folder "
    "to PYTHONPATH."
)


class CodeNotAllowed(ValueError):
    """A file names code of a package that the caller does not allow."""


class StoredReference(str):
    """A reference in the metadata of a file. `resolve` imports it only from an allowed package.

    Copies by `dataclasses`, `copy` and `pickle` stay marked. `str(reference)` is plain text: do not resolve that.
    """

    file: str = "a file"
    field: str = ""  # where the metadata has it, "architecture.network"
    allowed: tuple[str, ...] = ()  # as from `allowed_code`

    def require_allowed(self, module: str | None = None) -> None:
        """Raise CodeNotAllowed unless the caller allows code of `module`; None: the module that it names."""
        module = self.partition(":")[0] if module is None else module
        # A reference that is itself allowed need not be defined in an allowed package.
        if self in self.allowed or any(
            f"{module}.".startswith(f"{package}.") for package in self.allowed
        ):
            return
        package = module.partition(".")[0]
        packages = [name for name in self.allowed if ":" not in name] + [package]
        raise CodeNotAllowed(
            f"{self.field}={self!r}: {self.file} names code of {package}, which is not an allowed package. If you "
            f"trust that code, add --allow_code={','.join(packages)} (in Python: allow_code={tuple(packages)!r})."
        )


def allowed_code(allow_code: str | Iterable[str]) -> tuple[str, ...]:
    """Packages whose code files may name: a tuple, or text with commas between them. A reference allows itself alone.

    Raises:
      ValueError: an entry is neither a package nor a reference.
    """
    names = allow_code.split(",") if isinstance(allow_code, str) else list(allow_code)
    for name in filter(None, names):
        if not isinstance(name, str) or not (_PACKAGE.fullmatch(name) or is_reference(name)):
            raise ValueError(
                f"allow_code={name!r}: must be the name of a package. Write it as in an import: mypackage."
            )
    return tuple(filter(None, names))


def mark_stored(metadata: Any, file: str, allowed: tuple[str, ...]) -> Any:
    """Mark every reference in the metadata of a file, from JSON, at any depth and in place; return the metadata.

    `file` is for errors, `allowed` the packages that the caller allows, from `allowed_code`.
    """
    pending: list[tuple[str, Any]] = [("", metadata)]
    while pending:
        prefix, section = pending.pop()
        for key, value in list(
            section.items() if isinstance(section, dict) else enumerate(section)
        ):
            if isinstance(value, dict | list):
                pending.append((f"{prefix}{key}.", value))
            elif is_reference(value):
                section[key] = reference = StoredReference(value)
                reference.file = file
                reference.field = f"{prefix}{key}"
                reference.allowed = allowed
    return metadata


def is_reference(text: object) -> bool:
    """Return whether this is text of the form "package.module:name"."""
    return isinstance(text, str) and _FORM.fullmatch(text) is not None


@contextlib.contextmanager
def called(subject: str, arguments: str) -> Iterator[None]:
    """Context of a call of user-defined code: add the arguments to an error if they do not suit it."""
    try:
        yield
    except TypeError as error:
        raise ValueError(f"{subject} cannot be called with {arguments}: {error}") from error


def resolve(text: str, field: str) -> Any:
    """Import what a reference names; modules in the working directory are found after installed ones.

    The name may be an attribute of an attribute, "Class.method"; `field` is that of the option, for the error.

    Raises:
      CodeNotAllowed: a file names it, and the caller does not allow its package. Nothing is imported.
      ValueError: another form, no such module or name, or the module fails to import.
    """
    if not is_reference(text):
        raise ValueError(f"{field}={text!r} is not a reference: write package.module:name.")
    if isinstance(text, StoredReference):
        text.require_allowed()
    module_name, _, name = text.partition(":")
    try:
        folder = os.getcwd()
        if folder not in sys.path and not _is_installed(module_name):
            sys.path.append(folder)  # last, so that a file here never hides an installed package
        value: Any = importlib.import_module(module_name)
    except Exception as error:
        missing = isinstance(error, ModuleNotFoundError) and f"{module_name}.".startswith(
            f"{error.name}."
        )
        reason = (
            "there is no such module"
            if missing
            else f"importing it failed with {type(error).__name__}: {error}"
        )
        raise ValueError(
            f"{field}={text!r}: {reason}. Modules are looked for in the environment of this Python and in the working "
            f"directory, {os.getcwd()}.{_ELSEWHERE if missing else ''}"
        ) from error
    for attribute in name.split("."):
        try:
            value = getattr(value, attribute)
        except AttributeError:
            raise ValueError(
                f"{field}={text!r}: {module_name} has no {name!r}{_names_instead(name, module_name)}"
            ) from None
        if isinstance(text, StoredReference) and (home := _home(value)) is not None:
            text.require_allowed(home)  # an allowed module may import others: mypackage:os.system
    return value


def _names_instead(name: str, module_name: str) -> str:
    """Return the end of a sentence with the nearest names of a module, or with all where they are few."""
    public = [word for word in vars(sys.modules[module_name]) if not word.startswith("_")]
    hint = f".{did_you_mean(name, public)}"
    if hint != "." and len(public) > _FEW_NAMES:
        return hint
    return f"; it has {', '.join(public[:_FEW_NAMES]) or 'nothing'}{', ...' * (len(public) > _FEW_NAMES)}{hint}"


def _is_installed(module_name: str) -> bool:
    """Return True if the package is found without the working directory, which then need not be searched."""
    try:
        spec = importlib.util.find_spec(
            module_name.partition(".")[0]
        )  # the top package alone, so that nothing is imported
    except ValueError:  # as for __main__
        return False
    return (
        spec is not None and spec.origin is not None
    )  # a folder without __init__.py may go on in the other one


def _home(value: object) -> str | None:
    """The module that defines a module, class or function; None for other objects, which do not know it."""
    if isinstance(value, types.ModuleType):
        return value.__name__
    if inspect.isclass(value) or inspect.isroutine(value):
        return getattr(value, "__module__", None) or "builtins"
    return None
