"""I-JEPA: a ViT without class token. It has the names of the ViT."""

from vit_jax.weights.families import vision_transformer as vit
from vit_jax.weights.family import Family, Release
from vit_jax.weights.library_models import ANY_CLASS, WHOLE_BIAS, TransformersModel

_MODEL = TransformersModel(
    name="IJepaModel",
    classifier="IJepaForImageClassification",
    model_type="ijepa",
    prefix="ijepa.",
    names=vit.HUGGINGFACE_NAMES,
    held={**ANY_CLASS, **WHOLE_BIAS, "pool": ("gap",), "class_tokens": (None, 0)},
    arguments=vit.state_arguments,
)

FAMILY = Family(
    finetuning_rule="mae",
    releases=(
        Release(
            name="I-JEPA",
            addresses=(
                "hf://timm/vit_huge_patch14_gap_224.in1k_ijepa",
                "hf://facebook/ijepa_vit{h14_1k,h14_22k,h16_1k,g16_22k}",
            ),
            pattern="ijepa",
            use="linear probes on the mean of patches",
            licence="cc-by-nc-4.0",
            pixels="short side 256 bicubic, middle 224",
            accuracy="linear H/14 79.3, H/16 at 448 81.1",
            source="arXiv:2301.08243",
        ),
    ),
    model_types={"ijepa": {"pool": "gap"}},
    transformers_models=(_MODEL,),
)
