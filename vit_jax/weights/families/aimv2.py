"""AIMv2: RMS norms, and SwiGLU without biases."""

from vit_jax.config.architecture import Architecture
from vit_jax.weights.family import Family, RejectedArrays, Release, read_models
from vit_jax.weights.folding import Normalisation
from vit_jax.weights.library_models import (
    GATED_TRANSFORMER,
    SQUARE,
    WITHOUT_CLASSES,
    TimmModel,
    TransformersModel,
)
from vit_jax.weights.names.huggingface_names import (
    GATED,
    PROJECTIONS,
    HuggingFaceNames,
    prefix_values,
)
from vit_jax.weights.names.original_names import OriginalNames

_MODELS = """
1024/24/8
  aimv2_large_patch14_224 aimv2_large_patch14_336 aimv2_large_patch14_448
1536/24/12
  aimv2_huge_patch14_224 aimv2_huge_patch14_336 aimv2_huge_patch14_448
2048/24/16
  aimv2_1b_patch14_224 aimv2_1b_patch14_336 aimv2_1b_patch14_448
3072/24/24
  aimv2_3b_patch14_224 aimv2_3b_patch14_336 aimv2_3b_patch14_448
"""

_ORIGINAL = OriginalNames(
    "preprocessor.patchifier.proj.weight",
    {
        r"^preprocessor\.patchifier\.": "patch_embed.",
        r"^preprocessor\.pos_embed$": "pos_embed",
        r"^trunk\.(post_trunk_)?": "",
        r"\.norm_(\d)\.": r".norm\1.",
        r"\.mlp\.fc1\.": ".mlp.fc1_g.",
        r"\.mlp\.fc3\.": ".mlp.fc1_x.",
    },
)

_HUGGINGFACE_NAMES = HuggingFaceNames(
    prefixes=("", "vision_model."),
    patches="embeddings.patch_embed",
    block="encoder.layers.",
    layers={
        "embedding_norm": "embeddings.rms_norm",
        ".attention_norm": ".rms_norm1",
        **PROJECTIONS,
        ".attention/out": ".attention.out_proj",
        ".mlp_norm": ".rms_norm2",
        **prefix_values(".ffn.", GATED),
        "encoder/norm": "rms_norm",
    },
    arrays={"positions/table": "embeddings.position_embedding.weight"},
    layouts={"positions/table": "aSD->(aS)D"},
    ignored=r"text_model\.|(text|visual)_projection\.|logit_scale$|.*\.position_ids$",
    epsilon=1e-5,
    fields={"embedding_norm": "patches"},
)

_TIMM_MODEL = TimmModel(
    name="aimv2_large_patch14_224",
    held={**GATED_TRANSFORMER, "norm": ("rms",), "embedding_norm": (None, "patches")},
    epsilon=1e-5,
)


def _state_arguments(a: Architecture, pixels: Normalisation) -> dict[str, object]:
    return {"qkv_bias": False, "mlp_bias": False, "use_head": False}


_TRANSFORMERS_MODEL = TransformersModel(
    name="Aimv2VisionModel",
    model_type="aimv2_vision_model",
    names=_HUGGINGFACE_NAMES,
    held={
        **WITHOUT_CLASSES,
        **SQUARE,
        "pool": ("gap",),
        "norm": ("rms",),
        "mlp": ("swiglu",),
        "embedding_norm": ("patches",),
        "linear_bias": (False,),
        "qkv_bias": ("none",),
    },
    arguments=_state_arguments,
)

FAMILY = Family(
    releases=(
        Release(
            name="AIMv2",
            addresses=(
                "hf://timm/aimv2_{large,huge,1b,3b}_patch14_224.apple_pt",
                "hf://apple/aimv2-large-patch14-224",
            ),
            pattern="aimv2",
            use="frozen features",
            licence="apple-ascl",
            pixels="short side bicubic, middle 224",
            accuracy="attentive probe L 86.6, H 87.5, 1B 88.1, 3B 88.5",
            source="arXiv:2411.14402",
        ),
    ),
    models=read_models(_MODELS),
    registry_rows={
        "AIMv2": "aimv2_",
    },
    named_fields={"^aimv2_": {"layer_norm_epsilon": 1e-5}},
    model_types={"aimv2": {}, "aimv2_vision_model": {}},
    rejected_arrays=(
        RejectedArrays(
            r"(.*\.)?head\.output_proj\.",
            "AIMv2 with attention pooling (lit, native)",
            "a pooling head",
        ),
    ),
    original=_ORIGINAL,
    huggingface=(_HUGGINGFACE_NAMES,),
    timm_models=(_TIMM_MODEL,),
    transformers_models=(_TRANSFORMERS_MODEL,),
)
