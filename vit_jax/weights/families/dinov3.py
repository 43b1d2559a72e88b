"""DINOv3, EUPE and LingBot-Vision: rotary positions from the centre of the image."""

from collections.abc import Mapping

import numpy as np

from vit_jax.config.architecture import Architecture
from vit_jax.weights.family import Family, Release, read_models
from vit_jax.weights.folding import Normalisation
from vit_jax.weights.formats import ArrayFile, StoredArray
from vit_jax.weights.library_models import (
    ANY,
    EVA,
    PARTIAL_BIAS,
    READER_POOLS,
    SCALED,
    WITHOUT_CLASSES,
    Held,
    TimmModel,
    TransformersModel,
    hold_any,
)
from vit_jax.weights.names.huggingface_names import (
    GATED,
    NORMS,
    PROJECTIONS,
    SCALES,
    TOKENS,
    HuggingFaceNames,
    prefix_values,
)
from vit_jax.weights.names.original_names import OriginalNames
from vit_jax.weights.packing import Packing, Parameters, Shapes, Unpacked

_MODELS = """
192/12/3
  vit_tiny_patch16_dinov3_qkvb
384/12/6
  vit_small_patch16_dinov3 vit_small_patch16_dinov3_qkvb vit_small_patch16_lingbot
  vit_small_plus_patch16_dinov3 vit_small_plus_patch16_dinov3_qkvb
768/12/12
  vit_base_patch16_dinov3 vit_base_patch16_dinov3_qkvb vit_base_patch16_lingbot
1024/24/16
  vit_large_patch16_dinov3 vit_large_patch16_dinov3_qkvb vit_large_patch16_lingbot
1280/32/20
  vit_huge_plus_patch16_dinov3 vit_huge_plus_patch16_dinov3_qkvb
1536/40/24
  vit_giant_patch16_lingbot
4096/40/32
  vit_7b_patch16_dinov3
"""

_ORIGINAL = OriginalNames(
    "storage_tokens",
    {
        r"^storage_tokens$": "reg_token",
        r"\.ls(\d)\.gamma$": r".gamma_\1",
        r"\.mlp\.w1\.": ".mlp.fc1_g.",
        r"\.mlp\.w2\.": ".mlp.fc1_x.",
        r"\.mlp\.w3\.": ".mlp.fc2.",
    },
    ignored=r"mask_token$|rope_embed\.|local_cls_norm\.|projectors\.|.*\.bias_mask$",
)

_HUGGINGFACE_NAMES = HuggingFaceNames(
    prefixes=("",),
    patches="embeddings.patch_embeddings",
    block="layer.",
    layers={
        **NORMS,
        **PROJECTIONS,
        ".attention/out": ".attention.o_proj",
        **prefix_values(".mlp.", GATED),
        "encoder/norm": "norm",
    },
    arrays={**TOKENS, **SCALES},
    ignored=r"embeddings\.mask_token$",
    epsilon=1e-5,
    fixed_positions="none",
)


class MaskedKeyBias(Packing):
    """Biases of keys that a mask beside them sets to zero, in the authors' files."""

    note = "The biases of keys are zero, as the file's bias_mask has it."

    def matches(self, shapes: Shapes, arrays: Mapping[str, StoredArray]) -> bool:
        """Return True for a file with masks."""
        has_masks = any(name.endswith(".qkv.bias_mask") for name in arrays)
        return has_masks and "pos_embed" not in shapes

    def unpack(self, parts: Parameters, file: ArrayFile, a: Architecture) -> Unpacked:
        """Return the parameters with biases of zeros."""
        parameters = dict(parts)
        for name, array in parts.items():
            if name.endswith("/attention/key/bias"):
                parameters[name] = np.zeros_like(array)
        return Unpacked(parameters)


_FIELDS = {"rope": "centred", "layer_norm_epsilon": 1e-5}  # facts of timm's models
_HELD: Held = {
    "rope": ("centred",),
    "position_embedding": ("none",),
    "mlp": ("gelu", "swiglu"),
}
_TIMM_MODEL = TimmModel(
    name="vit_base_patch16_dinov3",
    held={**EVA, **PARTIAL_BIAS, **_HELD, "registers": ANY},
    epsilon=1e-5,
)


def _state_arguments(a: Architecture, pixels: Normalisation) -> dict[str, object]:
    return {
        "use_gated_mlp": a.mlp == "swiglu",
        "num_register_tokens": a.registers,
        "query_bias": a.qkv_bias != "none",
        "key_bias": a.qkv_bias == "all",
        "value_bias": a.qkv_bias != "none",
        "proj_bias": a.linear_bias,
        "mlp_bias": a.linear_bias,
    }


_TRANSFORMERS_MODEL = TransformersModel(
    name="DINOv3ViTModel",
    model_type="dinov3_vit",
    names=_HUGGINGFACE_NAMES,
    held={
        **WITHOUT_CLASSES,
        **SCALED,
        **hold_any("registers", "qkv_bias", "linear_bias"),
        "pool": READER_POOLS,
        "class_tokens": (None, 1),
        **_HELD,
    },
    arguments=_state_arguments,
    mask_shape=(1, 1),
)

FAMILY = Family(
    finetuning_rule="dinov3",
    releases=(
        Release(
            name="DINOv3",
            addresses=(
                "hf://facebook/dinov3-vit{s16,s16plus,b16,l16,h16plus,7b16}-pretrain-lvd1689m",
                "hf://timm/vit_{small,base,large,huge_plus,7b}_patch16_dinov3.lvd1689m",
            ),
            pattern=r"dinov3-vit|patch16_dinov3(?!_qkvb\.eupe)|^dinov3_vit$",
            use="frozen features at any resolution, dense tasks",
            licence="dinov3-license",
            pixels="both sides 256 bilinear",
            accuracy="linear 7B 88.4",
            source="arXiv:2508.10104",
        ),
        Release(
            name="EUPE",
            addresses=("hf://timm/vit_{tiny,small,base}_patch16_dinov3_qkvb.eupe_lvd1689m",),
            pattern=r"\.eupe",
            use="small encoders for many tasks",
            licence="fair-noncommercial-research-license",
            pixels="both sides 256 bilinear",
        ),
    ),
    models=read_models(_MODELS),
    registry_rows={
        "DINOv3, EUPE": r"vit_\w+_dinov3",
        "LingBot-Vision": r"vit_\w+_lingbot",
    },
    named_fields={"_dinov3|_lingbot$": _FIELDS},
    model_types={"dinov3_vit": {"rope": "centred"}},
    original=_ORIGINAL,
    huggingface=(_HUGGINGFACE_NAMES,),
    packings=(MaskedKeyBias(),),
    timm_models=(_TIMM_MODEL,),
    transformers_models=(_TRANSFORMERS_MODEL,),
)
