"""Names in the authors' files, renamed to timm's names; `families` holds them.

Layouts stay as they are in the file: `timm.Style` has them. Text towers and arrays of pre-training
are ignored.
"""

import re
from collections.abc import Collection, Iterable

from vit_jax.weights.families import load_families
from vit_jax.weights.names.entry import invert
from vit_jax.weights.names.original_names import OriginalNames


def rename(names: Iterable[str]) -> dict[str, str]:
    """Return timm's names → names in the file.

    Raises:
      ValueError: two arrays get the same name.
    """
    unique_names = dict.fromkeys(names)
    original, prefix = _find_original(unique_names)
    renamed = {}
    for name in unique_names:
        short_name = name.removeprefix(prefix)
        if name.startswith(prefix) and not re.match(original.ignored, short_name):
            renamed[name] = original.rename(short_name)
    return invert(renamed)


def choose_position_resize(names: Collection[str]) -> str:
    """Return the method by which the authors' code resizes positions; "" for that of the library."""
    original, _ = _find_original(names)
    return original.choose_position_resize(names)


def _find_original(names: Collection[str]) -> tuple[OriginalNames, str]:
    """Return the names of the family whose mark a file has, and the prefix."""
    without_mark = OriginalNames("", {})
    for family in load_families():
        original = family.original
        if original is None:
            continue
        if not original.mark:
            without_mark = original
            continue
        for prefix in original.prefixes:
            if f"{prefix}{original.mark}" in names:
                return original, prefix
    return without_mark, without_mark.prefixes[0]
