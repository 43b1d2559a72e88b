"""Public names of a package that are imported from its modules on first use."""

import importlib
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any


def import_on_use(package: str, names: Mapping[str, Iterable[str]]) -> Callable[[str], Any]:
    """Return the `__getattr__` of a package that has public names of its modules.

    Args:
      package: its `__name__`.
      names: public names by module, which is relative to the package: {"schema": ("InputConfig",)}.
    """
    modules: dict[str, str] = {}
    for module_name, public in names.items():
        modules |= dict.fromkeys(public, module_name)

    def load_name(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = importlib.import_module(f"{package}.{modules[name]}")
        value = getattr(module, name)
        setattr(sys.modules[package], name, value)
        return value

    return load_name
