"""Values of the JSON files of other libraries, read with the type that they must have.

A value that is absent or null is None. Any other value has the type that its reader states, or is
an error.
"""

import math
from collections.abc import Mapping
from typing import Any

from vit_jax.text.printable import shortened

Values = Mapping[str, Any]
LARGEST_COUNT = 2**31 - 1
_SHOWN_CHARACTERS = 80


def wrong_value(name: str, value: object, rule: str) -> ValueError:
    """Return the error about a value, whose `rule` begins with "must be"."""
    shown = shortened(repr(value), _SHOWN_CHARACTERS)
    return ValueError(f"{name}={shown}: {rule}. Correct the file.")


def read_count(values: Values, name: str, least: int = 1) -> int | None:
    """Return a whole number."""
    value = values.get(name)
    if value is None:
        return None
    if not _is_count(value, least):
        raise wrong_value(name, value, f"must be a whole number from {least} to {LARGEST_COUNT:,}")
    return int(value)


def _is_count(value: object, least: int = 1) -> bool:
    return type(value) is int and least <= value <= LARGEST_COUNT


def read_positive(values: Values, name: str) -> float | None:
    """Return a finite number above 0."""
    value = values.get(name)
    if value is None:
        return None
    is_number = type(value) in (int, float) and 0 < value <= LARGEST_COUNT and math.isfinite(value)
    if not is_number:
        raise wrong_value(name, value, "must be a finite number above 0")
    return float(value)


def read_flag(values: Values, name: str) -> bool | None:
    """Return true or false."""
    value = values.get(name)
    if value is not None and type(value) is not bool:
        raise wrong_value(name, value, "must be true or false")
    return value


def read_string(values: Values, name: str) -> str | None:
    """Return a text."""
    value = values.get(name)
    if value is not None and not isinstance(value, str):
        raise wrong_value(name, value, "must be text")
    return value


def read_object(values: Values, name: str) -> dict[str, Any]:
    """Return the values of an object; none if it is absent."""
    value = values.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise wrong_value(name, value, "must be an object with names and values")
    return value


def read_size(values: Values, name: str) -> tuple[int, int] | None:
    """Return height and width in any of the libraries' forms; None of an object with other edges."""
    value = values.get(name)
    if value is None:
        return None
    if isinstance(value, dict):
        return _read_edges(value, name)
    sides = [value, value] if type(value) is int else value
    is_pair = isinstance(sides, list) and len(sides) == 2 and all(_is_count(side) for side in sides)
    if not is_pair:
        raise wrong_value(name, value, "must be one or two whole numbers of pixels above 0")
    return sides[0], sides[1]


def _read_edges(edges: Values, name: str) -> tuple[int, int] | None:
    for edge in edges:
        if edges[edge] is not None and not _is_count(edges[edge]):
            raise wrong_value(
                f"{name}.{edge}", edges[edge], "must be a whole number of pixels above 0"
            )
    height = edges.get("height")
    width = edges.get("width")
    if height is None or width is None:
        return None
    return height, width


def require_three_channels(name: str, channels: object) -> None:
    """Raise ValueError unless a number of channels is absent or three."""
    if channels is not None and (type(channels) is not int or channels != 3):
        raise wrong_value(name, channels, "must be 3, since networks take images in RGB")


def read_class_names(values: Values, name: str) -> tuple[str, ...] | None:
    """Return class names in the order of their numbers: a list, or an object whose keys are the numbers from 0."""
    labels = values.get(name)
    if labels is None or labels in ({}, []):
        return None
    if isinstance(labels, dict):
        labels = _order_by_number(labels, name)
    if not isinstance(labels, list):
        raise wrong_value(
            name, labels, "must be a list of texts, or an object with numbers and texts"
        )
    for number, label in enumerate(labels):
        if not isinstance(label, str):
            raise wrong_value(f"{name}[{number}]", label, "must be text")
    return tuple(labels)


def _order_by_number(labels: Mapping[str, object], name: str) -> list[object]:
    """Return the values of an object by the numbers that are its keys.

    Raises:
      ValueError: a key is no number, has the value of another key, or numbers are missing.
    """
    by_number: dict[int, object] = {}
    for key, label in labels.items():
        is_number = key.isascii() and key.isdecimal() and len(key) < 10
        if not is_number or int(key) in by_number:
            raise _wrong_keys(
                name,
                len(labels),
                f"{shortened(key, 40)!r} is another, or has the value of another key",
            )
        by_number[int(key)] = label
    missing = [number for number in range(len(labels)) if number not in by_number]
    if missing:
        raise _wrong_keys(name, len(labels), f"{missing[0]} is missing")
    return [by_number[number] for number in range(len(labels))]


def _wrong_keys(name: str, count: int, reason: str) -> ValueError:
    return ValueError(
        f"{name}: its keys must be the numbers of the outputs, 0 to {count - 1}, each once; {reason}. Correct the file."
    )
