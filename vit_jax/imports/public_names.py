"""Public names of a package that are imported from its modules on first use."""

import importlib
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any


def import_on_use(
    package: str,
    names: Mapping[str, Iterable[str]],
    advice: str = "",
) -> Callable[[str], Any]:
    """Return the `__getattr__` of a package that has public names of its modules.

    Args:
      package: its `__name__`.
      names: public names by module, which is relative to the package: {"schema": ("InputConfig",)}.
      advice: sentence for names that are spelled like none of these.
    """
    modules: dict[str, str] = {}
    for module_name, public in names.items():
        modules |= dict.fromkeys(public, module_name)

    def load_name(name: str) -> Any:
        if name not in modules:
            raise AttributeError(_describe_absence(package, name, modules, advice))
        module = importlib.import_module(f"{package}.{modules[name]}")
        value = getattr(module, name)
        setattr(sys.modules[package], name, value)
        return value

    return load_name


def _describe_absence(package: str, name: str, known: Iterable[str], advice: str) -> str:
    """Return the message on an absent name; Python asks packages for names with underscores."""
    message = f"module {package!r} has no attribute {name!r}"
    if name.startswith("_"):
        return message

    from vit_jax.text.nearest import did_you_mean

    hint = did_you_mean(name, known) or (advice and f" {advice}")
    return f"{message}.{hint}"
