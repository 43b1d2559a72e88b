"""Suggestions of names that are spelled similarly. No other module compares spellings."""

import difflib
from collections.abc import Collection, Iterable


def closest(name: str, known: Iterable[str], most: int = 1, cutoff: float = 0.6) -> list[str]:
    """Return the known names that are spelled most similarly, the most similar first.

    Args:
      name: a name that is not known.
      known: the known names.
      most: number of names to return at most.
      cutoff: least similarity, in [0, 1].
    """
    return difflib.get_close_matches(name, list(known), most, cutoff)


def did_you_mean(
    name: str,
    known: Iterable[str],
    form: str = "{!r}",
    most: int = 1,
) -> str:
    """Return " Did you mean A or B?" with the closest known names, or "".

    `form` is the template of a name; the other arguments are those of `closest`.
    """
    similar = closest(name, known, most)
    if not similar:
        return ""
    names = " or ".join(map(form.format, similar))
    return f" Did you mean {names}?"


def require_known(field: str, value: str, known: Collection[str]) -> None:
    """Raise ValueError, with the closest known names, if a value is none of them."""
    if value not in known:
        hint = did_you_mean(value, known, most=3)
        raise ValueError(f"{field}={value}: must be one of {', '.join(known)}.{hint}")
