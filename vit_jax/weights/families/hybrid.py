"""Hybrids of the paper and of AugReg: a ViT on the features of a ResNet.

Files have the names of the ViT.
"""

from vit_jax.weights.family import (
    Family,
    RejectedModels,
    TimmBody,
    read_addresses,
    read_deprecated,
    read_models,
)

_MODELS = """
192/12/3
  vit_tiny_r_s16_p8_224 vit_tiny_r_s16_p8_384
384/12/6
  vit_small_r26_s32_224 vit_small_r26_s32_384
768/12/12
  vit_base_r26_s32_224 vit_base_r50_s16_224 vit_base_r50_s16_384
1024/24/16
  vit_large_r50_s32_224 vit_large_r50_s32_384
"""
_DEPRECATED = """
vit_base_r50_s16_224_in21k vit_base_r50_s16_224
vit_base_resnet50_224_in21k vit_base_r50_s16_224
vit_base_resnet50_384 vit_base_r50_s16_384
vit_large_r50_s32_224_in21k vit_large_r50_s32_224
vit_small_r26_s32_224_in21k vit_small_r26_s32_224
vit_tiny_r_s16_p8_224_in21k vit_tiny_r_s16_p8_224
"""

_ADDRESSES = """
R+ViT-Ti/16
    gs://vit_models/augreg/R_Ti_16-i21k-300ep-lr_0.001-aug_none-wd_0.03-do_0.0-sd_0.0.npz
    hf://timm/vit_tiny_r_s16_p8_{224.augreg_in21k,224.augreg_in21k_ft_in1k,384.augreg_in21k_ft_in1k}
R26+ViT-S/32
    gs://vit_models/augreg/R26_S_32-i21k-300ep-lr_0.001-aug_light1-wd_0.1-do_0.0-sd_0.0.npz
    hf://timm/vit_small_r26_s32_{224.augreg_in21k,224.augreg_in21k_ft_in1k,384.augreg_in21k_ft_in1k}
R26+ViT-B/32
    gs://vit_models/imagenet21k/R26+ViT-B_32.npz
R50+ViT-B/16
    gs://vit_models/{imagenet21k,imagenet21k+imagenet2012}/R50+ViT-B_16.npz
    hf://timm/vit_base_r50_s16_{224.orig_in21k,384.orig_in21k_ft_in1k}
R50+ViT-L/32
    gs://vit_models/imagenet21k/R50+ViT-L_32.npz
    gs://vit_models/augreg/R50_L_32-i21k-300ep-lr_0.001-aug_medium1-wd_0.1-do_0.1-sd_0.1.npz
    hf://timm/vit_large_r50_s32_{224.augreg_in21k,224.augreg_in21k_ft_in1k,384.augreg_in21k_ft_in1k}
"""
_TIMM_BODIES: dict[TimmBody, str] = {
    ("hybrid", (), 1): "vit_tiny_r_s16_p8_224",
    ("hybrid", (2, 2, 2, 2), 1): "vit_small_r26_s32_224",
    ("hybrid", (3, 4, 9), 1): "vit_base_r50_s16_224",
    ("hybrid", (3, 4, 6, 3), 1): "vit_large_r50_s32_224",
}

FAMILY = Family(
    models=read_models(_MODELS),
    deprecated=read_deprecated(_DEPRECATED),
    registry_rows={
        "hybrids": r"vit_\w+_(r26|r50|r)_s",
    },
    addresses=read_addresses(_ADDRESSES),
    rejected_models=(
        RejectedModels(r"vit_(small|base)_resnet\d+d_", "a hybrid with a ResNet-D", "batch norm"),
    ),
    timm_bodies=_TIMM_BODIES,
)
