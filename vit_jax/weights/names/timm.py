"""Names of timm's models (.safetensors).

They are VisionTransformer, its hybrids, Eva, and ResNetV2 as Big Transfer's.
VisionTransformer keeps query, key and value in one array, Eva (DINOv3, EVA-02, PE) sometimes apart.
Names in the authors' files are renamed to these first.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from vit_jax.config.architecture import Architecture
from vit_jax.weights.library_lookup import find_timm_model
from vit_jax.weights.library_models import is_eva
from vit_jax.weights.names import originals
from vit_jax.weights.names.entry import QKV, Rule, make_pytorch_rules, make_transformer_rules
from vit_jax.weights.names.facts import (
    Facts,
    count_classes,
    count_units,
    find_vit_facts,
    read_shape,
)
from vit_jax.weights.names.format import Format
from vit_jax.weights.names.ours import Shape

RESNET_DEFAULTS: dict[str, Any] = {
    "group_norm_epsilon": 1e-5,
    "standardization_epsilon": 1e-8,
    "standardization_epsilon_added_to": "variance",
}
STEM = "patch_embed.backbone"
_PATCHES = "patch_embed.proj.weight"
_EVA_NAMES = {"blocks.0.gamma_1", "blocks.0.attn.q_bias", "blocks.0.attn.q_proj.weight"}


class Style(NamedTuple):
    """Names of the parts of a block in timm's classes."""

    scale: str = "ls{}.gamma"  # name of LayerScale
    splits_qkv: bool = False  # one array each for queries, keys and values
    splits_bias: bool = False  # the same for their biases, if kernels are in one array
    splits_gate: bool = False  # one array each for the gate and the gated layer of SwiGLU
    embedding_norm: str = "norm_pre"
    # Class token and positions have no leading axes, and the head is a kernel without
    # transposition.
    is_flat: bool = False
    # The patch embedding is a linear layer, and all prefix tokens are one array.
    embeds_linearly: bool = False
    joins_pooling: bool = False  # query, key and value of the pooling are one array


def read_style(shapes: Mapping[str, Shape]) -> Style:
    """Return the style of a file."""
    scale = Style().scale
    if "blocks.0.gamma_1" in shapes:
        scale = "gamma_{}"
    embedding_norm = Style().embedding_norm
    if "patch_embed.norm.weight" in shapes:
        embedding_norm = "patch_embed.norm"
    return Style(
        scale=scale,
        splits_qkv="blocks.0.attn.q_proj.weight" in shapes,
        splits_bias="blocks.0.attn.q_bias" in shapes,
        splits_gate="blocks.0.mlp.fc1_g.weight" in shapes,
        embedding_norm=embedding_norm,
        is_flat=len(shapes.get("pos_embed", ())) == 2,
        embeds_linearly=len(shapes.get("patch_embed.proj.weight", ())) == 2,
        joins_pooling="attn_pool.qkv.weight" in shapes,
    )


def choose_style(a: Architecture) -> Style:
    """Return the style of timm's class for a network."""
    has_normed_mlp = a.mlp == "swiglu_norm"
    has_apart_gate = a.mlp == "swiglu" and (a.norm == "rms" or a.rope == "centred")
    scale = Style().scale
    if is_eva(a):
        scale = "gamma_{}"
    embedding_norm = Style().embedding_norm
    if a.embedding_norm == "patches":
        embedding_norm = "patch_embed.norm"
    return Style(
        scale=scale,
        splits_qkv=has_normed_mlp,
        splits_bias=a.qkv_bias == "query_value",
        splits_gate=has_normed_mlp or has_apart_gate,
        embedding_norm=embedding_norm,
    )


def make_rules(a: Architecture, shapes: Mapping[str, Shape]) -> list[Rule]:
    """Return the names of a ViT, a hybrid or a pre-activation ResNet."""
    style = read_style(shapes) if shapes else choose_style(a)
    stem_root = STEM
    if a.units:
        stem_root = f"{STEM}.stem"
    layers = _name_resnet_layers("stem", stem_root, f"{STEM}.stages")
    if a.residual_unit == "preactivation":
        layers |= _name_resnet_layers("body", "stem", "stages")
    layers["norm"] = "norm"

    if a.has_transformer:
        layers["head/linear"] = "head"
        return [*make_vit_rules(style), *make_pytorch_rules(layers)]
    layers["head/linear"] = "head.fc"
    kernel = Rule("head/linear/kernel", "head.fc.weight", "io->oi11")  # a convolution
    return [kernel, *make_vit_rules(style), *make_pytorch_rules(layers)]


def make_vit_rules(style: Style) -> list[Rule]:
    """Return the names of a transformer in a style."""
    layers = {
        "embedding": "patch_embed.proj",
        "embedding_norm": style.embedding_norm,
        ".attention_norm": ".norm1",
        **_name_projections(style),
        ".attention/norm": ".attn.norm",
        ".attention/out": ".attn.proj",
        ".mlp_norm": ".norm2",
        ".mlp/norm": ".mlp.norm",
        **_name_gate(style),
        ".mlp/contract": ".mlp.fc2",
        "encoder/norm": "norm",
        "pooled_norm": "fc_norm",
        "head/distillation": "head_dist",
        **_name_pooling(style),
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
        for part in ("query", "value"):
            arrays[f".attention/{part}/bias"] = f".attn.{part[0]}_bias"
            layouts[f".attention/{part}/bias"] = "Th->(Th)"
    if style.is_flat:
        arrays["head/linear/kernel"] = "proj"
        layouts |= {"class_token": "abD->(abD)", "positions/table": "aSD->(aS)D"}
    if style.embeds_linearly:
        arrays["embedding/kernel"] = "patch_embed.proj.weight"
        layouts |= {"class_token": "aPD->(aP)D", "embedding/kernel": "hwCD->D(Chw)"}
    return make_transformer_rules("blocks.", layers, arrays, layouts)


def _name_projections(style: Style) -> dict[str, str]:
    if style.splits_qkv:
        return {f".attention/{part}": f".attn.{part[0]}_proj" for part in QKV}
    return dict.fromkeys([f".attention/{part}" for part in QKV], ".attn.qkv")


def _name_gate(style: Style) -> dict[str, str]:
    if style.splits_gate:
        return {".mlp/gate": ".mlp.fc1_g", ".mlp/expand": ".mlp.fc1_x"}
    return {".mlp/gate": ".mlp.fc1", ".mlp/expand": ".mlp.fc1"}


def _name_pooling(style: Style) -> dict[str, str]:
    query = "qkv" if style.joins_pooling else "q"
    key_value = "qkv" if style.joins_pooling else "kv"
    return {
        "pooling/attention/query": f"attn_pool.{query}",
        "pooling/attention/(?:key|value)": f"attn_pool.{key_value}",
        "pooling/attention/out": "attn_pool.proj",
        "pooling/norm": "attn_pool.norm",
        "pooling/mlp/expand": "attn_pool.mlp.fc1",
        "pooling/mlp/contract": "attn_pool.mlp.fc2",
    }


def _name_resnet_layers(
    ours: str,
    root: str,
    stages: str,
) -> dict[str, str | Callable[[re.Match[str]], str]]:
    unit = rf"{ours}/stage(\d+)/unit(\d+)"

    def make_name(rest: str) -> Callable[[re.Match[str]], str]:
        def name_layer(match: re.Match[str]) -> str:
            stage = int(match[1]) - 1
            block = int(match[2]) - 1
            return match.expand(rf"{stages}.{stage}.blocks.{block}.{rest}")

        return name_layer

    return {
        f"{ours}/root/conv": f"{root}.conv",
        f"{ours}/root/norm": f"{root}.norm",
        rf"{unit}/conv(\d)": make_name(r"conv\3"),
        rf"{unit}/norm(\d)": make_name(r"norm\3"),
        f"{unit}/shortcut/conv": make_name("downsample.conv"),
        f"{unit}/shortcut/norm": make_name("downsample.norm"),
    }


def find_canonical(names: Iterable[str]) -> dict[str, str] | None:
    """Return timm's names → names in the file; None for another format.

    Raises:
      ValueError: a network of timm's that ours does not compute, or two arrays of one name.
    """
    renamed = originals.rename(names)
    names = set(renamed)
    is_resnet = {"stem.conv.weight", "stages.0.blocks.0.conv1.weight"} <= names
    if not is_resnet and "patch_embed.proj.weight" not in names:
        return None
    if is_resnet and "norm.weight" not in names:
        raise ValueError(
            "its residual units norm after each convolution, "
            "which our networks pad otherwise than timm"
        )
    if "dist_token" in names and not {"head_dist.weight", "head_dist.bias"} & names:
        raise ValueError(
            "it is a distilled DeiT without its heads, whose features in timm are the mean of "
            "the class and the distillation token, which our networks do not compute: "
            "take the file with head and head_dist"
        )
    return renamed


def find_facts(shapes: Mapping[str, Shape]) -> Facts:
    """Return the facts of a file, without the number of heads.

    Raises:
      ValueError: an array is missing, or has a wrong shape.
    """
    if _PATCHES not in shapes:
        return _find_resnet_facts(shapes)
    style = read_style(shapes)
    if style.embeds_linearly:
        shapes = {**shapes, _PATCHES: _unfold_patches(shapes)}
    facts = _find_transformer_facts(shapes, style)

    changes: dict[str, Any] = {}
    if facts.modern_options["mlp"] == "swiglu_norm" and not style.splits_gate:
        raise ValueError(
            "it has a norm in MLPs without a gate, which our networks do not compute: "
            "blocks.0.mlp.norm"
        )
    first_layer = shapes.get("blocks.0.mlp.fc1.weight", (0,))
    has_packed_gate = first_layer[0] == 2 * facts.mlp_dim
    if not style.splits_gate and not has_packed_gate:
        changes["mlp"] = "gelu"  # gate and expand share their name with the layer of a plain MLP
    if style.embedding_norm == "patch_embed.norm":
        changes["embedding_norm"] = "patches"
    modern_options = {**facts.modern_options, **changes}
    return dataclasses.replace(facts, modern_options=modern_options)


def _unfold_patches(shapes: Mapping[str, Shape]) -> Shape:
    """Return the shape of a linear patch embedding as a convolution."""
    width, numbers = read_shape(shapes, _PATCHES, 2)
    side = math.isqrt(numbers // 3)
    return width, 3, side, side


def _find_transformer_facts(shapes: Mapping[str, Shape], style: Style) -> Facts:
    root = f"{STEM}.stem.conv.weight"
    if root not in shapes:
        root = f"{STEM}.conv.weight"  # a stem without stages
    is_hybrid = root in shapes

    num_classes = count_classes(shapes, "head.weight", 0, "head.bias")
    absent = frozenset[str]()
    if style.is_flat:
        num_classes = count_classes(shapes, "proj", -1, "")
        absent = frozenset(["head/linear/bias"])

    family = "vit"
    root_channels = 64
    defaults: dict[str, Any] = {"gelu": "exact", "layer_norm_epsilon": 1e-6}
    if is_hybrid:
        family = "hybrid"
        defaults |= RESNET_DEFAULTS
        root_channels = read_shape(shapes, root, 4)[0]

    return find_vit_facts(
        shapes,
        make_vit_rules(style),
        num_classes=num_classes,
        family=family,
        units=count_units(shapes, rf"{re.escape(STEM)}\.stages\.(\d+)\.blocks\.(\d+)\."),
        root_channels=root_channels,
        fixed_positions="none",
        defaults=defaults,
        needs_rope=_has_rope(shapes, style),
        absent=absent,
    )


def _has_rope(shapes: Mapping[str, Shape], style: Style) -> bool:
    """Return True for a network that timm computes by Eva, in timm's or the authors' names."""
    if _EVA_NAMES & shapes.keys() or style.joins_pooling:
        return True
    if {"cls_token", "attn_pool.latent"} <= shapes.keys():
        return True
    return style.is_flat and "norm.weight" not in shapes  # PE; CLIP has that norm


def _find_resnet_facts(shapes: Mapping[str, Shape]) -> Facts:
    return Facts(
        family="resnet",
        width=read_shape(shapes, "norm.weight", 1)[0],
        units=count_units(shapes, r"stages\.(\d+)\.blocks\.(\d+)\."),
        root_channels=read_shape(shapes, "stem.conv.weight", 4)[0],
        pool="gap",
        num_classes=count_classes(shapes, "head.fc.weight", 0, "head.fc.bias"),
        defaults={"residual_unit": "preactivation", **RESNET_DEFAULTS},
    )


def find_lacking(a: Architecture) -> dict[str, object]:
    """Return the parts of a network that timm's nearest model does not compute."""
    return find_timm_model(a).find_lacking(a)


FORMAT = Format(
    suffix=".safetensors",
    find_canonical=find_canonical,
    find_facts=find_facts,
    make_rules=make_rules,
    find_lacking=find_lacking,
)
