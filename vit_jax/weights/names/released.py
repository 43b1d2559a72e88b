"""Names of the released ViT files (.npz), and of big_vision's, which are the same up to numbering and position.

Original files number submodules over all classes (MlpBlock_3), newer Flax over each (MlpBlock_0); big_vision keeps
positions at the top, without the class token's row, may have all layers in one array, and a prefix.
"""

import dataclasses
import re
from collections.abc import Iterable, Mapping

from vit_jax.config.architecture import Architecture
from vit_jax.weights.names.entry import STACKED, Rule
from vit_jax.weights.names.facts import Facts, classes_of, count, counts, shape_of
from vit_jax.weights.names.ours import Shape

_STATE = (
    r"(opt|chrono|extra)/|(epoch|state)$"  # of optimiser and clock, in a checkpoint of training
)
BESIDE = {  # prefix of the network → prefixes allowed beside it
    "params/img/": rf"{_STATE}|params/(?!img/)",
    "params/": _STATE,
    "opt/target/": _STATE,
    "": r"(?!)",
}
BIG_VISION_POSITIONS = "pos_embedding"


@dataclasses.dataclass(frozen=True)
class Style:
    """Differences between files of this family; the default is the original's."""

    numbers: tuple[int, int, int] = (
        2,
        1,
        3,
    )  # of the second norm, the attention and the MLP in a block
    positions: str = "Transformer/posembed_input/pos_embedding"
    is_stacked: bool = False  # all layers in one array
    group_norm: str = "C->111C"  # layout of the parameters


def rules(style: Style) -> list[Rule]:
    """Return the names of ViTs and hybrids."""
    norm2, attention, mlp = style.numbers
    layout = STACKED if style.is_stacked else ""
    ours = r"encoder/blocks/(\d+)"
    theirs = r"Transformer/encoderblock" if style.is_stacked else r"Transformer/encoderblock_\1"
    block = [
        Rule(rf"{ours}/attention_norm/(\w+)", rf"{theirs}/LayerNorm_0/\2", layout),
        Rule(rf"{ours}/mlp_norm/(\w+)", rf"{theirs}/LayerNorm_{norm2}/\2", layout),
        Rule(
            rf"{ours}/attention/(.+)",
            rf"{theirs}/MultiHeadDotProductAttention_{attention}/\2",
            layout,
        ),
        Rule(rf"{ours}/mlp/expand/(\w+)", rf"{theirs}/MlpBlock_{mlp}/Dense_0/\2", layout),
        Rule(rf"{ours}/mlp/contract/(\w+)", rf"{theirs}/MlpBlock_{mlp}/Dense_1/\2", layout),
    ]
    unit = r"stem/stage(\d+)/unit(\d+)"
    return [
        Rule(r"stem/root/conv/kernel", "conv_root/kernel"),
        Rule(r"stem/root/norm/(\w+)", r"gn_root/\1", style.group_norm),
        Rule(rf"{unit}/conv(\d)/kernel", r"block\1/unit\2/conv\3/kernel"),
        Rule(rf"{unit}/norm(\d)/(\w+)", r"block\1/unit\2/gn\3/\4", style.group_norm),
        Rule(rf"{unit}/shortcut/conv/kernel", r"block\1/unit\2/conv_proj/kernel"),
        Rule(rf"{unit}/shortcut/norm/(\w+)", r"block\1/unit\2/gn_proj/\3", style.group_norm),
        Rule(r"embedding/(\w+)", r"embedding/\1"),
        Rule(r"class_token", "cls"),
        Rule(r"positions/table", style.positions),
        *block,
        Rule(r"encoder/norm/(\w+)", r"Transformer/encoder_norm/\1"),
        Rule(r"pooling/probe", "MAPHead_0/probe"),
        Rule(r"pooling/attention/(.+)", r"MAPHead_0/MultiHeadDotProductAttention_0/\1"),
        Rule(r"pooling/norm/(\w+)", r"MAPHead_0/LayerNorm_0/\1"),
        Rule(r"pooling/mlp/expand/(\w+)", r"MAPHead_0/MlpBlock_0/Dense_0/\1"),
        Rule(r"pooling/mlp/contract/(\w+)", r"MAPHead_0/MlpBlock_0/Dense_1/\1"),
        Rule(r"head/hidden/(\w+)", r"pre_logits/\1"),
        Rule(r"head/linear/(\w+)", r"head/\1"),
    ]


def rules_of(a: Architecture, shapes: Mapping[str, Shape]) -> list[Rule]:
    """Return the names of a file with these shapes."""
    return rules(style_of(shapes))


def canonical(names: Iterable[str]) -> dict[str, str] | None:
    """Return names without prefix → names in the file; None for another format.

    With a prefix, the state of training and other networks are omitted, nothing else.
    """
    names = set(names)
    prefix = next((prefix for prefix in BESIDE if f"{prefix}embedding/kernel" in names), None)
    if prefix is None:
        return None
    kept = {name.removeprefix(prefix): name for name in names if name.startswith(prefix)}
    left = {
        name for name in names if not name.startswith(prefix) and not re.match(BESIDE[prefix], name)
    }
    return kept | {name: name for name in left}


def style_of(shapes: Mapping[str, Shape]) -> Style:
    """Return the style of names without prefix."""
    is_stacked = any(name.startswith("Transformer/encoderblock/") for name in shapes)
    is_linen = any(re.match(r"Transformer/encoderblock(_0)?/LayerNorm_1/", name) for name in shapes)
    return Style(
        numbers=(1, 0, 0) if is_linen else Style.numbers,
        positions=BIG_VISION_POSITIONS if BIG_VISION_POSITIONS in shapes else Style.positions,
        is_stacked=is_stacked,
        group_norm="" if len(shapes.get("gn_root/scale", ())) == 1 else Style.group_norm,
    )


def is_big_vision(shapes: Mapping[str, Shape], names: Mapping[str, str]) -> bool:
    """Return True if a file of this family is big_vision's."""
    style = style_of(shapes)
    if (
        names["embedding/kernel"].startswith("params/")
        or style.is_stacked
        or BIG_VISION_POSITIONS in shapes
    ):
        return True
    return style.numbers != Style.numbers and Style.positions not in shapes


def facts(shapes: Mapping[str, Shape]) -> Facts:
    """Return the facts of a file; ValueError as for `shape_of`."""
    style = style_of(shapes)
    _, attention, mlp = style.numbers
    block = "Transformer/encoderblock" if style.is_stacked else "Transformer/encoderblock_0"
    extra = int(style.is_stacked)
    height, patch_width, _, width = shape_of(shapes, "embedding/kernel", 4)
    query = shape_of(
        shapes, f"{block}/MultiHeadDotProductAttention_{attention}/query/kernel", 3 + extra
    )
    expand = shape_of(shapes, f"{block}/MlpBlock_{mlp}/Dense_0/kernel", 2 + extra)
    has_stem = "conv_root/kernel" in shapes
    pool = "token" if "cls" in shapes else "map" if "MAPHead_0/probe" in shapes else "gap"
    at_top = style.positions == BIG_VISION_POSITIONS
    return Facts(
        family="hybrid" if has_stem else "vit",
        patch_size=(height, patch_width),
        width=width,
        depth=query[0] if style.is_stacked else count(shapes, r"Transformer/encoderblock_(\d+)/"),
        mlp_dim=expand[-1],
        num_heads=query[-2],
        units=counts(shapes, r"block(\d+)/unit(\d+)/"),
        root_channels=shape_of(shapes, "conv_root/kernel", 4)[-1] if has_stem else 64,
        pool=pool,
        head="mlp" if "pre_logits/kernel" in shapes else "linear",
        num_classes=classes_of(shapes, "head/kernel", -1, "head/bias"),
        position_rows=shape_of(shapes, style.positions, 3)[1]
        if style.positions in shapes
        else None,
        prefix_rows=(0,) if pool != "token" else (0, 1) if at_top else (1,),
        defaults={"gelu": "tanh", "layer_norm_epsilon": 1e-6},
        modern_options={"class_tokens": int(pool == "token")},
    )
