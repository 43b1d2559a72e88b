"""SigLIP and SigLIP 2. They have the names of CLIP and of timm's VisionTransformer."""

from vit_jax.weights.families import clip
from vit_jax.weights.family import Family, Release, read_models
from vit_jax.weights.library_models import SQUARE, WITHOUT_CLASSES, TransformersModel

_MODELS = """
768/12/12
  vit_base_patch16_siglip_224 vit_base_patch16_siglip_256 vit_base_patch16_siglip_384
  vit_base_patch16_siglip_512 vit_base_patch16_siglip_gap_224 vit_base_patch16_siglip_gap_256
  vit_base_patch16_siglip_gap_384 vit_base_patch16_siglip_gap_512 vit_base_patch32_siglip_256
  vit_base_patch32_siglip_gap_256
1024/24/16
  vit_large_patch16_siglip_256 vit_large_patch16_siglip_384 vit_large_patch16_siglip_512
  vit_large_patch16_siglip_gap_256 vit_large_patch16_siglip_gap_384 vit_large_patch16_siglip_gap_512
1152/27/16
  vit_so400m_patch14_siglip_224 vit_so400m_patch14_siglip_378 vit_so400m_patch14_siglip_384
  vit_so400m_patch14_siglip_gap_224 vit_so400m_patch14_siglip_gap_378
  vit_so400m_patch14_siglip_gap_384 vit_so400m_patch14_siglip_gap_448
  vit_so400m_patch14_siglip_gap_896 vit_so400m_patch16_siglip_256 vit_so400m_patch16_siglip_384
  vit_so400m_patch16_siglip_512 vit_so400m_patch16_siglip_gap_256 vit_so400m_patch16_siglip_gap_384
  vit_so400m_patch16_siglip_gap_512
1536/40/16
  vit_giantopt_patch16_siglip_256 vit_giantopt_patch16_siglip_384
  vit_giantopt_patch16_siglip_gap_256 vit_giantopt_patch16_siglip_gap_384
"""

_NOTE = (
    "SigLIP was trained with the tanh GELU, which is taken here. timm computes some of its SigLIP "
    "models with the exact GELU: its logits differ a little there."
)
_TRANSFORMERS_MODEL = TransformersModel(
    name="SiglipVisionModel",
    model_type="siglip_vision_model",
    prefix="",
    names=clip.HUGGINGFACE_NAMES,
    held={**WITHOUT_CLASSES, **SQUARE, "pool": ("map",)},
)

FAMILY = Family(
    finetuning_rule="siglip2",
    releases=(
        Release(
            name="SigLIP",
            addresses=(
                "hf://google/siglip-{base-patch16-224,large-patch16-256}",
                "hf://timm/vit_base_patch16_siglip_{224,384}.webli",
            ),
            pattern=r"(^|/)siglip-|_siglip_\w+\.webli",
            use="fine-tuning, features that match text",
            licence="apache-2.0",
            pixels="both sides bicubic, pixels in [-1, 1]",
            accuracy="zero-shot B/16 76.2, L/16 at 256 80.5, So400m/14 82.2",
            source="arXiv:2502.14786, table 1",
        ),
        Release(
            name="SigLIP 2",
            addresses=(
                "hf://google/siglip2-{base-patch16-224,large-patch16-256,so400m-patch14-224}",
                "hf://timm/vit_{base_patch16_siglip_224,large_patch16_siglip_256,so400m_patch14_siglip_224}.v2_webli",
            ),
            pattern=r"siglip2-|\.v2_webli",
            use="fine-tuning, features that match text, dense tasks",
            licence="apache-2.0",
            pixels="both sides bicubic, pixels in [-1, 1]",
            accuracy="zero-shot B/16 78.2, L/16 at 256 82.5, So400m/14 83.2",
            source="arXiv:2502.14786, table 1",
        ),
    ),
    models=read_models(_MODELS),
    registry_rows={
        "SigLIP, SigLIP 2": r"vit_\w+_siglip",
    },
    named_fields={"_siglip_": {"gelu": "tanh"}},  # the form in the authors' code
    note=_NOTE,
    model_types={"siglip": {}, "siglip_vision_model": {}},
    transformers_models=(_TRANSFORMERS_MODEL,),
)
