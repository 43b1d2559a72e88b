"""A stand-in for torchvision, which timm imports and whose functions the reference programs do not call."""

import importlib.util
import sys
import types
from importlib.machinery import ModuleSpec
from typing import ClassVar


class StandIn(types.ModuleType):
    """A module in which every name is a class or a module, as timm needs on import."""

    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)

        values = {"__getattr__": lambda cls, name: name}
        metaclass = type(f"{name}Meta", (type,), values)  # values of an enum are their names

        return metaclass(name, (), {})


class StandInFinder:
    """A finder and loader of torchvision's modules."""

    def find_spec(
        self,
        name: str,
        path: object,
        target: object = None,
    ) -> ModuleSpec | None:
        """Return the spec of a stand-in for torchvision and its modules."""
        if name.partition(".")[0] != "torchvision":
            return None

        return ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> StandIn:
        """Return the stand-in."""
        return StandIn(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Leave the module as it is."""


def install_stand_in() -> None:
    """Let `import timm` work where torchvision is not installed; to be called before timm is imported."""
    if importlib.util.find_spec("torchvision") is None:
        sys.meta_path.append(StandInFinder())
