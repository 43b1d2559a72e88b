"""Public weights by network, in formats that `load` reads. Nothing is downloaded from here.

An address is a file in a bucket of its authors, to be downloaded first, or `hf://owner/name`.
"""

RELEASES = {  # beginning of an address: name of the release
    "gs://vit_models/imagenet21k": "ViT",
    "gs://vit_models/augreg/": "AugReg",
    "gs://vit_models/sam/": "SAM",
    "gs://big_vision/": "big_vision",
    "gs://bit_models/": "BiT",
    "hf://google/": "Hugging Face",
    "hf://timm/": "timm",
}

_ADDRESSES = {
    "ViT-Ti/16": """
        gs://vit_models/augreg/Ti_16-i21k-300ep-lr_0.001-aug_none-wd_0.03-do_0.0-sd_0.0.npz
        hf://timm/vit_tiny_patch16_224.augreg_in21k
        hf://timm/vit_tiny_patch16_224.augreg_in21k_ft_in1k
        hf://timm/vit_tiny_patch16_384.augreg_in21k_ft_in1k
    """,
    "ViT-S/32": """
        gs://vit_models/augreg/S_32-i21k-300ep-lr_0.001-aug_none-wd_0.1-do_0.0-sd_0.0.npz
        hf://timm/vit_small_patch32_224.augreg_in21k
        hf://timm/vit_small_patch32_224.augreg_in21k_ft_in1k
        hf://timm/vit_small_patch32_384.augreg_in21k_ft_in1k
    """,
    "ViT-S/16": """
        gs://vit_models/augreg/S_16-i21k-300ep-lr_0.001-aug_light1-wd_0.03-do_0.0-sd_0.0.npz
        gs://vit_models/sam/ViT-S_16.npz
        gs://big_vision/vit_s16_i1k_90ep.npz
        gs://big_vision/vit_s16_i1k_150ep.npz
        gs://big_vision/vit_s16_i1k_300ep.npz
        hf://timm/vit_small_patch16_224.augreg_in21k
        hf://timm/vit_small_patch16_224.augreg_in21k_ft_in1k
        hf://timm/vit_small_patch16_384.augreg_in21k_ft_in1k
        hf://timm/vit_small_patch16_224.augreg_in1k
        hf://timm/vit_small_patch16_384.augreg_in1k
    """,
    "ViT-B/32": """
        gs://vit_models/imagenet21k/ViT-B_32.npz
        gs://vit_models/imagenet21k+imagenet2012/ViT-B_32.npz
        gs://vit_models/augreg/B_32-i21k-300ep-lr_0.001-aug_light1-wd_0.1-do_0.0-sd_0.0.npz
        gs://vit_models/sam/ViT-B_32.npz
        hf://google/vit-base-patch32-224-in21k
        hf://google/vit-base-patch32-384
        hf://timm/vit_base_patch32_224.augreg_in21k
        hf://timm/vit_base_patch32_224.augreg_in21k_ft_in1k
        hf://timm/vit_base_patch32_384.augreg_in21k_ft_in1k
        hf://timm/vit_base_patch32_224.augreg_in1k
        hf://timm/vit_base_patch32_384.augreg_in1k
        hf://timm/vit_base_patch32_224.sam_in1k
    """,
    "ViT-B/16": """
        gs://vit_models/imagenet21k/ViT-B_16.npz
        gs://vit_models/imagenet21k+imagenet2012/ViT-B_16-224.npz
        gs://vit_models/imagenet21k+imagenet2012/ViT-B_16.npz
        gs://vit_models/augreg/B_16-i21k-300ep-lr_0.001-aug_medium1-wd_0.1-do_0.0-sd_0.0.npz
        gs://vit_models/sam/ViT-B_16.npz
        hf://google/vit-base-patch16-224-in21k
        hf://google/vit-base-patch16-224
        hf://google/vit-base-patch16-384
        hf://timm/vit_base_patch16_224.augreg_in21k
        hf://timm/vit_base_patch16_224.augreg_in21k_ft_in1k
        hf://timm/vit_base_patch16_384.augreg_in21k_ft_in1k
        hf://timm/vit_base_patch16_224.augreg_in1k
        hf://timm/vit_base_patch16_384.augreg_in1k
        hf://timm/vit_base_patch16_224.augreg2_in21k_ft_in1k
        hf://timm/vit_base_patch16_224.orig_in21k_ft_in1k
        hf://timm/vit_base_patch16_384.orig_in21k_ft_in1k
        hf://timm/vit_base_patch16_224.sam_in1k
    """,
    "ViT-B/8": """
        gs://vit_models/imagenet21k/ViT-B_8.npz
        gs://vit_models/imagenet21k+imagenet2012/ViT-B_8.npz
        gs://vit_models/augreg/B_8-i21k-300ep-lr_0.001-aug_medium2-wd_0.1-do_0.0-sd_0.0.npz
        hf://timm/vit_base_patch8_224.augreg_in21k
        hf://timm/vit_base_patch8_224.augreg_in21k_ft_in1k
        hf://timm/vit_base_patch8_224.augreg2_in21k_ft_in1k
    """,
    "ViT-L/32": """
        gs://vit_models/imagenet21k/ViT-L_32.npz
        gs://vit_models/imagenet21k+imagenet2012/ViT-L_32.npz
        gs://vit_models/sam/ViT-L_32.npz
        hf://timm/vit_large_patch32_224.orig_in21k
        hf://timm/vit_large_patch32_384.orig_in21k_ft_in1k
    """,
    "ViT-L/16": """
        gs://vit_models/imagenet21k/ViT-L_16.npz
        gs://vit_models/imagenet21k+imagenet2012/ViT-L_16-224.npz
        gs://vit_models/imagenet21k+imagenet2012/ViT-L_16.npz
        gs://vit_models/augreg/L_16-i21k-300ep-lr_0.001-aug_strong1-wd_0.1-do_0.0-sd_0.0.npz
        gs://vit_models/sam/ViT-L_16.npz
        hf://google/vit-large-patch16-224
        hf://google/vit-large-patch16-384
        hf://timm/vit_large_patch16_224.augreg_in21k
        hf://timm/vit_large_patch16_224.augreg_in21k_ft_in1k
        hf://timm/vit_large_patch16_384.augreg_in21k_ft_in1k
    """,
    "ViT-H/14": """
        gs://vit_models/imagenet21k/ViT-H_14.npz
        hf://google/vit-huge-patch14-224-in21k
        hf://timm/vit_huge_patch14_224.orig_in21k
    """,
    "R+ViT-Ti/16": """
        gs://vit_models/augreg/R_Ti_16-i21k-300ep-lr_0.001-aug_none-wd_0.03-do_0.0-sd_0.0.npz
        hf://timm/vit_tiny_r_s16_p8_224.augreg_in21k
        hf://timm/vit_tiny_r_s16_p8_224.augreg_in21k_ft_in1k
        hf://timm/vit_tiny_r_s16_p8_384.augreg_in21k_ft_in1k
    """,
    "R26+ViT-S/32": """
        gs://vit_models/augreg/R26_S_32-i21k-300ep-lr_0.001-aug_light1-wd_0.1-do_0.0-sd_0.0.npz
        hf://timm/vit_small_r26_s32_224.augreg_in21k
        hf://timm/vit_small_r26_s32_224.augreg_in21k_ft_in1k
        hf://timm/vit_small_r26_s32_384.augreg_in21k_ft_in1k
    """,
    "R26+ViT-B/32": """
        gs://vit_models/imagenet21k/R26+ViT-B_32.npz
    """,
    "R50+ViT-B/16": """
        gs://vit_models/imagenet21k/R50+ViT-B_16.npz
        gs://vit_models/imagenet21k+imagenet2012/R50+ViT-B_16.npz
        hf://timm/vit_base_r50_s16_224.orig_in21k
        hf://timm/vit_base_r50_s16_384.orig_in21k_ft_in1k
    """,
    "R50+ViT-L/32": """
        gs://vit_models/imagenet21k/R50+ViT-L_32.npz
        gs://vit_models/augreg/R50_L_32-i21k-300ep-lr_0.001-aug_medium1-wd_0.1-do_0.1-sd_0.1.npz
        hf://timm/vit_large_r50_s32_224.augreg_in21k
        hf://timm/vit_large_r50_s32_224.augreg_in21k_ft_in1k
        hf://timm/vit_large_r50_s32_384.augreg_in21k_ft_in1k
    """,
}
_RESNETS = ("R50x1", "R50x3", "R101x1", "R101x3", "R152x2", "R152x4")


def _of_resnet(name: str) -> tuple[str, ...]:
    timm = f"hf://timm/resnetv2_{name.removeprefix('R')}_bit.goog_in21k"
    files = (f"BiT-M-{name}", f"BiT-M-{name}-ILSVRC2012", f"BiT-S-{name}")
    return (*(f"gs://bit_models/{file}.npz" for file in files), timm, f"{timm}_ft_in1k")


PUBLISHED = {name: tuple(addresses.split()) for name, addresses in _ADDRESSES.items()}
PUBLISHED |= {name: _of_resnet(name) for name in _RESNETS}
"""Addresses of public weights, by the name of their network."""


def releases_of(name: str) -> list[str]:
    """Return the releases that have weights of this network."""
    addresses = PUBLISHED.get(name, ())
    return [release for start, release in RELEASES.items() if any(address.startswith(start) for address in addresses)]
