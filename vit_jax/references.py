"""References to a user's own code: the text "package.module:name" in a config, and the object that it names.

Wherever a config names a part of ours, it also takes such a reference. Nothing is imported until a run starts.
"""

import contextlib
import importlib
import os
import re
import sys
from collections.abc import Iterator
from typing import Any

_FORM = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


def is_reference(text: object) -> bool:
    """Whether this is text of the form "package.module:name"."""
    return isinstance(text, str) and _FORM.fullmatch(text) is not None


@contextlib.contextmanager
def called(subject: str, given: str) -> Iterator[None]:
    """Around a call of a user's own code: says what it was called with where that does not suit it."""
    try:
        yield
    except TypeError as error:
        raise ValueError(f"{subject} cannot be called with {given}: {error}") from error


def resolve(text: str, field: str) -> Any:
    """Imports what a reference names. Modules in the working directory are found too, after installed ones.

    The name may be an attribute of an attribute, "Class.method"; `field` is that of the option, for the error.

    Raises:
      ValueError: not of this form; no such module; the module fails to import; it has no such name.
    """
    if not is_reference(text):
        raise ValueError(f"{field}={text!r} is not a reference: write package.module:name.")
    module_name, _, name = text.partition(":")
    try:
        folder = os.getcwd()
        if folder not in sys.path:
            sys.path.append(folder)  # last, so that a file here never hides an installed package
        found: Any = importlib.import_module(module_name)
    except Exception as error:
        missing = isinstance(error, ModuleNotFoundError) and f"{module_name}.".startswith(f"{error.name}.")
        reason = "there is no such module" if missing else f"importing it failed with {type(error).__name__}: {error}"
        raise ValueError(
            f"{field}={text!r}: {reason}. Modules are looked for in the environment of this Python and in the working "
            f"directory, {os.getcwd()}."
        ) from error
    for part in name.split("."):
        try:
            found = getattr(found, part)
        except AttributeError:
            public = ", ".join(word for word in vars(sys.modules[module_name]) if not word.startswith("_"))
            raise ValueError(
                f"{field}={text!r}: {module_name} has no {name!r}; it has {public or 'nothing'}."
            ) from None
    return found
