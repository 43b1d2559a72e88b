"""The fields of a config of another system: those that were converted, and those that cannot be."""

from collections.abc import Mapping
from typing import Any, NoReturn

from vit_jax.config.parsing import flatten
from vit_jax.config.synonyms import MEANT
from vit_jax.text.printable import shorten

Section = dict[str, Any]
"""Fields of a section of our config."""

DTYPES = {"float32": "float32", "bfloat16": "bfloat16"}
_MOST_SHOWN = 60  # characters of a value in a message
_UNITS = {"steps": "steps", "epochs": "epochs", "examples": "examples", "percent": "fraction"}
"""Our unit for each ending of a length."""


class ForeignFields:
    """The fields of a foreign config by their names, joined by dots.

    A converter takes each field that it knows; the fields that remain have no counterpart.

    Attributes:
      system: name of the system.
      ignored: names of fields without an effect on the results, in their order.
    """

    def __init__(self, values: Mapping[str, Any], system: str):
        self.system = system
        self.ignored: list[str] = []
        self._values = flatten(values)
        self._problems: dict[str, str] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def peek(self, name: str, default: Any = None) -> Any:
        """Return the value of a field, which remains."""
        return self._values.get(name, default)

    def take(self, name: str, default: Any = None) -> Any:
        """Return the value of a field, or the default of the other system."""
        return self._values.pop(name, default)

    def require(self, name: str) -> Any:
        """Return the value of a field that the other system has no default of."""
        if name not in self._values:
            self._problems[f"config.{name}"] = "must be set"
        return self.take(name)

    def take_duration(self, name: str, default: str) -> str:
        """Return the length in `name_steps`, `name_epochs`, `name_examples` or `name_percent`.

        Args:
          name: the name without its unit.
          default: our length where no field has one.
        """
        duration = default
        for ending, unit in _UNITS.items():
            value = self.take(f"{name}_{ending}")
            if isinstance(value, int | float) and value >= 0:
                duration = f"{value} {unit}"
        return duration

    def has_duration(self, name: str) -> bool:
        """Return True if a length is given in any unit."""
        return any(self.peek(f"{name}_{ending}") is not None for ending in _UNITS)

    def take_choice(
        self, name: str, choices: Mapping[Any, Any], default: Any, fix: str = ""
    ) -> Any:
        """Return our value for the value of a field; a value without a counterpart is a problem."""
        value = self.take(name, default)
        try:
            return choices[value]
        except (KeyError, TypeError):
            known = ", ".join(map(repr, choices))
            self.reject(
                name,
                value,
                fix or f"only {known} can be converted",
            )
            return choices[default]

    def expect(self, name: str, *values: Any, fix: str) -> None:
        """Take a field that can be converted with these values only, or if it is not set."""
        if name in self._values:
            value = self.take(name)
            if value not in values:
                self.reject(
                    name,
                    value,
                    fix,
                )

    def reject(self, name: str, value: Any, fix: str) -> None:
        """Note a field that cannot be converted, with what to use instead."""
        shown = shorten(repr(value), _MOST_SHOWN)
        self._problems.setdefault(f"config.{name}={shown}", fix)

    def ignore(self, *names: str) -> None:
        """Take fields, or whole sections, that do not change the results here."""
        for name in names:
            if self.drop(name):
                self.ignored.append(name)

    def drop(self, section: str) -> list[str]:
        """Take a field, or all fields of a section; return their names."""
        dropped = []
        for name in list(self._values):
            if f"{name}.".startswith(f"{section}."):
                del self._values[name]
                dropped.append(name)
        return dropped

    def list_section(self, section: str) -> list[str]:
        """Return the names of the fields and sections inside of a section."""
        children: dict[str, None] = {}
        for name in self._values:
            if name.startswith(f"{section}."):
                child = name.removeprefix(f"{section}.").partition(".")[0]
                children[child] = None
        return list(children)

    def require_all_converted(self) -> None:
        """Raise ValueError, with all fields that were not converted, in one line."""
        for name, value in list(self._values.items()):
            if value not in (None, {}):
                self.reject(
                    name,
                    value,
                    _suggest_field(name),
                )
        if self._problems:
            self._raise_problems()

    def _raise_problems(self) -> NoReturn:
        problems = []
        for field, fix in self._problems.items():
            problems.append(f"{field}: {fix}")
        raise ValueError(f"fields of {self.system} cannot be converted: {'; '.join(problems)}.")


def _suggest_field(name: str) -> str:
    """Return what to use in the place of a field that no converter knows."""
    meant = MEANT.get(name.rpartition(".")[2].lower())
    if meant is None:
        return "remove it"
    return f"remove it, and use --config.{meant.replace(chr(34), '')}"
