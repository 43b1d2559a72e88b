"""Public weights by network and by family, in formats that `load` reads. Nothing is downloaded from here.

An address is a file in a bucket of its authors, to be downloaded first, or `hf://owner/name`.
"""

import re
from typing import NamedTuple

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


class Family(NamedTuple):
    """Pre-trained networks of one training method."""

    name: str
    addresses: tuple[str, ...]  # on the Hub; {A,B} stands for each of these
    # Regular expression of Hub names, timm's models with their tag, and transformers' model types of this family alone.
    pattern: str
    use: str
    licence: str  # as the Hub names it, when this was written
    pixels: str  # preprocessing of its authors
    accuracy: str = ""  # ImageNet-1k top-1 in percent; "" if the source below was not at hand
    source: str = ""  # of the accuracy


FAMILIES = (
    Family(
        "MAE",
        ("hf://timm/vit_{base_patch16,large_patch16,huge_patch14}_224.mae", "hf://facebook/vit-mae-{base,large,huge}"),
        r"\.mae$|vit-mae-|^vit_mae$",
        "fine-tuning",
        "cc-by-nc-4.0",
        "short side 256 bicubic, middle 224",
        "fine-tuned B 83.6, L 85.9, H 86.9; linear B 68.0, L 75.8, H 76.6",
        "arXiv:2111.06377",
    ),
    Family(
        "I-JEPA",
        ("hf://timm/vit_huge_patch14_gap_224.in1k_ijepa", "hf://facebook/ijepa_vit{h14_1k,h14_22k,h16_1k,g16_22k}"),
        r"ijepa",
        "linear probes on the mean of patches",
        "cc-by-nc-4.0",
        "short side 256 bicubic, middle 224",
        "linear H/14 79.3, H/16 at 448 81.1",
        "arXiv:2301.08243",
    ),
    Family(
        "DeiT",
        ("hf://timm/deit_{tiny,small,base}_patch16_224.fb_in1k", "hf://facebook/deit-{tiny,small,base}-patch16-224"),
        r"(^|/)deit(_\w+?_patch|-\w+?-(distilled-)?patch|$)",
        "classification of ImageNet, small networks",
        "apache-2.0",
        "short side 256 bicubic, middle 224",
        "supervised S 79.8, B 81.8; distilled B 83.4",
        "arXiv:2012.12877",
    ),
    Family(
        "DeiT III",
        ("hf://timm/deit3_{small,base,large}_patch16_224.fb_in22k_ft_in1k",),
        r"(^|/)deit3_",
        "classification, supervised features",
        "apache-2.0",
        "short side 256 bicubic, middle 224",
        "supervised S 81.4, B 83.8, L 84.9 (ImageNet-1k alone)",
        "arXiv:2204.07118",
    ),
    Family(
        "DINOv2",
        (
            "hf://facebook/dinov2-{small,base,large,giant}",
            "hf://timm/vit_{small,base,large,giant}_patch14_dinov2.lvd142m",
        ),
        r"dinov2-(small|base|large|giant)|patch14_dinov2|^dinov2$",
        "frozen features, k-NN, linear probes, dense tasks",
        "apache-2.0",
        "short side 256 bicubic, middle 224",
        "k-NN S 79.0, B 82.1, L 83.5, g 83.5; linear S 81.1, B 84.5, L 86.3, g 86.5",
        "arXiv:2304.07193, table 4",
    ),
    Family(
        "DINOv2 with registers",
        (
            "hf://facebook/dinov2-with-registers-{small,base,large,giant}",
            "hf://timm/vit_base_patch14_reg4_dinov2.lvd142m",
        ),
        r"dinov2-with-registers|reg4_dinov2|^dinov2_with_registers$",
        "as DINOv2, with cleaner attention pictures",
        "apache-2.0",
        "short side 256 bicubic, middle 224",
        "k-NN S 79.1, B 82.0, L 83.8, g 83.7; linear S 80.9, B 84.6, L 86.7, g 87.1",
        "README of facebookresearch/dinov2",
    ),
    Family(
        "TIPSv2",
        ("hf://timm/vit_{base,large,so400m,giant}_patch14_reg1_tipsv2.webli", "hf://google/tipsv2-b14"),
        r"tipsv2",
        "dense features with text supervision",
        "apache-2.0",
        "both sides 448 bilinear, pixels in [0, 1]",
    ),
    Family(
        "DINOv3",
        (
            "hf://facebook/dinov3-vit{s16,s16plus,b16,l16,h16plus,7b16}-pretrain-lvd1689m",
            "hf://timm/vit_{small,base,large,huge_plus,7b}_patch16_dinov3.lvd1689m",
        ),
        r"dinov3-vit|patch16_dinov3(?!_qkvb\.eupe)|^dinov3_vit$",
        "frozen features at any resolution, dense tasks",
        "dinov3-license",
        "both sides 256 bilinear",
        "linear 7B 88.4",
        "arXiv:2508.10104",
    ),
    Family(
        "EUPE",
        ("hf://timm/vit_{tiny,small,base}_patch16_dinov3_qkvb.eupe_lvd1689m",),
        r"\.eupe",
        "small encoders for many tasks",
        "fair-noncommercial-research-license",
        "both sides 256 bilinear",
    ),
    Family(
        "SigLIP",
        (
            "hf://google/siglip-{base-patch16-224,large-patch16-256}",
            "hf://timm/vit_base_patch16_siglip_{224,384}.webli",
        ),
        r"(^|/)siglip-|_siglip_\w+\.webli",
        "fine-tuning, features that match text",
        "apache-2.0",
        "both sides bicubic, pixels in [-1, 1]",
        "zero-shot B/16 76.2, L/16 at 256 80.5, So400m/14 82.2",
        "arXiv:2502.14786, table 1",
    ),
    Family(
        "SigLIP 2",
        (
            "hf://google/siglip2-{base-patch16-224,large-patch16-256,so400m-patch14-224}",
            "hf://timm/vit_{base_patch16_siglip_224,large_patch16_siglip_256,so400m_patch14_siglip_224}.v2_webli",
        ),
        r"siglip2-|\.v2_webli",
        "fine-tuning, features that match text, dense tasks",
        "apache-2.0",
        "both sides bicubic, pixels in [-1, 1]",
        "zero-shot B/16 78.2, L/16 at 256 82.5, So400m/14 83.2",
        "arXiv:2502.14786, table 1",
    ),
    Family(
        "CLIP",
        (
            "hf://openai/clip-vit-{base-patch32,base-patch16,large-patch14}",
            "hf://timm/vit_base_patch16_clip_quickgelu_224.openai",
        ),
        r"openai/clip-vit|_clip_\w+\.openai",
        "features that match text",
        "mit",
        "short side bicubic, middle 224",
        "linear B/32 76.1, B/16 80.2, L/14 83.9, L/14 at 336 85.4",
        "arXiv:2103.00020, table 10",
    ),
    Family(
        "OpenCLIP",
        (
            "hf://timm/vit_{base_patch32,base_patch16,large_patch14,huge_patch14}_clip_224.laion2b",
            "hf://laion/CLIP-ViT-B-32-laion2B-s34B-b79K",
        ),
        r"laion/CLIP-|_clip_\w+\.laion",
        "features that match text",
        "mit",
        "short side bicubic, middle 224",
    ),
    Family(
        "DFN",
        ("hf://timm/vit_large_patch14_clip_quickgelu_224.dfn2b",),
        r"apple/DFN|_clip_\w+\.dfn",
        "features that match text",
        "apple-ascl",
        "short side bicubic, middle 224",
    ),
    Family(
        "MetaCLIP",
        ("hf://timm/vit_base_patch16_clip_quickgelu_224.metaclip_2pt5b", "hf://facebook/metaclip-b16-fullcc2.5b"),
        r"facebook/metaclip|_clip_\w+\.metaclip",
        "features that match text",
        "cc-by-nc-4.0",
        "short side bicubic, middle 224",
    ),
    Family(
        "EVA-02",
        ("hf://timm/eva02_{tiny,small,base,large}_patch14_224.mim_in22k",),
        r"(^|/)eva02_",
        "fine-tuning at high resolution",
        "mit",
        "both sides 448 bicubic",
        "fine-tuned Ti 80.7, S 85.8, B 88.6, L 90.0",
        "arXiv:2303.11331",
    ),
    Family(
        "Perception Encoder",
        ("hf://timm/vit_pe_{core_base_patch16_224,core_large_patch14_336,lang_large_patch14_448}.fb",),
        r"(^|/)vit_pe_|facebook/PE-",
        "core: features that match text; lang, spatial: dense tasks",
        "apache-2.0",
        "both sides bilinear, pixels in [-1, 1]",
        "zero-shot (core) B 78.4, L 83.5, G 85.4",
        "arXiv:2504.13181",
    ),
    Family(
        "AIMv2",
        ("hf://timm/aimv2_{large,huge,1b,3b}_patch14_224.apple_pt", "hf://apple/aimv2-large-patch14-224"),
        r"aimv2",
        "frozen features",
        "apple-ascl",
        "short side bicubic, middle 224",
        "attentive probe L 86.6, H 87.5, 1B 88.1, 3B 88.5",
        "arXiv:2411.14402",
    ),
    Family(
        "C-RADIO",
        ("hf://timm/vit_{base,large,huge,giant}_patch16_radio_v3.c_radio", "hf://nvidia/C-RADIOv4-H"),
        r"_radio_v\d|nvidia/C-RADIO|^radio$",
        "dense tasks, features of several teachers",
        "nvidia-open-model-license",
        "512 bicubic; mean and deviation are in the file",
    ),
    Family(
        "InternViT",
        ("hf://timm/vit_intern300m_patch14_448.ogvl_2pt5",),
        r"vit_intern300m",
        "vision tower of language models",
        "apache-2.0",
        "both sides 448 bicubic",
    ),
)
"""Current families of pre-trained ViTs that are read, with facts of their authors."""


def expanded(address: str) -> list[str]:
    """Return the addresses that one with {A,B} stands for."""
    start, brace, rest = address.partition("{")
    words, _, end = rest.partition("}")
    return [f"{start}{word}{after}" for word in words.split(",") for after in expanded(end)] if brace else [address]


FAMILY_HEAD = ("family", "good for", "licence", "pixels", "accuracy", "source")


def family_cells(family: Family) -> tuple[str, ...]:
    """Return the cells of a family below `FAMILY_HEAD`."""
    return (family.name, family.use, family.licence, family.pixels, family.accuracy, family.source)


def licence_of(*names: str) -> str:
    """Return the licence of the family that one of these names is of; "" if none or several families have it.

    Args:
      *names: Hub names, timm's models with their tag, or model types of transformers.
    """
    found = {family.licence for family in FAMILIES for name in names if name and re.search(family.pattern, name)}
    return found.pop() if len(found) == 1 else ""
