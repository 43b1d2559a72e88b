"""EVA and EVA-02, which has rotary positions on a grid of 16 by 16 places."""

from vit_jax.weights.family import Family, RejectedModels, Release, read_models
from vit_jax.weights.library_models import ANY, EVA, PARTIAL_BIAS, TimmModel

_MODELS = """
192/12/3
  eva02_tiny_patch14_224 eva02_tiny_patch14_336
384/12/6
  eva02_small_patch14_224 eva02_small_patch14_336
768/12/12
  eva02_base_patch14_224 eva02_base_patch14_448 eva02_base_patch16_clip_224
1024/24/16
  eva02_large_patch14_224 eva02_large_patch14_448 eva02_large_patch14_clip_224
  eva02_large_patch14_clip_336 eva_large_patch14_196 eva_large_patch14_336
1408/40/16
  eva_giant_patch14_224 eva_giant_patch14_336 eva_giant_patch14_560 eva_giant_patch14_clip_224
"""

_FIRST = TimmModel(name="eva_giant_patch14_224", held={**EVA, "qkv_bias": ("query_value",)})
_SECOND = TimmModel(
    name="eva02_base_patch14_224",
    held={
        **EVA,
        **PARTIAL_BIAS,
        "mlp": ("gelu", "swiglu", "swiglu_norm"),
        "attention_norm": ANY,
        "rope": ("grid",),
    },
)

FAMILY = Family(
    releases=(
        Release(
            name="EVA-02",
            addresses=("hf://timm/eva02_{tiny,small,base,large}_patch14_224.mim_in22k",),
            pattern="(^|/)eva02_",
            use="fine-tuning at high resolution",
            licence="mit",
            pixels="both sides 448 bicubic",
            accuracy="fine-tuned Ti 80.7, S 85.8, B 88.6, L 90.0",
            source="arXiv:2303.11331",
        ),
    ),
    models=read_models(_MODELS),
    registry_rows={
        "EVA (the first)": "eva_",
        "EVA-02": "eva02_",
    },
    named_fields={"^eva02_": {"rope": "grid"}},
    rejected_models=(
        RejectedModels(
            "eva02_enormous_",
            "a ViT with post-norm blocks",
            "a norm behind each branch in place of before",
        ),
    ),
    timm_models=(_FIRST, _SECOND),
)
