"""Names of parameters: ours, and those of other formats.

A format is recognised by names, derives `Facts` from names and shapes, and gives our parameters its
names. Writing a network that a format cannot hold is an error.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import get_args

from vit_jax.config.architecture import Architecture
from vit_jax.config.network_options import HeadForm, Pool, PositionEmbedding
from vit_jax.weights.families import load_families
from vit_jax.weights.names import huggingface, timm
from vit_jax.weights.names.entry import Entry, with_shape
from vit_jax.weights.names.facts import Facts
from vit_jax.weights.names.format import Format
from vit_jax.weights.names.ours import Shape, stack, stacked_shapes, unstack
from vit_jax.weights.names.wrappers import find_wrapping

__all__ = [
    "FORMATS",
    "TABULAR",
    "Entry",
    "Facts",
    "Format",
    "Shape",
    "find_wrapping",
    "is_network",
    "refuse_unwritable",
    "require_standard",
    "stack",
    "stacked_shapes",
    "unstack",
    "with_shape",
]

TABULAR = tuple(kind for kind in get_args(PositionEmbedding) if kind != "relative")
"""Position embeddings that are a table, or can be written as one."""


class _Formats(Mapping[str, Format]):
    """Formats by name: those of single families, and those of libraries."""

    def _build_table(self) -> dict[str, Format]:
        table: dict[str, Format] = {}
        for family in load_families():
            table |= family.formats
        return {**table, "timm": timm.FORMAT, "huggingface": huggingface.FORMAT}

    def __getitem__(self, name: str) -> Format:
        return self._build_table()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._build_table())

    def __len__(self) -> int:
        return len(self._build_table())


FORMATS = _Formats()


def is_network(names: Iterable[str]) -> bool:
    """Return True if a format knows these names of arrays, also if its networks are not read."""
    names = set(names)
    return any(_is_in_format(names, format_) for format_ in FORMATS.values())


def _is_in_format(names: set[str], format_: Format) -> bool:
    try:
        return format_.canonical(names) is not None
    except ValueError:
        return True


def require_standard(a: Architecture, format_name: str) -> None:
    """Raise ValueError if a network has parts, ours or the user's, for which other formats have no names."""
    fields = ("network", "block", "position_embedding", "position_layers", "pool", "head")
    held = (*TABULAR, "stem", None, *get_args(Pool), *get_args(HeadForm))
    custom = [f"{field}={getattr(a, field)!r}" for field in fields if getattr(a, field) not in held]
    if custom:
        raise ValueError(
            f"The format {format_name} cannot hold {a.name}, which has {', '.join(custom)}: write vit_jax instead."
        )


def refuse_unwritable(name: str, a: Architecture) -> None:
    """Raise ValueError, with all reasons, if a format cannot hold a network.

    Every format has room for a table of positions, so their form is no reason.
    """
    format_ = FORMATS[name]
    reasons = [reason for rule in _RULES if (reason := rule(format_, a))]
    if reasons:
        raise ValueError(
            f"The format {name} cannot hold {a.name}: {'; '.join(reasons)}. vit_jax holds every network."
        )


def _check_hidden_layer(format_: Format, a: Architecture) -> str:
    if a.head != "mlp" or format_.holds_hidden_layer(a):
        return ""
    return (
        "its head has a hidden layer, which only released and vit_jax hold (huggingface too where there are no "
        "classes): leave the head out (without_head)"
    )


def _check_family(format_: Format, a: Architecture) -> str:
    return "" if a.family in format_.families else format_.other_families


def _check_units(format_: Format, a: Architecture) -> str:
    if a.family != "resnet" or a.residual_unit == "preactivation":
        return ""
    return "it holds ResNets of pre-activation units only"


def _check_parts(format_: Format, a: Architecture) -> str:
    lacking = format_.find_lacking(a)
    if not lacking:
        return ""
    missing = ", ".join(f"{field}={value!r}" for field, value in lacking.items())
    hint = ": leave the head out (without_head)" if list(lacking) == ["num_classes"] else ""
    return f"it is not written with {missing}{hint}"


_RULES = (_check_hidden_layer, _check_family, _check_units, _check_parts)
