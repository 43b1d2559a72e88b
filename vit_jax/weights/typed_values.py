"""Values of the JSON files of other libraries, read with the type that they must have.

A value that is absent or null is None. Any other value has the type that its reader states, or is
an error.
"""

from collections.abc import Mapping
from typing import Any

from vit_jax.storage.files import JsonObject
from vit_jax.text.printable import shorten

Values = Mapping[str, Any]
LARGEST_COUNT = 2**31 - 1
_SHOWN_CHARACTERS = 80
_SHOWN_KEY_CHARACTERS = 40


def build_value_error(name: str, value: object, rule: str) -> ValueError:
    """Return the error about a value, whose `rule` begins with "must be"."""
    shown = shorten(repr(value), _SHOWN_CHARACTERS)
    return ValueError(f"{name}={shown}: {rule}. Correct the file.")


def read_count(values: Values, name: str, least: int = 1) -> int | None:
    """Return a whole number."""
    value = values.get(name)
    if value is None:
        return None
    if not is_count(value, least):
        rule = f"must be a whole number from {least} to {LARGEST_COUNT:,}"
        raise build_value_error(name, value, rule)
    return int(value)


def is_count(value: object, least: int = 1) -> bool:
    """Return True for a whole number that is neither below `least` nor too large for a size."""
    return type(value) is int and least <= value <= LARGEST_COUNT


def read_positive(values: Values, name: str) -> float | None:
    """Return a finite number above 0."""
    value = values.get(name)
    if value is None:
        return None
    is_number = type(value) in (int, float)
    if not is_number or not 0 < value <= LARGEST_COUNT:
        raise build_value_error(name, value, "must be a finite number above 0")
    return float(value)


def read_flag(values: Values, name: str) -> bool | None:
    """Return true or false."""
    value = values.get(name)
    if value is not None and type(value) is not bool:
        raise build_value_error(name, value, "must be true or false")
    return value


def read_string(values: Values, name: str) -> str | None:
    """Return a text."""
    value = values.get(name)
    if value is not None and not isinstance(value, str):
        raise build_value_error(name, value, "must be text")
    return value


def read_object(values: Values, name: str) -> JsonObject:
    """Return the values of an object; none if it is absent."""
    value = values.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise build_value_error(name, value, "must be an object with names and values")
    return value


# Sizes of images and patches.


def read_size(values: Values, name: str) -> tuple[int, int] | None:
    """Return height and width in pixels.

    The libraries state one number for both, a pair, or an object. An object with other edges than
    height and width is None.
    """
    value = values.get(name)
    if value is None:
        return None
    if isinstance(value, dict):
        return _read_edges(value, name)
    if is_count(value):
        return value, value
    if not _is_pair(value):
        raise build_value_error(name, value, "must be one or two whole numbers of pixels above 0")
    height, width = value
    return height, width


def _is_pair(value: object) -> bool:
    """Return True for a list of two numbers of pixels."""
    return isinstance(value, list) and len(value) == 2 and all(map(is_count, value))


def _read_edges(edges: Values, name: str) -> tuple[int, int] | None:
    """Return height and width of an object; None if either is absent."""
    for edge, length in edges.items():
        if length is not None and not is_count(length):
            rule = "must be a whole number of pixels above 0"
            raise build_value_error(f"{name}.{edge}", length, rule)
    height = edges.get("height")
    width = edges.get("width")
    if height is None or width is None:
        return None
    return height, width


def require_three_channels(name: str, channels: object) -> None:
    """Raise ValueError unless a number of channels is absent or three."""
    if channels is None:
        return
    if type(channels) is not int or channels != 3:
        raise build_value_error(name, channels, "must be 3, since networks take images in RGB")


# Class names.


def read_class_names(values: Values, name: str) -> tuple[str, ...] | None:
    """Return class names in the order of their numbers.

    The libraries state a list, or an object whose keys are the numbers from 0.
    """
    labels = values.get(name)
    if labels is None or labels in ({}, []):
        return None
    if isinstance(labels, dict):
        labels = _order_by_number(labels, name)
    if not isinstance(labels, list):
        rule = "must be a list of texts, or an object with numbers and texts"
        raise build_value_error(name, labels, rule)
    for number, label in enumerate(labels):
        if not isinstance(label, str):
            raise build_value_error(f"{name}[{number}]", label, "must be text")
    return tuple(labels)


def _order_by_number(labels: Mapping[str, object], name: str) -> list[object]:
    """Return the values of an object by the numbers that are its keys.

    Raises:
      ValueError: a key is no number, has the value of another key, or numbers are missing.
    """
    count = len(labels)
    by_number: dict[int, object] = {}
    for key, label in labels.items():
        if not _is_number(key) or int(key) in by_number:
            shown = repr(shorten(key, _SHOWN_KEY_CHARACTERS))
            reason = f"{shown} is another, or has the value of another key"
            raise _build_keys_error(name, count, reason)
        by_number[int(key)] = label

    ordered = []
    for number in range(count):
        if number not in by_number:
            raise _build_keys_error(name, count, f"{number} is missing")
        ordered.append(by_number[number])
    return ordered


def _is_number(key: str) -> bool:
    return key.isascii() and key.isdecimal() and len(key) < 10


def _build_keys_error(name: str, count: int, reason: str) -> ValueError:
    return ValueError(
        f"{name}: its keys must be the numbers of the outputs, 0 to {count - 1}, each once; "
        f"{reason}. Correct the file."
    )
