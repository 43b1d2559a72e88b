"""A table of names in the authors' own files of a family."""

import re
from collections.abc import Mapping
from typing import NamedTuple

from vit_jax.weights.patterns import NEVER


class OriginalNames(NamedTuple):
    """Names of a family in its authors' code."""

    # A name that only this family has, below the prefix; "" for files without any mark, as timm's
    # are.
    mark: str
    renames: Mapping[str, str]  # regular expression → replacement, in this order; all matches apply
    prefixes: tuple[str, ...] = ("",)  # of the network's names, the first of these
    ignored: str = NEVER  # other names without the prefix are ignored too

    def rename(self, name: str) -> str:
        """Return timm's name for a name without prefix."""
        for pattern, replacement in self.renames.items():
            name = re.sub(pattern, replacement, name)
        return name
