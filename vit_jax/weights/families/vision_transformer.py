"""ViT: the networks of the paper, AugReg, SAM and big_vision.

Their files are the authors' (.npz), timm's and transformers'. In the authors' files the original
code numbers submodules over all classes (MlpBlock_3), newer Flax over each class (MlpBlock_0).
big_vision keeps positions at the top, without the class token's row, may have all layers in one
array, and a prefix.
"""

import dataclasses
import re
from collections.abc import Iterable, Mapping

from vit_jax.config.architecture import Architecture
from vit_jax.weights.family import Family, read_addresses, read_deprecated, read_models
from vit_jax.weights.folding import Normalisation
from vit_jax.weights.library_models import (
    ANY,
    ANY_CLASS,
    VISION_TRANSFORMER,
    WHOLE_BIAS,
    Held,
    TimmModel,
    TransformersModel,
)
from vit_jax.weights.names.entry import STACKED, Rule
from vit_jax.weights.names.facts import Facts, count_classes, count_units, count_values, read_shape
from vit_jax.weights.names.format import Format
from vit_jax.weights.names.huggingface_names import ATTENTION, CLASSIC, TOKENS, HuggingFaceNames
from vit_jax.weights.names.ours import Shape
from vit_jax.weights.patterns import NEVER

_MODELS = """
64/6/2
  test_vit
64/8/2
  test_vit2
96/9/3
  test_vit3 test_vit4
192/12/3
  vit_tiny_patch16_224 vit_tiny_patch16_384
256/14/4
  vit_wee_patch16_reg1_gap_256
320/14/5
  vit_little_patch16_reg1_gap_256 vit_little_patch16_reg4_gap_256
384/12/6
  flexivit_small vit_small_patch16_224 vit_small_patch16_384 vit_small_patch32_224
  vit_small_patch32_384 vit_small_patch8_224
384/36/6
  vit_small_patch16_36x1_224
512/12/8
  vit_medium_patch16_gap_240 vit_medium_patch16_gap_256 vit_medium_patch16_gap_384
  vit_medium_patch16_reg1_gap_256 vit_medium_patch16_reg4_gap_256
512/20/8
  vit_mediumd_patch16_reg4_gap_256 vit_mediumd_patch16_reg4_gap_384
640/12/10
  vit_betwixt_patch16_gap_256 vit_betwixt_patch16_reg1_gap_256 vit_betwixt_patch16_reg4_gap_256
  vit_betwixt_patch16_reg4_gap_384
768/12/12
  flexivit_base vit_base_patch16_224 vit_base_patch16_224_miil vit_base_patch16_384
  vit_base_patch16_reg4_gap_256 vit_base_patch32_224 vit_base_patch32_384 vit_base_patch8_224
768/12/16
  vit_base_patch16_gap_224
832/21/13
  vit_so150m2_patch16_reg1_gap_256 vit_so150m2_patch16_reg1_gap_384 vit_so150m2_patch16_reg1_gap_448
896/12/14
  vit_base_patch16_plus_240 vit_base_patch32_plus_256
896/18/14
  vit_so150m_patch16_reg4_gap_256 vit_so150m_patch16_reg4_gap_384
1024/24/16
  flexivit_large vit_large_patch14_224 vit_large_patch16_224 vit_large_patch16_384
  vit_large_patch32_224 vit_large_patch32_384
1280/32/16
  vit_huge_patch14_224 vit_huge_patch14_gap_224 vit_huge_patch16_gap_448
1408/40/16
  vit_giant_patch14_224 vit_giant_patch16_gap_224
1664/48/16
  vit_gigantic_patch14_224
"""
_DEPRECATED = """
vit_base_patch16_224_dino vit_base_patch16_224
vit_base_patch16_224_in21k vit_base_patch16_224
vit_base_patch16_224_miil_in21k vit_base_patch16_224_miil
vit_base_patch16_224_sam vit_base_patch16_224
vit_base_patch32_224_in21k vit_base_patch32_224
vit_base_patch32_224_sam vit_base_patch32_224
vit_base_patch8_224_dino vit_base_patch8_224
vit_base_patch8_224_in21k vit_base_patch8_224
vit_huge_patch14_224_in21k vit_huge_patch14_224
vit_large_patch16_224_in21k vit_large_patch16_224
vit_large_patch32_224_in21k vit_large_patch32_224
vit_small_patch16_224_dino vit_small_patch16_224
vit_small_patch16_224_in21k vit_small_patch16_224
vit_small_patch32_224_in21k vit_small_patch32_224
vit_small_patch8_224_dino vit_small_patch8_224
vit_tiny_patch16_224_in21k vit_tiny_patch16_224
"""
_ADDRESSES = """
ViT-Ti/16
    gs://vit_models/augreg/Ti_16-i21k-300ep-lr_0.001-aug_none-wd_0.03-do_0.0-sd_0.0.npz
    hf://timm/vit_tiny_patch16_{224.augreg_in21k,224.augreg_in21k_ft_in1k,384.augreg_in21k_ft_in1k}
ViT-S/32
    gs://vit_models/augreg/S_32-i21k-300ep-lr_0.001-aug_none-wd_0.1-do_0.0-sd_0.0.npz
    hf://timm/vit_small_patch32_{224.augreg_in21k,224.augreg_in21k_ft_in1k,384.augreg_in21k_ft_in1k}
ViT-S/16
    gs://vit_models/augreg/S_16-i21k-300ep-lr_0.001-aug_light1-wd_0.03-do_0.0-sd_0.0.npz
    gs://vit_models/sam/ViT-S_16.npz
    gs://big_vision/vit_s16_i1k_{90ep,150ep,300ep}.npz
    hf://timm/vit_small_patch16_{224.augreg_in21k,224.augreg_in21k_ft_in1k,384.augreg_in21k_ft_in1k,224.augreg_in1k}
    hf://timm/vit_small_patch16_384.augreg_in1k
ViT-B/32
    gs://vit_models/{imagenet21k,imagenet21k+imagenet2012}/ViT-B_32.npz
    gs://vit_models/augreg/B_32-i21k-300ep-lr_0.001-aug_light1-wd_0.1-do_0.0-sd_0.0.npz
    gs://vit_models/sam/ViT-B_32.npz
    hf://google/vit-base-patch32-{224-in21k,384}
    hf://timm/vit_base_patch32_{224.augreg_in21k,224.augreg_in21k_ft_in1k,384.augreg_in21k_ft_in1k,224.augreg_in1k}
    hf://timm/vit_base_patch32_{384.augreg,224.sam}_in1k
ViT-B/16
    gs://vit_models/{imagenet21k/ViT-B_16,imagenet21k+imagenet2012/ViT-B_16-224}.npz
    gs://vit_models/imagenet21k+imagenet2012/ViT-B_16.npz
    gs://vit_models/augreg/B_16-i21k-300ep-lr_0.001-aug_medium1-wd_0.1-do_0.0-sd_0.0.npz
    gs://vit_models/sam/ViT-B_16.npz
    hf://google/vit-base-patch16-{224-in21k,224,384}
    hf://timm/vit_base_patch16_{224.augreg_in21k,224.augreg_in21k_ft_in1k,384.augreg_in21k_ft_in1k,224.augreg_in1k}
    hf://timm/vit_base_patch16_{384.augreg,224.augreg2_in21k_ft,224.orig_in21k_ft,384.orig_in21k_ft,224.sam}_in1k
ViT-B/8
    gs://vit_models/{imagenet21k,imagenet21k+imagenet2012}/ViT-B_8.npz
    gs://vit_models/augreg/B_8-i21k-300ep-lr_0.001-aug_medium2-wd_0.1-do_0.0-sd_0.0.npz
    hf://timm/vit_base_patch8_224.{augreg_in21k,augreg_in21k_ft_in1k,augreg2_in21k_ft_in1k}
ViT-L/32
    gs://vit_models/{imagenet21k,imagenet21k+imagenet2012}/ViT-L_32.npz
    gs://vit_models/sam/ViT-L_32.npz
    hf://timm/vit_large_patch32_{224.orig_in21k,384.orig_in21k_ft_in1k}
ViT-L/16
    gs://vit_models/{imagenet21k/ViT-L_16,imagenet21k+imagenet2012/ViT-L_16-224}.npz
    gs://vit_models/imagenet21k+imagenet2012/ViT-L_16.npz
    gs://vit_models/augreg/L_16-i21k-300ep-lr_0.001-aug_strong1-wd_0.1-do_0.0-sd_0.0.npz
    gs://vit_models/sam/ViT-L_16.npz
    hf://google/vit-large-patch16-{224,384}
    hf://timm/vit_large_patch16_{224.augreg_in21k,224.augreg_in21k_ft_in1k,384.augreg_in21k_ft_in1k}
ViT-H/14
    gs://vit_models/imagenet21k/ViT-H_14.npz
    hf://google/vit-huge-patch14-224-in21k
    hf://timm/vit_huge_patch14_224.orig_in21k
"""

# The authors' files.

# Arrays of optimiser and clock, in a checkpoint of training.
_STATE = r"(opt|chrono|extra)/|(epoch|state)$"
_BESIDE = {
    "params/img/": rf"{_STATE}|params/(?!img/)",
    "params/": _STATE,
    "opt/target/": _STATE,
    "": NEVER,
}
"""Prefix of the network → pattern of names beside it that are ignored."""

_BIG_VISION_POSITIONS = "pos_embedding"


@dataclasses.dataclass(frozen=True)
class Style:
    """Differences between files of this family; the default is the original's."""

    # Numbers of submodules in a block.
    mlp_norm: str = "LayerNorm_2"
    attention: str = "MultiHeadDotProductAttention_1"
    mlp: str = "MlpBlock_3"
    positions: str = "Transformer/posembed_input/pos_embedding"
    is_stacked: bool = False  # all layers in one array
    group_norm: str = "C->111C"  # layout of the parameters

    @property
    def block(self) -> str:
        """Name of the first block, or of all blocks in one array."""
        if self.is_stacked:
            return "Transformer/encoderblock"
        return "Transformer/encoderblock_0"


LINEN_STYLE = Style(
    mlp_norm="LayerNorm_1",
    attention="MultiHeadDotProductAttention_0",
    mlp="MlpBlock_0",
)
"""Names of newer Flax, which numbers the submodules of each class."""


def make_style_rules(style: Style) -> list[Rule]:
    """Return the names of ViTs and hybrids."""
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
        *_make_block_rules(style),
        Rule(r"encoder/norm/(\w+)", r"Transformer/encoder_norm/\1"),
        Rule(r"pooling/probe", "MAPHead_0/probe"),
        Rule(r"pooling/attention/(.+)", r"MAPHead_0/MultiHeadDotProductAttention_0/\1"),
        Rule(r"pooling/norm/(\w+)", r"MAPHead_0/LayerNorm_0/\1"),
        Rule(r"pooling/mlp/expand/(\w+)", r"MAPHead_0/MlpBlock_0/Dense_0/\1"),
        Rule(r"pooling/mlp/contract/(\w+)", r"MAPHead_0/MlpBlock_0/Dense_1/\1"),
        Rule(r"head/hidden/(\w+)", r"pre_logits/\1"),
        Rule(r"head/linear/(\w+)", r"head/\1"),
    ]


def _make_block_rules(style: Style) -> list[Rule]:
    """Return the names of the parameters of a block."""
    ours = r"encoder/blocks/(\d+)"
    theirs = r"Transformer/encoderblock_\1"
    layout = ""
    if style.is_stacked:
        theirs = "Transformer/encoderblock"
        layout = STACKED
    return [
        Rule(rf"{ours}/attention_norm/(\w+)", rf"{theirs}/LayerNorm_0/\2", layout),
        Rule(rf"{ours}/mlp_norm/(\w+)", rf"{theirs}/{style.mlp_norm}/\2", layout),
        Rule(rf"{ours}/attention/(.+)", rf"{theirs}/{style.attention}/\2", layout),
        Rule(rf"{ours}/mlp/expand/(\w+)", rf"{theirs}/{style.mlp}/Dense_0/\2", layout),
        Rule(rf"{ours}/mlp/contract/(\w+)", rf"{theirs}/{style.mlp}/Dense_1/\2", layout),
    ]


def make_rules(a: Architecture, shapes: Mapping[str, Shape]) -> list[Rule]:
    """Return the names of a file with these shapes."""
    return make_style_rules(read_style(shapes))


def find_canonical(names: Iterable[str]) -> dict[str, str] | None:
    """Return names without prefix → names in the file; None for another format.

    With a prefix, the state of training and other networks are omitted, nothing else.
    """
    unique_names = dict.fromkeys(names)
    for prefix, beside in _BESIDE.items():
        if f"{prefix}embedding/kernel" in unique_names:
            return _remove_prefix(unique_names, prefix, beside)
    return None


def _remove_prefix(names: Iterable[str], prefix: str, beside: str) -> dict[str, str]:
    """Return names without a prefix → names in the file, except names `beside` the prefix."""
    short_names = {}
    others = {}
    for name in names:
        if name.startswith(prefix):
            short_names[name.removeprefix(prefix)] = name
        elif not re.match(beside, name):
            others[name] = name
    return short_names | others


def read_style(shapes: Mapping[str, Shape]) -> Style:
    """Return the style of names without prefix."""
    style = Style()
    if _has_linen_numbers(shapes):
        style = LINEN_STYLE
    if _BIG_VISION_POSITIONS in shapes:
        style = dataclasses.replace(style, positions=_BIG_VISION_POSITIONS)
    if len(shapes.get("gn_root/scale", ())) == 1:
        style = dataclasses.replace(style, group_norm="")
    is_stacked = any(name.startswith("Transformer/encoderblock/") for name in shapes)
    return dataclasses.replace(style, is_stacked=is_stacked)


def _has_linen_numbers(shapes: Mapping[str, Shape]) -> bool:
    """Return True for submodules that are numbered in each class."""
    pattern = re.compile(r"Transformer/encoderblock(_0)?/LayerNorm_1/")
    return any(map(pattern.match, shapes))


def find_facts(shapes: Mapping[str, Shape]) -> Facts:
    """Return the facts of a file.

    Raises:
      ValueError: an array is missing, or has a wrong shape.
    """
    style = read_style(shapes)
    patch_height, patch_width, _, width = read_shape(shapes, "embedding/kernel", 4)

    layer_axes = int(style.is_stacked)
    query_kernel = f"{style.block}/{style.attention}/query/kernel"
    query_shape = read_shape(shapes, query_kernel, 3 + layer_axes)
    expand_kernel = f"{style.block}/{style.mlp}/Dense_0/kernel"
    expand_shape = read_shape(shapes, expand_kernel, 2 + layer_axes)
    depth = query_shape[0]
    if not style.is_stacked:
        depth = count_values(shapes, r"Transformer/encoderblock_(\d+)/")

    family = "vit"
    root_channels = 64
    if "conv_root/kernel" in shapes:
        family = "hybrid"
        root_channels = read_shape(shapes, "conv_root/kernel", 4)[-1]

    position_rows = None
    if style.positions in shapes:
        _, position_rows, _ = read_shape(shapes, style.positions, 3)

    pool = _find_pool(shapes)
    has_class_token = pool == "token"
    has_hidden_layer = "pre_logits/kernel" in shapes
    return Facts(
        family=family,
        patch_size=(patch_height, patch_width),
        width=width,
        depth=depth,
        mlp_dim=expand_shape[-1],
        num_heads=query_shape[-2],
        units=count_units(shapes, r"block(\d+)/unit(\d+)/"),
        root_channels=root_channels,
        pool=pool,
        head="mlp" if has_hidden_layer else "linear",
        num_classes=count_classes(shapes, "head/kernel", -1, "head/bias"),
        position_rows=position_rows,
        prefix_rows=_list_prefix_rows(style, has_class_token),
        defaults={"gelu": "tanh", "layer_norm_epsilon": 1e-6},
        modern_options={"class_tokens": int(has_class_token)},
    )


def _find_pool(shapes: Mapping[str, Shape]) -> str:
    if "cls" in shapes:
        return "token"
    if "MAPHead_0/probe" in shapes:
        return "map"
    return "gap"


def _list_prefix_rows(style: Style, has_class_token: bool) -> tuple[int, ...]:
    """Return the possible numbers of rows of the class token in the table of positions."""
    if not has_class_token:
        return (0,)
    if style.positions == _BIG_VISION_POSITIONS:
        return (0, 1)
    return (1,)


def _name_style(shapes: Mapping[str, Shape], names: Mapping[str, str]) -> str:
    """Return "big_vision" for its files; "" for the paper's files."""
    style = read_style(shapes)
    has_prefix = names["embedding/kernel"].startswith("params/")
    if has_prefix or style.is_stacked or _BIG_VISION_POSITIONS in shapes:
        return "big_vision"
    if _has_linen_numbers(shapes) and Style.positions not in shapes:
        return "big_vision"
    return ""


def _holds_hidden_layer(a: Architecture) -> bool:
    return True


_FORMAT = Format(
    suffix=".npz",
    find_canonical=find_canonical,
    find_facts=find_facts,
    make_rules=make_rules,
    families=("vit", "hybrid"),
    other_families="it holds ViTs and hybrids; a ResNet goes to bit or timm",
    holds_hidden_layer=_holds_hidden_layer,
    name_style=_name_style,
)

# The files of libraries.

HUGGINGFACE_NAMES = HuggingFaceNames(
    prefixes=("vit.", "", "deit.", "ijepa."),
    patches="embeddings.patch_embeddings.projection",
    block="encoder.layer.",
    layers={
        **ATTENTION,
        ".attention_norm": ".layernorm_before",
        ".mlp_norm": ".layernorm_after",
        ".mlp/expand": ".intermediate.dense",
        ".mlp/contract": ".output.dense",
        "encoder/norm": "layernorm",
        "head/hidden": "pooler.dense",
    },
    arrays=TOKENS,
    newer={**CLASSIC, "mlp.fc1": "intermediate.dense", "mlp.fc2": "output.dense"},
    ignored=r"decoder\.|(embeddings\.)?mask_token$",
    epsilon=1e-12,
)
"""Names of ViT, MAE, I-JEPA and DeiT."""

TRANSFORMERS_PARTS: Held = {**ANY_CLASS, **WHOLE_BIAS, "pool": ("token",), "head": ANY}


def state_arguments(a: Architecture, pixels: Normalisation) -> dict[str, object]:
    """Return the arguments of transformers' ViT, DeiT and I-JEPA."""
    return {
        "qkv_bias": a.qkv_bias == "all",
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    }


_TIMM_MODEL = TimmModel(name="vit_base_patch16_224", held=VISION_TRANSFORMER)
_TRANSFORMERS_MODEL = TransformersModel(
    name="ViTModel",
    classifier="ViTForImageClassification",
    model_type="vit",
    prefix="vit.",
    keeps_prefix=True,
    names=HUGGINGFACE_NAMES,
    held=TRANSFORMERS_PARTS,
    arguments=state_arguments,
)

FAMILY = Family(
    addresses=read_addresses(_ADDRESSES),
    models=read_models(_MODELS),
    deprecated=read_deprecated(_DEPRECATED),
    registry_rows={
        "FlexiViT": "flexivit_",
        "ViT with registers or the mean of patches": r"vit_\w+_(reg\d|gap|map)|test_vit[23]",
        "ViT": "vit_|test_vit",
    },
    named_fields={"^test_vit3$": {"pooled_tokens": "all"}},
    model_types={"vit": {}},
    formats={"released": _FORMAT},
    huggingface=(HUGGINGFACE_NAMES,),
    timm_models=(_TIMM_MODEL,),
    transformers_models=(_TRANSFORMERS_MODEL,),
)
