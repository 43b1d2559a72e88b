"""CLIP, OpenCLIP, DFN and MetaCLIP: the image towers."""

from vit_jax.config.architecture import Architecture
from vit_jax.weights.family import Family, Release, read_deprecated, read_models
from vit_jax.weights.folding import Normalisation
from vit_jax.weights.library_models import (
    ANY_CLASS,
    SQUARE,
    VISION_TRANSFORMER,
    TimmModel,
    TransformersModel,
)
from vit_jax.weights.names.huggingface_names import TWO_LAYERS, HuggingFaceNames
from vit_jax.weights.names.original_names import OriginalNames

_MODELS = """
256/10/4
  vit_xsmall_patch16_clip_224
512/12/8
  vit_medium_patch16_clip_224 vit_medium_patch32_clip_224
640/12/10
  vit_betwixt_patch32_clip_224
768/12/12
  vit_base_patch16_clip_224 vit_base_patch16_clip_384 vit_base_patch16_clip_quickgelu_224
  vit_base_patch32_clip_224 vit_base_patch32_clip_256 vit_base_patch32_clip_384
  vit_base_patch32_clip_448 vit_base_patch32_clip_quickgelu_224
896/12/14
  vit_base_patch16_plus_clip_240
1024/24/16
  vit_large_patch14_clip_224 vit_large_patch14_clip_336 vit_large_patch14_clip_quickgelu_224
  vit_large_patch14_clip_quickgelu_336
1280/32/16
  vit_huge_patch14_clip_224 vit_huge_patch14_clip_336 vit_huge_patch14_clip_378
  vit_huge_patch14_clip_quickgelu_224 vit_huge_patch14_clip_quickgelu_378
1408/40/16
  vit_giant_patch14_clip_224
1664/48/16
  vit_gigantic_patch14_clip_224 vit_gigantic_patch14_clip_378
  vit_gigantic_patch14_clip_quickgelu_224
"""
_DEPRECATED = """
vit_base_patch32_224_clip_laion2b vit_base_patch32_clip_224
vit_giant_patch14_224_clip_laion2b vit_giant_patch14_clip_224
vit_huge_patch14_224_clip_laion2b vit_huge_patch14_clip_224
vit_large_patch14_224_clip_laion2b vit_large_patch14_clip_224
"""

ORIGINAL = OriginalNames(
    "conv1.weight",
    {
        r"^conv1\.": "patch_embed.proj.",
        r"^class_embedding$": "cls_token",
        r"^positional_embedding$": "pos_embed",
        r"^ln_pre\.": "norm_pre.",
        r"^ln_post\.": "norm.",
        r"^attn_pool\.attn\.in_proj_": "attn_pool.qkv.",
        r"^attn_pool\.attn\.": "attn_pool.",
        r"^attn_pool\.layernorm\.": "attn_pool.norm.",
        r"^attn_pool\.probe$": "attn_pool.latent",
        r"out_proj\.": "proj.",
        r"\.ls_(\d)\.gamma$": r".gamma_\1",
        r"^transformer\.resblocks\.": "blocks.",
        r"\.ln_(\d)\.": r".norm\1.",
        r"\.attn\.in_proj_": ".attn.qkv.",
        r"\.mlp\.c_fc\.": ".mlp.fc1.",
        r"\.mlp\.c_proj\.": ".mlp.fc2.",
    },
    prefixes=("visual.", ""),
)
"""Names of CLIP, OpenCLIP and Perception Encoder."""

HUGGINGFACE_NAMES = HuggingFaceNames(
    prefixes=("vision_model.", "", "vision_model.vision_model."),
    patches="embeddings.patch_embedding",
    block="encoder.layers.",
    layers={
        "embedding_norm": "pre_layrnorm",
        ".attention_norm": ".layer_norm1",
        ".attention/query": ".self_attn.q_proj",
        ".attention/key": ".self_attn.k_proj",
        ".attention/value": ".self_attn.v_proj",
        ".attention/out": ".self_attn.out_proj",
        ".mlp_norm": ".layer_norm2",
        **TWO_LAYERS,
        "encoder/norm": "post_layernorm",
        "pooling/attention/out": "head.attention.out_proj",
        "pooling/norm": "head.layernorm",
        "pooling/mlp/expand": "head.mlp.fc1",
        "pooling/mlp/contract": "head.mlp.fc2",
    },
    arrays={
        "class_token": "embeddings.class_embedding",
        "positions/table": "embeddings.position_embedding.weight",
        "pooling/probe": "head.probe",
        "pooling/attention/(?:query|key|value)/kernel": "head.attention.in_proj_weight",
        "pooling/attention/(?:query|key|value)/bias": "head.attention.in_proj_bias",
    },
    layouts={
        "class_token": "abD->(abD)",
        "positions/table": "aSD->(aS)D",
        "pooling/attention/(?:query|key|value)/kernel": "DTh->(Th)D",
        "pooling/attention/(?:query|key|value)/bias": "Th->(Th)",
    },
    heads={"head/linear": "visual_projection"},
    has_head_bias=False,
    ignored=r"text_model\.|text_projection|logit_(scale|bias)$|.*\.position_ids$",
)
"""Names of CLIP and SigLIP."""

_TIMM_MODEL = TimmModel(
    name="vit_base_patch16_clip_224",
    held={**VISION_TRANSFORMER, "layer_norm_epsilon": (1e-5,)},
    epsilon=1e-5,
    preference=1,  # with this epsilon it computes as much as the ViT
)


def _state_arguments(a: Architecture, pixels: Normalisation) -> dict[str, object]:
    return {"projection_dim": a.num_classes or a.width}


_TRANSFORMERS_MODEL = TransformersModel(
    name="CLIPVisionModel",
    classifier="CLIPVisionModelWithProjection",
    model_type="clip_vision_model",
    prefix="vision_model.",
    keeps_prefix=True,
    names=HUGGINGFACE_NAMES,
    held={**ANY_CLASS, **SQUARE, "pool": ("token",), "embedding_norm": ("tokens",)},
    arguments=_state_arguments,
)
_EPSILON = {"layer_norm_epsilon": 1e-5}

FAMILY = Family(
    finetuning_rule="siglip2",
    releases=(
        Release(
            name="CLIP",
            addresses=(
                "hf://openai/clip-vit-{base-patch32,base-patch16,large-patch14}",
                "hf://timm/vit_base_patch16_clip_quickgelu_224.openai",
            ),
            pattern=r"openai/clip-vit|_clip_\w+\.openai",
            use="features that match text",
            licence="mit",
            pixels="short side bicubic, middle 224",
            accuracy="linear B/32 76.1, B/16 80.2, L/14 83.9, L/14 at 336 85.4",
            source="arXiv:2103.00020, table 10",
        ),
        Release(
            name="OpenCLIP",
            addresses=(
                "hf://timm/vit_{base_patch32,base_patch16,large_patch14,huge_patch14}_clip_224.laion2b",
                "hf://laion/CLIP-ViT-B-32-laion2B-s34B-b79K",
            ),
            pattern=r"laion/CLIP-|_clip_\w+\.laion",
            use="features that match text",
            licence="mit",
            pixels="short side bicubic, middle 224",
        ),
        Release(
            name="DFN",
            addresses=("hf://timm/vit_large_patch14_clip_quickgelu_224.dfn2b",),
            pattern=r"apple/DFN|_clip_\w+\.dfn",
            use="features that match text",
            licence="apple-ascl",
            pixels="short side bicubic, middle 224",
        ),
        Release(
            name="MetaCLIP",
            addresses=(
                "hf://timm/vit_base_patch16_clip_quickgelu_224.metaclip_2pt5b",
                "hf://facebook/metaclip-b16-fullcc2.5b",
            ),
            pattern=r"facebook/metaclip|_clip_\w+\.metaclip",
            use="features that match text",
            licence="cc-by-nc-4.0",
            pixels="short side bicubic, middle 224",
        ),
    ),
    models=read_models(_MODELS),
    deprecated=read_deprecated(_DEPRECATED),
    registry_rows={
        "CLIP, OpenCLIP, DFN, MetaCLIP": r"vit_\w+_clip",
    },
    named_fields={"_clip_quickgelu": {"gelu": "quick", **_EPSILON}, "_clip_": _EPSILON},
    model_types={
        "clip": {},
        "clip_vision_model": {},
        "chinese_clip": {},
        "metaclip_2": {},
        "metaclip_2_vision_model": {},
    },
    original=ORIGINAL,
    huggingface=(HUGGINGFACE_NAMES,),
    timm_models=(_TIMM_MODEL,),
    transformers_models=(_TRANSFORMERS_MODEL,),
)
