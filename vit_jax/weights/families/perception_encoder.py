"""Perception Encoder: rotary positions that count patches. The authors use the names of CLIP."""

from vit_jax.weights.family import Family, RejectedModels, Release, read_models
from vit_jax.weights.library_models import EVA, WHOLE_BIAS, Held, TimmModel

_MODELS = """
192/12/3
  vit_pe_core_tiny_patch16_384 vit_pe_spatial_tiny_patch16_512
384/12/6
  vit_pe_core_small_patch16_384 vit_pe_spatial_small_patch16_512
768/12/12
  vit_pe_core_base_patch16_224 vit_pe_spatial_base_patch16_512
1024/23/16
  vit_pe_lang_large_patch14_448
1024/24/16
  vit_pe_core_large_patch14_336 vit_pe_spatial_large_patch14_448
1536/47/16
  vit_pe_lang_gigantic_patch14_448
1536/50/16
  vit_pe_spatial_gigantic_patch14_448
"""

_FIELDS = {"rope": "index", "layer_norm_epsilon": 1e-5}
_HELD: Held = {**EVA, **WHOLE_BIAS, "rope": ("index",), "embedding_norm": ("tokens",)}
_CORE = TimmModel(
    name="vit_pe_core_base_patch16_224", held={**_HELD, "pool": ("map",)}, epsilon=1e-5
)
_SPATIAL = TimmModel(
    name="vit_pe_spatial_base_patch16_512", held={**_HELD, "pool": ("token", "gap")}, epsilon=1e-5
)

FAMILY = Family(
    releases=(
        Release(
            name="Perception Encoder",
            addresses=(
                "hf://timm/vit_pe_{core_base_patch16_224,core_large_patch14_336,lang_large_patch14_448}.fb",
            ),
            pattern="(^|/)vit_pe_|facebook/PE-",
            use="core: features that match text; lang, spatial: dense tasks",
            licence="apache-2.0",
            pixels="both sides bilinear, pixels in [-1, 1]",
            accuracy="zero-shot (core) B 78.4, L 83.5, G 85.4",
            source="arXiv:2504.13181",
        ),
    ),
    models=read_models(_MODELS),
    registry_rows={
        "Perception Encoder": "vit_pe_",
    },
    named_fields={"^vit_pe_core_": {**_FIELDS, "pool_num_heads": 8}, "^vit_pe_": _FIELDS},
    rejected_models=(
        RejectedModels(
            "vit_pe_core_gigantic_",
            "the largest core of Perception Encoder",
            "a pooling with a narrower MLP than the blocks",
        ),
    ),
    timm_models=(_CORE, _SPATIAL),
)
