"""A way to name parameters, in files of one suffix."""

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping

import numpy as np

from vit_jax.config.architecture import Architecture
from vit_jax.weights.folding import Normalisation
from vit_jax.weights.names.entry import Entry, Rule, make_entries
from vit_jax.weights.names.facts import Facts
from vit_jax.weights.names.ours import Shape, unstacked_shapes
from vit_jax.weights.packing import PLAIN, Packing

Shapes = Mapping[str, Shape]
Names = Mapping[str, str]


def add_nothing(a: Architecture, normalisation: Normalisation) -> dict[str, np.ndarray]:
    """Return no arrays, for formats whose readers demand parameters alone."""
    return {}


def find_modern_options(a: Architecture) -> dict[str, object]:
    """Return the parts of a network that the paper's networks do not have."""
    return a.modern_options


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Format:
    """A way to name parameters.

    Attributes:
      suffix: of a file.
      canonical: names in a file → canonical names, as in the rules, with their names in the file;
        None for another format.
      facts: shapes by canonical names → facts about the network.
      rules: for a network, in the style of the file with these shapes by canonical names; no shapes
        to write.
      added: arrays that readers demand and that hold no parameter of ours.
      find_lacking: the parts of a network that the format does not hold, by field.
      families: families of networks that the format holds.
      other_families: sentence about the others.
      holds_hidden_layer: True for a network whose head may have a hidden layer.
      name_style: the name of a file's style in reports, from shapes by canonical names and names in
        the file; "" for the name of the format.
    """

    suffix: str
    canonical: Callable[[Iterable[str]], dict[str, str] | None]
    facts: Callable[[Shapes], Facts]
    rules: Callable[[Architecture, Shapes], list[Rule]]
    added: Callable[[Architecture, Normalisation], dict[str, np.ndarray]] = add_nothing
    find_lacking: Callable[[Architecture], Mapping[str, object]] = find_modern_options
    families: tuple[str, ...] = ("vit", "hybrid", "resnet")
    other_families: str = ""
    holds_hidden_layer: Callable[[Architecture], bool] = lambda a: False
    name_style: Callable[[Shapes, Names], str] = lambda shapes, names: ""

    def entries(
        self,
        a: Architecture,
        shapes: Shapes | None = None,
        absent: Collection[str] = (),
        packing: Packing = PLAIN,
    ) -> list[Entry]:
        """Return the arrays that a file holds of a network, without parameters that are `absent` there.

        Raises:
          ValueError: a parameter has no name in this format.
        """
        ours = {name: shape for name, shape in unstacked_shapes(a).items() if name not in absent}
        rules = self.rules(a, shapes or {})
        entries = make_entries(rules, packing.split_shapes(ours))
        return packing.adapt_entries(entries, a)
