"""Facts about a network from names and shapes of a file, which may contain anything: no shape is trusted."""

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from vit_jax.weights.names.entry import Rule, name_of
from vit_jax.weights.names.ours import Shape


@dataclasses.dataclass(frozen=True, kw_only=True)
class Facts:
    """Facts about a network; None is unknown."""

    family: str = "vit"
    patch_size: tuple[int, int] = (1, 1)
    width: int
    depth: int = 0
    mlp_dim: int = 0
    num_heads: int | None = 0
    units: tuple[int, ...] = ()
    root_channels: int = 64
    pool: str
    head: str = "linear"
    num_classes: int
    position_rows: int | None = None  # length of the table of positions; None where there is none
    fixed_positions: str = "sincos2d"  # the positions without a table
    prefix_rows: tuple[int, ...] | None = (
        None  # possible numbers of rows of prefix tokens; None: any number
    )
    # Fields of the architecture that the format fixes but no file states: GELU form, epsilons.
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    # Fields of the architecture that the arrays decide: registers, biases, norms.
    modern_options: dict[str, Any] = dataclasses.field(default_factory=dict)
    needs_rope: bool = False  # the network has rotary positions, whose form is not in the file
    is_distilled: bool = (
        False  # the file has a distillation token with a head, as `distilled` describes
    )
    is_radio: bool = False  # the arrays are as `radio` describes
    absent: frozenset[str] = frozenset()  # parameters of ours that are zeros and not in the file


def shape_of(shapes: Mapping[str, Shape], name: str, ndim: int) -> Shape:
    """Return the shape of an array; ValueError if it is missing, has another number of axes, or an empty one."""
    if name not in shapes:
        raise ValueError(f"{name} is missing")
    if len(shapes[name]) != ndim or 0 in shapes[name]:
        raise ValueError(
            f"{name} has the shape {shapes[name]}, where {ndim} axes with elements are expected"
        )
    return shapes[name]


def classes_of(shapes: Mapping[str, Shape], kernel: str, axis: int, bias: str) -> int:
    """Return the number of classes, from the first or last axis of the head's kernel; 0 without a head.

    The bias states it too, so that a kernel under another name is reported as missing.
    """
    return (shapes.get(kernel) or (0,))[axis] or (shapes.get(bias) or (0,))[0]


def count(names: Iterable[str], pattern: str) -> int:
    """Return how many values the group of `pattern` has at the beginning of names; gaps are reported later, by name."""
    return len({match[1] for name in names if (match := re.match(pattern, name))})


def counts(names: Iterable[str], pattern: str) -> tuple[int, ...]:
    """Return how many values the second group has for each number of the first: the units of every stage."""
    units: dict[str, set[str]] = {}
    for match in filter(None, (re.match(pattern, name) for name in names)):
        units.setdefault(match[1], set()).add(match[2])
    return tuple(
        len(units[stage]) for stage in sorted(units, key=lambda digits: (len(digits), digits))
    )


_BLOCK = "encoder/blocks/0"


def vit_facts(
    shapes: Mapping[str, Shape],
    rules: Sequence[Rule],
    *,
    num_classes: int,
    defaults: Mapping[str, Any],
    head: str = "linear",
    **others: Any,
) -> Facts:
    """Return the facts about a ViT in PyTorch's layouts, whose names have these rules; not the number of heads.

    Further arguments are fields of `Facts`. ValueError as for `shape_of`.
    """

    def find(ours: str) -> Shape | None:
        return shapes.get(name_of(rules, ours))

    def has(ours: str) -> bool:
        return find(ours) is not None

    width, _, *patch_size = shape_of(shapes, name_of(rules, "embedding/kernel"), 4)
    first_layer = name_of(rules, f"{_BLOCK}/attention_norm/scale")
    positions = name_of(rules, "positions/table")
    registers = find("register_tokens")
    is_distilled = has("distillation_token")
    tokens = int(has("class_token")) + int(is_distilled)
    pooled_norm = has("pooled_norm/scale")
    biases = [has(f"{_BLOCK}/attention/{name}/bias") for name in ("query", "key")]
    gated = "swiglu_norm" if has(f"{_BLOCK}/mlp/norm/scale") else "swiglu"
    modern_options = {
        "class_tokens": tokens,
        "registers": registers[-2] if registers is not None and len(registers) > 1 else 0,
        "layer_scale": 1.0 if has(f"{_BLOCK}/attention_scale") else None,
        "mlp": gated if has(f"{_BLOCK}/mlp/gate/kernel") else "gelu",
        "norm": "layer" if has(f"{_BLOCK}/attention_norm/bias") else "rms",
        "embedding_norm": "tokens" if has("embedding_norm/scale") else None,
        "final_norm": "pooled"
        if pooled_norm
        else "tokens"
        if has("encoder/norm/scale")
        else "none",
        "attention_norm": has(f"{_BLOCK}/attention/norm/scale"),
        "patch_bias": has("embedding/bias"),
        "qkv_bias": "all" if all(biases) else "query_value" if any(biases) else "none",
        "linear_bias": has(f"{_BLOCK}/mlp/contract/bias"),
    }
    is_pooled = has("pooling/probe")
    return Facts(
        patch_size=(patch_size[0], patch_size[1]),
        width=width,
        depth=count(shapes, re.escape(first_layer.partition("0")[0]) + r"(\d+)\."),
        mlp_dim=shape_of(shapes, name_of(rules, f"{_BLOCK}/mlp/contract/kernel"), 2)[1],
        num_heads=None,
        pool="map" if is_pooled else "gap" if pooled_norm or not tokens else "token",
        head=head,
        num_classes=num_classes,
        position_rows=shapes[positions][-2] if len(shapes.get(positions, ())) > 1 else None,
        defaults=defaults,
        modern_options=modern_options,
        is_distilled=is_distilled,
        **others,
    )
