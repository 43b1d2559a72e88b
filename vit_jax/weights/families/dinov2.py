"""DINOv2, with and without registers."""

from collections.abc import Collection

from vit_jax.config.architecture import Architecture
from vit_jax.weights.family import Family, Release, read_models
from vit_jax.weights.folding import Normalisation
from vit_jax.weights.library_models import (
    ANY,
    ANY_CLASS,
    GATED_TRANSFORMER,
    READER_POOLS,
    SCALED,
    WHOLE_BIAS,
    Held,
    TimmModel,
    TransformersModel,
)
from vit_jax.weights.names.huggingface_names import (
    ATTENTION,
    CLASSIC,
    NORMS,
    SCALES,
    TOKENS,
    TWO_LAYERS,
    HuggingFaceNames,
)
from vit_jax.weights.names.original_names import OriginalNames

_MODELS = """
384/12/6
  vit_small_patch14_dinov2 vit_small_patch14_reg4_dinov2
768/12/12
  vit_base_patch14_dinov2 vit_base_patch14_reg4_dinov2
1024/24/16
  vit_large_patch14_dinov2 vit_large_patch14_reg4_dinov2
1536/40/24
  vit_giant_patch14_dinov2 vit_giant_patch14_reg4_dinov2
"""


def choose_position_resize(names: Collection[str]) -> str:
    """Return the method by which the authors' code resizes the positions of a file with these names.

    Files of DINOv2 and Franca have a mask token, which timm's do not have. With registers, their
    code antialiases as timm does.
    """
    is_original = "mask_token" in names and any(name.endswith(".ls1.gamma") for name in names)
    if is_original and "register_tokens" not in names:
        return "dinov2"
    return ""


_ORIGINAL = OriginalNames(
    "",
    {
        r"^vision_encoder\.": "",
        r"^blocks\.\d+\.(\d+\.)": r"blocks.\1",  # blocks in chunks count through
        r"(?<=\.mlp\.)(w12|c_fc)\.": "fc1.",
        r"(?<=\.mlp\.)(w3|c_proj)\.": "fc2.",
        r"^register_tokens$": "reg_token",
    },
    ignored=r"text_encoder\.|(vision_encoder\.)?mask_token$|temperature$",
    choose_position_resize=choose_position_resize,
)
"""Names of DINOv2, Franca and TIPSv2, which are nearly timm's."""

_HUGGINGFACE_NAMES = HuggingFaceNames(
    prefixes=("", "dinov2.", "dinov2_with_registers."),
    patches="embeddings.patch_embeddings.projection",
    block="encoder.layer.",
    layers={
        **ATTENTION,
        **NORMS,
        **TWO_LAYERS,
        ".mlp/gate": ".mlp.weights_in",
        "encoder/norm": "layernorm",
    },
    packed_layers={".mlp/expand": ".mlp.weights_in", ".mlp/contract": ".mlp.weights_out"},
    arrays={**TOKENS, **SCALES},
    newer=CLASSIC,
    ignored=r"embeddings\.mask_token$",
    wide_head_pool="token_gap",
)


def find_whole_ratio(a: Architecture) -> int | None:
    """Return the ratio from which transformers' DINOv2 computes the width of the MLP.

    It is None if no whole number gives this width.
    """
    for ratio in range(1, 17):
        mlp_dim = a.width * ratio
        if a.mlp == "swiglu":
            mlp_dim = (int(mlp_dim * 2 / 3) + 7) // 8 * 8
        if mlp_dim == a.mlp_dim:
            return ratio
    return None


def _holds_pool(a: Architecture) -> bool:
    if a.num_classes:
        return a.pool == "token_gap"
    return a.pool in READER_POOLS


def _state_sizes(a: Architecture) -> dict[str, object]:
    return {
        "mlp_ratio": find_whole_ratio(a),
        "use_swiglu_ffn": a.mlp == "swiglu",
        "qkv_bias": a.qkv_bias == "all",
    }


def _state_arguments(a: Architecture, pixels: Normalisation) -> dict[str, object]:
    return {**_state_sizes(a), "use_mask_token": False}


def _state_arguments_with_registers(a: Architecture, pixels: Normalisation) -> dict[str, object]:
    return {**_state_sizes(a), "num_register_tokens": a.registers}


_HELD: Held = {
    **ANY_CLASS,
    **WHOLE_BIAS,
    **SCALED,
    "pool": _holds_pool,
    "class_tokens": (None, 1),
    "mlp": ("gelu", "swiglu"),
    "mlp_dim": lambda a: find_whole_ratio(a) is not None,
    "position_tokens": ANY,
}
_WITHOUT_REGISTERS = TransformersModel(
    name="Dinov2Model",
    classifier="Dinov2ForImageClassification",
    model_type="dinov2",
    prefix="dinov2.",
    names=_HUGGINGFACE_NAMES,
    held=_HELD,
    arguments=_state_arguments,
    names_silu=False,
)
_WITH_REGISTERS = TransformersModel(
    name="Dinov2WithRegistersModel",
    classifier="Dinov2WithRegistersForImageClassification",
    model_type="dinov2_with_registers",
    prefix="dinov2_with_registers.",
    names=_HUGGINGFACE_NAMES,
    held={**_HELD, "registers": lambda a: a.registers > 0, "position_tokens": ("patches",)},
    arguments=_state_arguments_with_registers,
    names_silu=False,
    mask_shape=(1,),
)
_GIANT = TimmModel(name="vit_giant_patch14_dinov2", held=GATED_TRANSFORMER)

FAMILY = Family(
    finetuning_rule="dinov3",
    releases=(
        Release(
            name="DINOv2",
            addresses=(
                "hf://facebook/dinov2-{small,base,large,giant}",
                "hf://timm/vit_{small,base,large,giant}_patch14_dinov2.lvd142m",
            ),
            pattern="dinov2-(small|base|large|giant)|patch14_dinov2|^dinov2$",
            use="frozen features, k-NN, linear probes, dense tasks",
            licence="apache-2.0",
            pixels="short side 256 bicubic, middle 224",
            accuracy="k-NN S 79.0, B 82.1, L 83.5, g 83.5; linear S 81.1, B 84.5, L 86.3, g 86.5",
            source="arXiv:2304.07193, table 4",
        ),
        Release(
            name="DINOv2 with registers",
            addresses=(
                "hf://facebook/dinov2-with-registers-{small,base,large,giant}",
                "hf://timm/vit_base_patch14_reg4_dinov2.lvd142m",
            ),
            pattern="dinov2-with-registers|reg4_dinov2|^dinov2_with_registers$",
            use="as DINOv2, with cleaner attention maps",
            licence="apache-2.0",
            pixels="short side 256 bicubic, middle 224",
            accuracy="k-NN S 79.1, B 82.0, L 83.8, g 83.7; linear S 80.9, B 84.6, L 86.7, g 87.1",
            source="README of facebookresearch/dinov2",
        ),
    ),
    models=read_models(_MODELS),
    registry_rows={
        "DINOv2, with registers too": r"vit_\w+_dinov2",
    },
    doubled_ratio="_giant_patch14_",
    model_types={"dinov2": {}, "dinov2_with_registers": {}},
    original=_ORIGINAL,
    huggingface=(_HUGGINGFACE_NAMES,),
    timm_models=(_GIANT,),
    transformers_models=(_WITHOUT_REGISTERS, _WITH_REGISTERS),
)
