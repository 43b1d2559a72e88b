"""Names of networks in `config.json`: those that are read, facts that only the name states, and reasons for the others.

A name decides more than its arrays show: heads of attention, the place of norms, rotary positions. So a name is read
only if `tests/weights/reference/compare_registry.py` compared its outputs with ours.
"""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from vit_jax.text.printable import shortened
from vit_jax.weights import compared_architectures
from vit_jax.weights.formats.stored import shown
from vit_jax.weights.published import blocks


class Sizes(NamedTuple):
    """Sizes of a network that its name states."""

    width: int
    depth: int
    num_heads: int


def _read_compared(text: str) -> dict[str, Sizes | None]:
    """Return the sizes by name; None for a ResNet."""
    sizes: dict[str, Sizes | None] = {}
    for block in blocks(text):
        head, *names = block.split()
        values = None if head == "resnet" else Sizes(*map(int, head.split("/")))
        sizes |= dict.fromkeys(names, values)
    return sizes


SIZES = _read_compared(compared_architectures.COMPARED)
"""Sizes of timm's models that are read, by name."""

DEPRECATED = dict(line.split() for line in compared_architectures.DEPRECATED.strip().splitlines())
"""Current names of timm's models that are read, by older names."""

# Regular expression of timm's names | family | what it computes and our networks do not.
_UNSUPPORTED = r"""
beit3_ | BEiT-3 | norms in MLPs without a gate
beit(v2)?_ | BEiT | relative positions
cait_ | CaiT | attention that mixes heads, and blocks for the class token alone
convit_ | ConViT | gated positional attention
deepseek_vit_|gemma4_vit_|qwen3_vit_ | the image tower of a language model | parts for images of any aspect ratio
eva02_enormous_|vit_base_patch16_rpn_ | a ViT with post-norm blocks | a norm behind each branch in place of before
naflexvit_ | a NaFlex model | patches of images of any aspect ratio
resnetv2_(?!\d+x\d_bit$) | a ResNet v2 other than Big Transfer's | other roots, norms or strides
samvit_ | SAM | attention in windows, with relative positions
vit_\w*_(xp|18x2)_|vit_d?pwee_ | a ViT with parallel layers | several branches beside each other in a block
vit_(dlittle|dwee)_ | a ViT with differential attention | a difference of two attentions
vit_\w+_rope_ | RoPE-ViT | rotary positions of other forms than DINOv3, EVA-02 and PE
vit_\w+_sapiens2 | Sapiens 2 | fewer keys and values than queries
vit_pe_core_gigantic_ | the largest core of Perception Encoder | a pooling with a narrower MLP than the blocks
vit_base_mci_ | MobileCLIP | a root of several convolutions
vit_s?relpos_|test_vit_relpos | a ViT with relative positions | relative positions
vit_so150m_patch16_reg4_map_ | a ViT with attention pooling and registers | a pooling of patches without registers
vit_(small|base)_resnet\d+d_ | a hybrid with a ResNet-D | batch norm
"""

# Regular expression of a name → fields of the architecture that its file does not show; the first match counts.
_PARTS: dict[str, dict[str, object]] = {
    r"_dinov3|_lingbot$": {"rope": "centred", "layer_norm_epsilon": 1e-5},
    r"^eva02_": {"rope": "grid"},
    r"^vit_pe_core_": {"rope": "index", "layer_norm_epsilon": 1e-5, "pool_num_heads": 8},
    r"^vit_pe_": {"rope": "index", "layer_norm_epsilon": 1e-5},
    r"_clip_quickgelu": {"gelu": "quick", "layer_norm_epsilon": 1e-5},
    r"^eva_giant_": {},
    r"_clip_|^aimv2_": {"layer_norm_epsilon": 1e-5},
    r"_siglip_": {
        "gelu": "tanh"
    },  # as in the original code; timm has the exact GELU in most of its models
}
_POOLS_ALL_TOKENS = ("test_vit3",)
_REFERENCE_OF_GRID = [16, 16]  # of the places of "grid"
# Arguments of timm's classes that the arrays show, `sidecar` reads, or that change no output.
_ARGUMENTS = r"""
img_size|patch_size|in_chans|num_classes|global_pool|embed_dim|depth|num_heads|mlp_ratio|act_layer|attn_pool_num_heads|
attn_pool_mlp_ratio|ref_feat_shape|pool_include_prefix|class_token|no_embed_class|reg_tokens|num_reg_tokens|pos_embed|
pre_norm|final_norm|fc_norm|use_fc_norm|use_pre_transformer_norm|use_post_transformer_norm|embed_norm_layer|init_values|
qkv_bias|qkv_fused|proj_bias|swiglu_mlp|swiglu_align_to|scale_mlp|scale_attn_inner|use_abs_pos_emb|dynamic_img_size|
dynamic_img_pad|strict_img_size|\w*drop\w*|weight_init|fix_init|head_init_scale|layers|channels|stem_chs
"""
_KNOWN_ARGUMENT = re.compile(_ARGUMENTS.replace("\n", ""))

MODEL_TYPES = (
    *(
        "vit",
        "vit_mae",
        "deit",
        "ijepa",
        "dinov2",
        "dinov2_with_registers",
        "dinov3_vit",
        "clip",
        "clip_vision_model",
    ),
    *(
        "siglip",
        "siglip_vision_model",
        "aimv2",
        "aimv2_vision_model",
        "radio",
        "tipsv2",
        "tipsv2_vision_model",
    ),
    *("chinese_clip", "metaclip_2", "metaclip_2_vision_model"),
)
"""Model types of transformers that are read."""

_SHOWN_CHARACTERS = 80
_FIXED_VALUES = {"rope_theta": 100.0, "pooler_act": "tanh", "is_native": False}
"""Values of transformers' configurations that our networks have, and that no array shows."""


def current_name(name: str) -> str:
    """Return timm's name without its tag, and the current one for a deprecated one."""
    name = name.partition(".")[0]
    return DEPRECATED.get(name, name)


def is_known(name: str) -> bool:
    """Return True for a name that is read: timm's, or a model type of transformers."""
    return current_name(name) in SIZES or name in MODEL_TYPES


def find_unsupported(name: str) -> str | None:
    """Return the reason why a model of timm is not read; None for an unknown one."""
    for row in blocks(_UNSUPPORTED):
        pattern, family, feature = re.split(r"\s+\|\s", row)
        if re.match(pattern, name):
            return f"{family} is not supported: it has {feature}"
    return None


def require_compared(name: str) -> None:
    """Raise ValueError, with the reason, for a model of timm that is not read."""
    if name in SIZES:
        return
    if reason := find_unsupported(name):
        remedy = "Take weights of a family that docs/pretrained.md lists."
        raise ValueError(f"architecture={shown(name)}: {reason}. {remedy}")
    raise ValueError(
        f"architecture={shown(name)}: must be a model of timm that was compared with this program. If another model "
        "computes the same, give its name, such as architecture=vit_base_patch16_224."
    )


def timm_fields(name: str, arguments: Mapping[str, Any]) -> dict[str, object]:
    """Return the fields of the architecture that a model of timm has by its name and arguments.

    Raises:
      ValueError: the model is not read, or an argument changes it in an unknown way.
    """
    require_compared(name)
    for argument in arguments:
        if not _KNOWN_ARGUMENT.fullmatch(argument):
            raise ValueError(
                f"model_args.{argument}={shown(str(arguments[argument]))}: is not supported. Remove it if it is the "
                f"default of {name}."
            )

    fields: dict[str, object] = {"rope": None}
    fields |= next((parts for pattern, parts in _PARTS.items() if re.search(pattern, name)), {})
    sizes = SIZES[name]
    if sizes is None:
        return {}
    fields |= sizes._asdict()

    reference = arguments.get("ref_feat_shape")
    if fields["rope"] == "index":
        fields["rope_grid"] = _reference_grid(name, reference)
    if fields["rope"] == "grid" and reference not in (None, _REFERENCE_OF_GRID):
        raise ValueError(
            f"model_args.ref_feat_shape={reference}: must be {_REFERENCE_OF_GRID}. Take other weights."
        )
    if fields["rope"] is None:
        pools_all = arguments.get("pool_include_prefix", name in _POOLS_ALL_TOKENS)
        fields["pooled_tokens"] = "all" if pools_all else "patches"
    return fields


def _reference_grid(name: str, stated: object) -> tuple[int, int]:
    """Return rows and columns of the grid that the places of Perception Encoder count."""
    is_pair = (
        isinstance(stated, list)
        and len(stated) == 2
        and all(type(side) is int and side > 0 for side in stated)
    )
    if stated is not None and not is_pair:
        raise ValueError(
            f"model_args.ref_feat_shape={shown(str(stated))}: must be rows and columns. Correct the file."
        )
    if isinstance(stated, list):
        return stated[0], stated[1]
    patch, image = map(int, re.findall(r"\d+", name)[-2:])
    return image // patch, image // patch


def huggingface_fields(model_type: str | None, config: Mapping[str, Any]) -> dict[str, object]:
    """Return the fields of the architecture that a model type of transformers has by its name.

    Raises:
      ValueError: the model type is not read, or a value is one that our networks do not have.
    """
    if model_type is not None and model_type not in MODEL_TYPES:
        raise ValueError(
            f"model_type={shown(model_type)}: must be one of {', '.join(MODEL_TYPES)}. If one of these computes "
            "the same, give its name, such as architecture=vit."
        )
    for name, value in _FIXED_VALUES.items():
        if config.get(name) not in (None, value):
            stated = shortened(repr(config[name]), _SHOWN_CHARACTERS)
            raise ValueError(f"{name}={stated}: must be {value!r}. Take other weights.")
    if model_type == "dinov3_vit":
        return {"rope": "centred"}
    if model_type == "ijepa":
        return {"pool": "gap"}
    return {}
