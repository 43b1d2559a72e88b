"""Names of timm's models (.safetensors): VisionTransformer, its hybrids, and ResNetV2 as Big Transfer's.

timm keeps query, key and value in one array. Parts that timm has and our networks do not compute are listed, so that
a file with them is refused in plain words.
"""

import re
from collections.abc import Callable, Iterable, Mapping

from vit_jax.config.architecture import Architecture
from vit_jax.weights.names.entry import Facts, Rule, classes_of, count, counts, pytorch_rules, shape_of
from vit_jax.weights.names.ours import Shape

REFUSED = {  # what a name shows of the network
    r"fc_norm\.": "a norm after the average instead of before it (fc_norm)",
    r".*\.[qk]_norm\.": "norms of queries and keys (qk_norm)",
    r".*\.(ls\d?\.gamma|gamma_\d)$": "scaled residual branches (layer scale)",
    r"reg_token$": "register tokens",
    r"(dist_token|head_dist\..*)$": "a distillation token",
    r"norm_pre\.": "a norm before the first block",
    r".*(relative_position|rel_pos)": "relative positions",
    r".*\.mlp\.(fc1_g|fc1_x|w12|norm)\.": "gated or normed MLPs",
    r".*running_mean$": "batch norm",
    r"stem\.conv1\.": "a root of several convolutions",
}
RESNET_DEFAULTS = {
    "group_norm_epsilon": 1e-5,
    "standardization_epsilon": 1e-8,
    "standardization_epsilon_added_to": "variance",
}
STEM = "patch_embed.backbone"


def rules(a: Architecture) -> list[Rule]:
    """The names of a ViT, a hybrid or a pre-activation ResNet."""
    block = r"encoder/blocks/(\d+)"
    layers = {
        **_resnet_layers("stem", f"{STEM}.stem" if a.units else STEM, f"{STEM}.stages"),
        **(_resnet_layers("body", "stem", "stages") if a.residual_unit == "preactivation" else {}),
        "norm": "norm",
        "embedding": "patch_embed.proj",
        f"{block}/attention_norm": r"blocks.\1.norm1",
        f"{block}/attention/(?:query|key|value)": r"blocks.\1.attn.qkv",
        f"{block}/attention/out": r"blocks.\1.attn.proj",
        f"{block}/mlp_norm": r"blocks.\1.norm2",
        f"{block}/mlp/expand": r"blocks.\1.mlp.fc1",
        f"{block}/mlp/contract": r"blocks.\1.mlp.fc2",
        "encoder/norm": "norm",
        "pooling/attention/query": "attn_pool.q",
        "pooling/attention/(?:key|value)": "attn_pool.kv",
        "pooling/attention/out": "attn_pool.proj",
        "pooling/norm": "attn_pool.norm",
        "pooling/mlp/expand": "attn_pool.mlp.fc1",
        "pooling/mlp/contract": "attn_pool.mlp.fc2",
        "head/linear": "head" if a.has_transformer else "head.fc",
    }
    single = {"class_token": "cls_token", "positions/table": "pos_embed", "pooling/probe": "attn_pool.latent"}
    pooled = [] if a.has_transformer else [Rule("head/linear/kernel", "head.fc.weight", "io->oi11")]  # a convolution
    return [*pooled, *(Rule(ours, theirs) for ours, theirs in single.items()), *pytorch_rules(layers)]


def _resnet_layers(ours: str, root: str, stages: str) -> dict[str, str | Callable[[re.Match[str]], str]]:
    unit = rf"{ours}/stage(\d+)/unit(\d+)"

    def theirs(rest: str) -> Callable[[re.Match[str]], str]:
        """Stages and units count from 0 there."""
        return lambda match: match.expand(rf"{stages}.{int(match[1]) - 1}.blocks.{int(match[2]) - 1}.{rest}")

    return {
        f"{ours}/root/conv": f"{root}.conv",
        f"{ours}/root/norm": f"{root}.norm",
        rf"{unit}/conv(\d)": theirs(r"conv\3"),
        rf"{unit}/norm(\d)": theirs(r"norm\3"),
        f"{unit}/shortcut/conv": theirs("downsample.conv"),
        f"{unit}/shortcut/norm": theirs("downsample.norm"),
    }


def canonical(names: Iterable[str]) -> dict[str, str] | None:
    """The names as they are; None for another format; ValueError for a network of timm's that ours does not compute."""
    names = set(names)
    is_resnet = {"stem.conv.weight", "stages.0.blocks.0.conv1.weight"} <= names
    if not is_resnet and "patch_embed.proj.weight" not in names:
        return None
    for pattern, part in REFUSED.items():
        if name := next((name for name in sorted(names) if re.match(pattern, name)), None):
            raise ValueError(f"it has {part}, which our networks do not compute: {name}")
    if {"cls_token", "attn_pool.latent"} <= names:
        raise ValueError(
            "it has a class token beside attention pooling, which our networks do not compute: attn_pool.latent"
        )
    if is_resnet and "norm.weight" not in names:
        raise ValueError("its residual units norm after each convolution, which our networks pad otherwise than timm")
    return {name: name for name in names}


def facts(shapes: Mapping[str, Shape]) -> Facts:
    """What the file determines; not the number of heads. ValueError as for `shape_of`."""
    if "patch_embed.proj.weight" not in shapes:
        return _resnet_facts(shapes)
    width, _, *patch_size = shape_of(shapes, "patch_embed.proj.weight", 4)
    has_stages = f"{STEM}.stem.conv.weight" in shapes
    root = f"{STEM}.stem.conv.weight" if has_stages else f"{STEM}.conv.weight"
    is_hybrid = root in shapes
    pool = "token" if "cls_token" in shapes else "map" if "attn_pool.latent" in shapes else "gap"
    return Facts(
        family="hybrid" if is_hybrid else "vit",
        patch_size=(patch_size[0], patch_size[1]),
        width=width,
        depth=count(shapes, r"blocks\.(\d+)\."),
        mlp_dim=shape_of(shapes, "blocks.0.mlp.fc1.weight", 2)[0],
        num_heads=None,
        units=counts(shapes, rf"{re.escape(STEM)}\.stages\.(\d+)\.blocks\.(\d+)\."),
        root_channels=shape_of(shapes, root, 4)[0] if is_hybrid else 64,
        pool=pool,
        num_classes=classes_of(shapes, "head.weight", 0, "head.bias"),
        position_rows=shape_of(shapes, "pos_embed", 3)[1] if "pos_embed" in shapes else None,
        class_rows=(0, 1) if pool == "token" else (0,),
        fixed_positions="none",
        defaults={"gelu": "exact", "layer_norm_epsilon": 1e-6, **(RESNET_DEFAULTS if is_hybrid else {})},
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
