"""Lengths of training with a unit, such as "300 epochs"."""

import math
import re
import sys

DURATION_UNITS = ("steps", "epochs", "examples", "fraction")
_NUMBER_AND_UNIT = re.compile(r"(.*[\d.])\s*([a-z]+)")


def split_duration(text: str) -> tuple[str, str]:
    """Split "300 epochs", or "300epochs", into the texts of a number and a unit.

    Both are "" for a text of another form.
    """
    match = _NUMBER_AND_UNIT.fullmatch(text.strip())
    if match is None:
        return "", ""
    return match[1], match[2]


def parse_duration(text: str) -> tuple[float, str]:
    """Split "300 epochs", or "300epochs", into (300.0, "epochs").

    Raises:
      ValueError: the text is not a number followed by one of `DURATION_UNITS`, or the number is
        negative.
    """
    number, unit = split_duration(text)
    if unit in ("step", "epoch", "example"):
        unit += "s"
    try:
        value = float(number.replace("_", ""))
    except ValueError:
        value = math.nan
    most = sys.float_info.max
    if unit == "fraction":
        most = 1
    if unit not in DURATION_UNITS or not 0 <= value <= most:
        forms = "'500 steps', '90 epochs', '1e6 examples' or '0.1 fraction' (in [0, 1])"
        raise ValueError(f"{text!r} is no duration: must be a number and a unit. Write {forms}.")
    return value, unit
