"""Names of parameters: ours, and those of other formats.

A format is recognised by names, derives `Facts` from names and shapes, and gives our parameters its names. Writing a
network that a format cannot hold is an error.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import NamedTuple, get_args

import numpy as np

from vit_jax.config.architecture import Architecture
from vit_jax.config.network_options import HeadForm, Pool, PositionEmbedding
from vit_jax.weights.folding import Normalisation
from vit_jax.weights.names import bit, huggingface, released, timm, tokens
from vit_jax.weights.names.entry import Entry, Rule, make_entries, with_shape
from vit_jax.weights.names.facts import Facts
from vit_jax.weights.names.library_classes import huggingface_model, timm_model
from vit_jax.weights.names.ours import Shape, stack, stacked_shapes, unstack, unstacked_shapes
from vit_jax.weights.names.wrappers import find_wrapping

__all__ = [
    "FORMATS",
    "TABULAR",
    "Entry",
    "Facts",
    "Format",
    "Shape",
    "refuse_unwritable",
    "require_standard",
]
__all__ += [
    "find_wrapping",
    "is_network",
    "stack",
    "stacked_shapes",
    "tokens",
    "unstack",
    "with_shape",
]

TABULAR = tuple(kind for kind in get_args(PositionEmbedding) if kind != "relative")
"""Position embeddings that are a table, or can be written as one."""


class Format(NamedTuple):
    """A way to name parameters."""

    # From names in a file: canonical names, as in the rules, with their names in the file; None for another format.
    canonical: Callable[[Iterable[str]], dict[str, str] | None]
    facts: Callable[[Mapping[str, Shape]], Facts]
    # For a network, in the style of the file with these shapes by names of the rules; empty to write.
    rules: Callable[[Architecture, Mapping[str, Shape]], list[Rule]]
    suffix: str  # of a file
    # Arrays that readers demand and that hold no parameter of ours.
    added: Callable[[Architecture, Normalisation], dict[str, np.ndarray]] = (
        lambda a, normalisation: {}
    )

    def entries(
        self,
        a: Architecture,
        shapes: Mapping[str, Shape] | None = None,
        absent: Collection[str] = (),
        *,
        is_distilled: bool = False,
    ) -> list[Entry]:
        """Return the arrays that a file holds of a network, without parameters that are `absent` there.

        Raises:
          ValueError: a parameter has no name in this format.
        """
        ours = {name: shape for name, shape in unstacked_shapes(a).items() if name not in absent}
        ours = tokens.split_shapes(ours) if is_distilled else ours
        return make_entries(self.rules(a, shapes or {}), ours)


FORMATS = {
    "released": Format(released.canonical, released.facts, released.rules_of, ".npz"),
    "bit": Format(bit.canonical, bit.facts, bit.rules, ".npz"),
    "timm": Format(timm.canonical, timm.facts, timm.rules, ".safetensors"),
    "huggingface": Format(
        huggingface.canonical,
        huggingface.facts,
        huggingface.rules_of,
        ".safetensors",
        huggingface.added,
    ),
}


def is_network(names: Iterable[str]) -> bool:
    """Return True if a format knows these names of arrays, also if its networks are not read."""
    names = set(names)
    for format_ in FORMATS.values():
        try:
            is_known = format_.canonical(names) is not None
        except ValueError:
            return True
        if is_known:
            return True
    return False


def require_standard(a: Architecture, format_name: str) -> None:
    """Raise ValueError if a network has parts, ours or the user's, for which other formats have no names."""
    names = ("network", "block", "position_embedding", "position_layers", "pool", "head")
    held = (*TABULAR, "stem", None, *get_args(Pool), *get_args(HeadForm))
    if custom := ", ".join(
        f"{name}={getattr(a, name)!r}" for name in names if getattr(a, name) not in held
    ):
        raise ValueError(
            f"The format {format_name} cannot hold {a.name}, which has {custom}: write vit_jax instead."
        )


def refuse_unwritable(name: str, a: Architecture) -> None:
    """Raise ValueError, with all reasons, if a format cannot hold a network.

    Every format has room for a table of positions, so their form is no reason.
    """
    reasons = []
    lacking = a.modern_options
    if name == "timm":
        lacking = timm_model(a).lacking(a)
    elif name == "huggingface" and a.family == "vit":
        lacking = {
            field: value
            for field, value in huggingface_model(a).lacking(a).items()
            if field != "head"
        }
    is_pooler = name == "huggingface" and a.num_classes == 0
    if a.head == "mlp" and name != "released" and not is_pooler:
        reasons.append(
            "its head has a hidden layer, which only released and vit_jax hold (huggingface too where there are no "
            "classes): leave the head out (without_head)"
        )
    if name == "released" and a.family == "resnet":
        reasons.append("it holds ViTs and hybrids; a ResNet goes to bit or timm")
    if name == "bit" and a.family != "resnet":
        reasons.append("it holds ResNets only; a ViT or a hybrid goes to released or timm")
    if a.family == "resnet" and a.residual_unit != "preactivation":
        reasons.append("it holds ResNets of pre-activation units only")
    if name == "huggingface" and a.family != "vit":
        reasons.append("it holds pure ViTs only")
    if lacking:
        missing = ", ".join(f"{field}={value!r}" for field, value in lacking.items())
        hint = ": leave the head out (without_head)" if list(lacking) == ["num_classes"] else ""
        reasons.append(f"it is not written with {missing}{hint}")
    if reasons:
        raise ValueError(
            f"The format {name} cannot hold {a.name}: {'; '.join(reasons)}. vit_jax holds every network."
        )
