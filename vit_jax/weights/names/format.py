"""A way to name parameters, in files of one suffix."""

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping

import numpy as np

from vit_jax.config.architecture import Architecture
from vit_jax.weights.folding import Normalisation
from vit_jax.weights.names.entry import Entry, Rule, make_entries
from vit_jax.weights.names.facts import Facts
from vit_jax.weights.names.ours import Shape, list_unstacked_shapes
from vit_jax.weights.packing import PLAIN, Packing

Shapes = Mapping[str, Shape]
Names = Mapping[str, str]


def make_nothing(a: Architecture, normalisation: Normalisation) -> dict[str, np.ndarray]:
    """Return no arrays, for formats whose readers demand parameters alone."""
    return {}


def find_modern_options(a: Architecture) -> dict[str, object]:
    """Return the parts of a network that the paper's networks do not have."""
    return a.modern_options


def hold_no_hidden_layer(a: Architecture) -> bool:
    """Return False, for formats whose heads are one layer."""
    return False


def name_no_style(shapes: Shapes, names: Names) -> str:
    """Return "", for formats with one style."""
    return ""


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Format:
    """A way to name parameters.

    Attributes:
      suffix: suffix of a file.
      find_canonical: returns canonical names, as in the rules, → names in the file, from the names
        in a file; None for another format.
      find_facts: returns facts about the network, from shapes by canonical names.
      make_rules: returns the rules for a network, in the style of the file with these shapes by
        canonical names; without shapes in the style to write.
      make_arrays: returns arrays that readers demand and that hold none of our parameters.
      find_lacking: returns the parts of a network that the format does not hold, by field.
      families: families of networks that the format holds.
      other_families: sentence about the other families.
      holds_hidden_layer: returns True for a network whose head may have a hidden layer.
      name_style: returns the name of a file's style in reports, from shapes by canonical names and
        names in the file; "" for the name of the format.
    """

    suffix: str
    find_canonical: Callable[[Iterable[str]], dict[str, str] | None]
    find_facts: Callable[[Shapes], Facts]
    make_rules: Callable[[Architecture, Shapes], list[Rule]]
    make_arrays: Callable[[Architecture, Normalisation], dict[str, np.ndarray]] = make_nothing
    find_lacking: Callable[[Architecture], Mapping[str, object]] = find_modern_options
    families: tuple[str, ...] = ("vit", "hybrid", "resnet")
    other_families: str = ""
    holds_hidden_layer: Callable[[Architecture], bool] = hold_no_hidden_layer
    name_style: Callable[[Shapes, Names], str] = name_no_style

    def make_entries(
        self,
        a: Architecture,
        shapes: Shapes | None = None,
        absent: Collection[str] = (),
        packing: Packing = PLAIN,
    ) -> list[Entry]:
        """Return the arrays of a file that holds a network, without `absent` parameters.

        Raises:
          ValueError: a parameter has no name in this format.
        """
        ours = {
            name: shape for name, shape in list_unstacked_shapes(a).items() if name not in absent
        }
        rules = self.make_rules(a, shapes or {})
        entries = make_entries(rules, packing.split_shapes(ours))
        return packing.adapt_entries(entries, a)
