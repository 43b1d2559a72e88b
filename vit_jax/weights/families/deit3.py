"""DeiT III. It has the names and classes of timm's VisionTransformer and of the ViT."""

from vit_jax.weights.family import Family, Release, read_deprecated, read_models

_MODELS = """
384/12/6
  deit3_small_patch16_224 deit3_small_patch16_384
512/12/8
  deit3_medium_patch16_224
768/12/12
  deit3_base_patch16_224 deit3_base_patch16_384
1024/24/16
  deit3_large_patch16_224 deit3_large_patch16_384
1280/32/16
  deit3_huge_patch14_224
"""
_DEPRECATED = """
deit3_base_patch16_224_in21ft1k deit3_base_patch16_224
deit3_base_patch16_384_in21ft1k deit3_base_patch16_384
deit3_huge_patch14_224_in21ft1k deit3_huge_patch14_224
deit3_large_patch16_224_in21ft1k deit3_large_patch16_224
deit3_large_patch16_384_in21ft1k deit3_large_patch16_384
deit3_medium_patch16_224_in21ft1k deit3_medium_patch16_224
deit3_small_patch16_224_in21ft1k deit3_small_patch16_224
deit3_small_patch16_384_in21ft1k deit3_small_patch16_384
"""


FAMILY = Family(
    releases=(
        Release(
            name="DeiT III",
            addresses=("hf://timm/deit3_{small,base,large}_patch16_224.fb_in22k_ft_in1k",),
            pattern="(^|/)deit3_",
            use="classification, supervised features",
            licence="apache-2.0",
            pixels="short side 256 bicubic, middle 224",
            accuracy="supervised S 81.4, B 83.8, L 84.9 (ImageNet-1k alone)",
            source="arXiv:2204.07118",
        ),
    ),
    models=read_models(_MODELS),
    deprecated=read_deprecated(_DEPRECATED),
    registry_rows={
        "DeiT III": "deit3_",
    },
)
