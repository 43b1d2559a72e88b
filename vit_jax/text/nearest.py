"""Suggestions of names that are spelled similarly. No other module compares spellings."""

import difflib
from collections.abc import Collection, Iterable


def closest(name: str, known: Iterable[str], most: int = 1, cutoff: float = 0.6) -> list[str]:
    """Return at most `most` known names that are at least `cutoff` similar to a name, the most similar first."""
    return difflib.get_close_matches(name, list(known), most, cutoff)


def did_you_mean(
    name: str, known: Iterable[str], form: str = "{!r}", most: int = 1, cutoff: float = 0.6
) -> str:
    """Return " Did you mean A or B?" with the closest known names in this form; "" without any."""
    similar = closest(name, known, most, cutoff)
    if not similar:
        return ""
    names = " or ".join(map(form.format, similar))
    return f" Did you mean {names}?"


def require_known(field: str, value: str, known: Collection[str]) -> None:
    """Raise ValueError, with the closest known names, if a value is none of them."""
    if value not in known:
        hint = did_you_mean(value, known, most=3)
        raise ValueError(f"{field}={value}: must be one of {', '.join(known)}.{hint}")
