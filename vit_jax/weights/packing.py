"""Arrays of a file that hold several of our parameters, or parts of one.

The base class is for files with one array for each parameter.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from vit_jax.config.architecture import Architecture
from vit_jax.weights.folding import Normalisation
from vit_jax.weights.formats import ArrayFile, StoredArray

if TYPE_CHECKING:
    from vit_jax.weights.names.entry import Entry
    from vit_jax.weights.names.facts import Facts

Shapes = Mapping[str, tuple[int, ...]]
Parameters = Mapping[str, np.ndarray]


class Unpacked(NamedTuple):
    """Parameters of our network, layers taken apart."""

    parameters: dict[str, np.ndarray]
    normalisation: Normalisation | None = None  # stated by an array of the file


class Packing:
    """One array for each parameter.

    Attributes:
      note: sentence for the report of a file that is read.
      fits_any_grid: positions are of no particular grid of patches.
      pads_class_position: a table of patches is written with a row of zeros for the class token.
    """

    note = ""
    fits_any_grid = False
    pads_class_position = True

    def matches(self, shapes: Shapes, arrays: Mapping[str, StoredArray]) -> bool:
        """Return True for a file that packs parameters so.

        Its shapes are by canonical names, its arrays by names in the file.
        """
        return False

    def complete_facts(
        self,
        facts: "Facts",
        shapes: Shapes,
        arrays: Mapping[str, StoredArray],
    ) -> "Facts":
        """Return the facts about the network that the packed arrays show."""
        return facts

    def split_shapes(self, shapes: Shapes) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the parts in a file, from our parameters, layers taken apart."""
        return dict(shapes)

    def adapt_entries(self, entries: "Sequence[Entry]", a: Architecture) -> "list[Entry]":
        """Return the arrays of a file in the shapes that they have there."""
        return list(entries)

    def unpack(self, parts: Parameters, file: ArrayFile, a: Architecture) -> Unpacked:
        """Return our parameters from the parts that a file holds."""
        return Unpacked(dict(parts))

    def pack(self, parameters: Parameters) -> dict[str, np.ndarray]:
        """Return the parts that a file holds from our parameters, taken apart."""
        return dict(parameters)


PLAIN = Packing()
