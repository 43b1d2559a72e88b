"""Names of parameters, in our models and in other formats.

A format is recognised by names, derives `Facts` from names and shapes, and gives our parameters its
names. Writing a network that a format cannot hold is an error.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import get_args

from vit_jax.config.architecture import Architecture
from vit_jax.config.network_options import HeadForm, Pool, PositionEmbedding
from vit_jax.weights.families import load_families
from vit_jax.weights.names import huggingface, timm
from vit_jax.weights.names.entry import Entry, replace_shape
from vit_jax.weights.names.facts import Facts
from vit_jax.weights.names.format import Format
from vit_jax.weights.names.ours import (
    HEAD_BIAS,
    HEAD_KERNEL,
    Shape,
    list_shapes,
    stack,
    unstack,
)
from vit_jax.weights.names.wrappers import find_wrapping

__all__ = [
    "FORMATS",
    "HEAD_BIAS",
    "HEAD_KERNEL",
    "Entry",
    "Facts",
    "Format",
    "Shape",
    "find_wrapping",
    "is_network",
    "list_shapes",
    "replace_shape",
    "require_standard",
    "require_writable",
    "stack",
    "unstack",
]

_TABULAR = set(get_args(PositionEmbedding)) - {"relative"}
"""Position embeddings that are a table, or can be written as one."""


class _Formats(Mapping[str, Format]):
    """Formats by name: formats of single families, then formats of libraries."""

    def _build_table(self) -> dict[str, Format]:
        table: dict[str, Format] = {}
        for family in load_families():
            table |= family.formats
        table["timm"] = timm.FORMAT
        table["huggingface"] = huggingface.FORMAT
        return table

    def __getitem__(self, name: str) -> Format:
        return self._build_table()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._build_table())

    def __len__(self) -> int:
        return len(self._build_table())


FORMATS = _Formats()


def is_network(names: Iterable[str]) -> bool:
    """Return True if a format knows these names of arrays, also if its networks are not read."""
    unique_names = dict.fromkeys(names)
    return any(_is_in_format(unique_names, format_) for format_ in FORMATS.values())


def _is_in_format(names: Iterable[str], format_: Format) -> bool:
    try:
        return format_.find_canonical(names) is not None
    except ValueError:
        return True


_STANDARD_VALUES = {
    "network": (None,),
    "block": (None,),
    "position_embedding": _TABULAR,
    "position_layers": ("stem",),
    "pool": get_args(Pool),
    "head": get_args(HeadForm),
}
"""Field of the architecture → values that other formats can hold."""


def require_standard(a: Architecture, format_name: str) -> None:
    """Raise ValueError if a network has parts for which other formats have no names.

    These are parts of vit_jax or of the user.
    """
    other_parts = {}
    for field, values in _STANDARD_VALUES.items():
        value = getattr(a, field)
        if value not in values:
            other_parts[field] = value
    if other_parts:
        raise ValueError(
            f"The format {format_name} cannot hold {a.name}, which has "
            f"{_state_fields(other_parts)}: write vit_jax instead."
        )


def _state_fields(fields: Mapping[str, object]) -> str:
    return ", ".join(f"{field}={value!r}" for field, value in fields.items())


def require_writable(format_name: str, a: Architecture) -> None:
    """Raise ValueError, with all reasons, if a format cannot hold a network.

    Every format has room for a table of positions, so their form is no reason.
    """
    format_ = FORMATS[format_name]
    reasons = []
    for check in _CHECKS:
        reason = check(format_, a)
        if reason:
            reasons.append(reason)
    if reasons:
        raise ValueError(
            f"The format {format_name} cannot hold {a.name}: {'; '.join(reasons)}. "
            "vit_jax holds every network."
        )


def _check_hidden_layer(format_: Format, a: Architecture) -> str:
    if a.head != "mlp" or format_.holds_hidden_layer(a):
        return ""
    return (
        "its head has a hidden layer, which only released and vit_jax hold (huggingface too where "
        "there are no classes): omit the head (without_head)"
    )


def _check_family(format_: Format, a: Architecture) -> str:
    if a.family in format_.families:
        return ""
    return format_.other_families


def _check_units(format_: Format, a: Architecture) -> str:
    if a.family != "resnet" or a.residual_unit == "preactivation":
        return ""
    return "it holds ResNets of pre-activation units only"


def _check_parts(format_: Format, a: Architecture) -> str:
    lacking = format_.find_lacking(a)
    if not lacking:
        return ""
    reason = f"it is not written with {_state_fields(lacking)}"
    if list(lacking) == ["num_classes"]:
        return f"{reason}: omit the head (without_head)"
    return reason


_CHECKS = (_check_hidden_layer, _check_family, _check_units, _check_parts)
"""Checks of a network for a format, each with its reason, or "" without any."""
