"""A table of names in the authors' files of a family."""

import re
from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

from vit_jax.weights.patterns import NEVER


def _choose_library(names: Collection[str]) -> str:
    return ""


class OriginalNames(NamedTuple):
    """Names of a family in its authors' code."""

    # A name that only this family has, below the prefix; "" for files without any mark, as timm's
    # are.
    mark: str
    # Regular expression → replacement. All matches apply, in this order.
    renames: Mapping[str, str]
    prefixes: tuple[str, ...] = ("",)  # the first one that the network's names have is removed
    ignored: str = NEVER  # other names without the prefix are ignored too
    # Names of arrays → method by which the authors' code resizes positions; "" for timm's.
    choose_position_resize: Callable[[Collection[str]], str] = _choose_library

    def rename(self, name: str) -> str:
        """Return timm's name for a name without prefix."""
        for pattern, replacement in self.renames.items():
            name = re.sub(pattern, replacement, name)
        return name
