"""Names of timm's models (.safetensors): VisionTransformer, its hybrids, Eva, and ResNetV2 as Big Transfer's.

The original DINOv2, Franca and TIPSv2 have nearly the same names. VisionTransformer keeps query, key and value in one
array, Eva (DINOv3, EVA-02, PE) sometimes apart. Parts that timm has and our networks do not compute are listed, so that
a file with them is rejected in plain words.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from vit_jax.config.architecture import Architecture
from vit_jax.weights.names import originals
from vit_jax.weights.names.entry import QKV, Rule, pytorch_rules, transformer_rules
from vit_jax.weights.names.facts import Facts, classes_of, counts, shape_of, vit_facts
from vit_jax.weights.names.library_classes import is_eva
from vit_jax.weights.names.ours import Shape

RESNET_DEFAULTS = {
    "group_norm_epsilon": 1e-5,
    "standardization_epsilon": 1e-8,
    "standardization_epsilon_added_to": "variance",
}
STEM = "patch_embed.backbone"


class Style(NamedTuple):
    """Names of the parts of a block in timm's classes."""

    scale: str = "ls{}.gamma"  # of LayerScale
    splits_qkv: bool = False  # one array each for queries, keys and values
    splits_bias: bool = False  # the same for their biases, if kernels are in one array
    splits_gate: bool = False  # one array each for the gate and the gated layer of SwiGLU
    embedding_norm: str = "norm_pre"
    is_flat: bool = False  # class token and positions without leading axes, the head a kernel without transposition
    is_radio: bool = (
        False  # the patch embedding is a linear layer, and all prefix tokens are one array
    )
    joins_pooling: bool = False  # query, key and value of the pooling are one array


def style_of(a: Architecture | None, shapes: Mapping[str, Shape]) -> Style:
    """Return the style of a file; without shapes that of timm's class for a network."""
    if shapes:
        return Style(
            scale="gamma_{}" if "blocks.0.gamma_1" in shapes else Style().scale,
            splits_qkv="blocks.0.attn.q_proj.weight" in shapes,
            splits_bias="blocks.0.attn.q_bias" in shapes,
            splits_gate="blocks.0.mlp.fc1_g.weight" in shapes,
            embedding_norm="patch_embed.norm"
            if "patch_embed.norm.weight" in shapes
            else "norm_pre",
            is_flat=len(shapes.get("pos_embed", ())) == 2,
            is_radio=len(shapes.get("patch_embed.proj.weight", ())) == 2,
            joins_pooling="attn_pool.qkv.weight" in shapes,
        )
    assert a is not None
    return Style(
        scale="gamma_{}" if is_eva(a) else Style().scale,
        splits_qkv=a.mlp == "swiglu_norm",
        splits_bias=a.qkv_bias == "query_value",
        splits_gate=a.mlp == "swiglu_norm"
        or (a.mlp == "swiglu" and (a.norm == "rms" or a.rope == "centred")),
        embedding_norm="patch_embed.norm" if a.embedding_norm == "patches" else "norm_pre",
    )


def rules(a: Architecture, shapes: Mapping[str, Shape]) -> list[Rule]:
    """Return the names of a ViT, a hybrid or a pre-activation ResNet."""
    resnets = {
        **_resnet_layers("stem", f"{STEM}.stem" if a.units else STEM, f"{STEM}.stages"),
        **(_resnet_layers("body", "stem", "stages") if a.residual_unit == "preactivation" else {}),
        "norm": "norm",
    }
    pooled = (
        [] if a.has_transformer else [Rule("head/linear/kernel", "head.fc.weight", "io->oi11")]
    )  # a convolution
    head = "head" if a.has_transformer else "head.fc"
    return [
        *pooled,
        *_vit_rules(style_of(a, shapes)),
        *pytorch_rules({**resnets, "head/linear": head}),
    ]


def radio_rules() -> list[Rule]:
    """Return the names that C-RADIO has after renaming: those of timm, with all prefix tokens in one array."""
    return _vit_rules(Style(is_radio=True))


def _vit_rules(style: Style) -> list[Rule]:
    gate, up = ("fc1_g", "fc1_x") if style.splits_gate else ("fc1", "fc1")
    pooled = ("qkv", "qkv") if style.joins_pooling else ("q", "kv")
    layers = {
        "embedding": "patch_embed.proj",
        "embedding_norm": style.embedding_norm,
        ".attention_norm": ".norm1",
        **{
            f".attention/{p}": f".attn.{p[0]}_proj" if style.splits_qkv else ".attn.qkv"
            for p in QKV
        },
        ".attention/norm": ".attn.norm",
        ".attention/out": ".attn.proj",
        ".mlp_norm": ".norm2",
        ".mlp/norm": ".mlp.norm",
        ".mlp/gate": f".mlp.{gate}",
        ".mlp/expand": f".mlp.{up}",
        ".mlp/contract": ".mlp.fc2",
        "encoder/norm": "norm",
        "pooled_norm": "fc_norm",
        "head/distillation": "head_dist",
        "pooling/attention/query": f"attn_pool.{pooled[0]}",
        "pooling/attention/(?:key|value)": f"attn_pool.{pooled[1]}",
        "pooling/attention/out": "attn_pool.proj",
        "pooling/norm": "attn_pool.norm",
        "pooling/mlp/expand": "attn_pool.mlp.fc1",
        "pooling/mlp/contract": "attn_pool.mlp.fc2",
    }
    arrays = {
        "class_token": "cls_token",
        "distillation_token": "dist_token",
        "register_tokens": "reg_token",
        "positions/table": "pos_embed",
        "pooling/probe": "attn_pool.latent",
        ".attention_scale": f".{style.scale.format(1)}",
        ".mlp_scale": f".{style.scale.format(2)}",
    }
    layouts: dict[str, str] = {}
    if style.splits_bias and not style.splits_qkv:
        arrays |= {
            f".attention/{part}/bias": f".attn.{part[0]}_bias" for part in ("query", "value")
        }
        layouts |= {f".attention/{part}/bias": "Th->(Th)" for part in ("query", "value")}
    if style.is_flat:
        arrays["head/linear/kernel"] = "proj"
        layouts |= {"class_token": "abD->(abD)", "positions/table": "aSD->(aS)D"}
    if style.is_radio:
        arrays["embedding/kernel"] = "patch_embed.proj.weight"
        layouts |= {"class_token": "aPD->(aP)D", "embedding/kernel": "hwCD->D(Chw)"}
    return transformer_rules("blocks.", layers, arrays, layouts)


def _resnet_layers(
    ours: str, root: str, stages: str
) -> dict[str, str | Callable[[re.Match[str]], str]]:
    unit = rf"{ours}/stage(\d+)/unit(\d+)"

    def theirs(rest: str) -> Callable[[re.Match[str]], str]:
        return lambda match: match.expand(
            rf"{stages}.{int(match[1]) - 1}.blocks.{int(match[2]) - 1}.{rest}"
        )

    return {
        f"{ours}/root/conv": f"{root}.conv",
        f"{ours}/root/norm": f"{root}.norm",
        rf"{unit}/conv(\d)": theirs(r"conv\3"),
        rf"{unit}/norm(\d)": theirs(r"norm\3"),
        f"{unit}/shortcut/conv": theirs("downsample.conv"),
        f"{unit}/shortcut/norm": theirs("downsample.norm"),
    }


def canonical(names: Iterable[str]) -> dict[str, str] | None:
    """Return timm's names → names in the file; None for another format.

    Raises:
      ValueError: a network of timm's that ours does not compute, or two arrays of one name.
    """
    renamed = originals.canonical(names)
    names = set(renamed)
    is_resnet = {"stem.conv.weight", "stages.0.blocks.0.conv1.weight"} <= names
    if not is_resnet and "patch_embed.proj.weight" not in names:
        return None
    if is_resnet and "norm.weight" not in names:
        raise ValueError(
            "its residual units norm after each convolution, which our networks pad otherwise than timm"
        )
    if "dist_token" in names and not {"head_dist.weight", "head_dist.bias"} & names:
        raise ValueError(
            "it is a distilled DeiT without its heads, whose features in timm are the mean of the class and the "
            "distillation token, which our networks do not compute: bring the file with head and head_dist"
        )
    return renamed


def facts(shapes: Mapping[str, Shape]) -> Facts:
    """Return the facts of a file; not the number of heads. ValueError as for `shape_of`."""
    if "patch_embed.proj.weight" not in shapes:
        return _resnet_facts(shapes)
    has_stages = f"{STEM}.stem.conv.weight" in shapes
    root = f"{STEM}.stem.conv.weight" if has_stages else f"{STEM}.conv.weight"
    is_hybrid = root in shapes
    style = style_of(None, shapes)
    if style.is_radio:
        width, numbers = shape_of(shapes, "patch_embed.proj.weight", 2)
        side = math.isqrt(numbers // 3)
        shapes = {**shapes, "patch_embed.proj.weight": (width, 3, side, side)}
    vit = vit_facts(
        shapes,
        _vit_rules(style),
        num_classes=classes_of(shapes, "proj", -1, "")
        if style.is_flat
        else classes_of(shapes, "head.weight", 0, "head.bias"),
        family="hybrid" if is_hybrid else "vit",
        units=counts(shapes, rf"{re.escape(STEM)}\.stages\.(\d+)\.blocks\.(\d+)\."),
        root_channels=shape_of(shapes, root, 4)[0] if is_hybrid else 64,
        fixed_positions="none",
        defaults={
            "gelu": "exact",
            "layer_norm_epsilon": 1e-6,
            **(RESNET_DEFAULTS if is_hybrid else {}),
        },
    )
    gated = shapes.get("blocks.0.mlp.fc1.weight", (0,))[0] == 2 * vit.mlp_dim
    if vit.modern_options["mlp"] == "swiglu_norm" and not style.splits_gate:
        raise ValueError(
            "it has a norm in MLPs without a gate, which our networks do not compute: blocks.0.mlp.norm"
        )
    changes: dict[str, Any] = (
        {"mlp": "gelu"}
        if vit.modern_options["mlp"] == "swiglu" and not style.splits_gate and not gated
        else {}
    )
    if style.embedding_norm == "patch_embed.norm":
        changes["embedding_norm"] = "patches"
    rotary = {
        "blocks.0.gamma_1",
        "blocks.0.attn.q_bias",
        "blocks.0.attn.q_proj.weight",
    } & shapes.keys()
    has_rope = (
        bool(rotary) or {"cls_token", "attn_pool.latent"} <= shapes.keys() or style.joins_pooling
    )
    has_rope |= style.is_flat and "norm.weight" not in shapes  # PE; CLIP has that norm
    absent = frozenset(["head/linear/bias"]) if style.is_flat else frozenset[str]()
    if style.is_radio:
        changes["registers"] = shape_of(shapes, "cls_token", 2)[0] - 1
        absent = frozenset(["register_tokens"])
    return dataclasses.replace(
        vit,
        modern_options={**vit.modern_options, **changes},
        needs_rope=has_rope,
        absent=absent,
        is_radio=style.is_radio,
    )


def _resnet_facts(shapes: Mapping[str, Shape]) -> Facts:
    return Facts(
        family="resnet",
        width=shape_of(shapes, "norm.weight", 1)[0],
        units=counts(shapes, r"stages\.(\d+)\.blocks\.(\d+)\."),
        root_channels=shape_of(shapes, "stem.conv.weight", 4)[0],
        pool="gap",
        num_classes=classes_of(shapes, "head.fc.weight", 0, "head.fc.bias"),
        defaults={"residual_unit": "preactivation", **RESNET_DEFAULTS},
    )
