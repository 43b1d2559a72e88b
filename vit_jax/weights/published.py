"""Public weights by network and by family, in formats that `load` reads. This module downloads nothing.

An address is a file in a bucket of its authors, to be downloaded first, or `hf://owner/name`. {A,B} stands for both.
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


def expanded(address: str) -> list[str]:
    """Return the addresses that one with {A,B} stands for."""
    start, brace, rest = address.partition("{")
    words, _, end = rest.partition("}")
    return (
        [f"{start}{word}{after}" for word in words.split(",") for after in expanded(end)]
        if brace
        else [address]
    )


def blocks(text: str) -> list[str]:
    """Return the blocks of a table: each begins with a line that is not indented."""
    return re.split(r"\n(?=\S)", text.strip())


# One block for each network: name, addresses.
_ADDRESSES = """
ViT-Ti/16
    gs://vit_models/augreg/Ti_16-i21k-300ep-lr_0.001-aug_none-wd_0.03-do_0.0-sd_0.0.npz
    hf://timm/vit_tiny_patch16_{224.augreg_in21k,224.augreg_in21k_ft_in1k,384.augreg_in21k_ft_in1k}
ViT-S/32
    gs://vit_models/augreg/S_32-i21k-300ep-lr_0.001-aug_none-wd_0.1-do_0.0-sd_0.0.npz
    hf://timm/vit_small_patch32_{224.augreg_in21k,224.augreg_in21k_ft_in1k,384.augreg_in21k_ft_in1k}
ViT-S/16
    gs://vit_models/augreg/S_16-i21k-300ep-lr_0.001-aug_light1-wd_0.03-do_0.0-sd_0.0.npz
    gs://vit_models/sam/ViT-S_16.npz
    gs://big_vision/vit_s16_i1k_{90ep,150ep,300ep}.npz
    hf://timm/vit_small_patch16_{224.augreg_in21k,224.augreg_in21k_ft_in1k,384.augreg_in21k_ft_in1k,224.augreg_in1k}
    hf://timm/vit_small_patch16_384.augreg_in1k
ViT-B/32
    gs://vit_models/{imagenet21k,imagenet21k+imagenet2012}/ViT-B_32.npz
    gs://vit_models/augreg/B_32-i21k-300ep-lr_0.001-aug_light1-wd_0.1-do_0.0-sd_0.0.npz
    gs://vit_models/sam/ViT-B_32.npz
    hf://google/vit-base-patch32-{224-in21k,384}
    hf://timm/vit_base_patch32_{224.augreg_in21k,224.augreg_in21k_ft_in1k,384.augreg_in21k_ft_in1k,224.augreg_in1k}
    hf://timm/vit_base_patch32_{384.augreg,224.sam}_in1k
ViT-B/16
    gs://vit_models/{imagenet21k/ViT-B_16,imagenet21k+imagenet2012/ViT-B_16-224}.npz
    gs://vit_models/imagenet21k+imagenet2012/ViT-B_16.npz
    gs://vit_models/augreg/B_16-i21k-300ep-lr_0.001-aug_medium1-wd_0.1-do_0.0-sd_0.0.npz
    gs://vit_models/sam/ViT-B_16.npz
    hf://google/vit-base-patch16-{224-in21k,224,384}
    hf://timm/vit_base_patch16_{224.augreg_in21k,224.augreg_in21k_ft_in1k,384.augreg_in21k_ft_in1k,224.augreg_in1k}
    hf://timm/vit_base_patch16_{384.augreg,224.augreg2_in21k_ft,224.orig_in21k_ft,384.orig_in21k_ft,224.sam}_in1k
ViT-B/8
    gs://vit_models/{imagenet21k,imagenet21k+imagenet2012}/ViT-B_8.npz
    gs://vit_models/augreg/B_8-i21k-300ep-lr_0.001-aug_medium2-wd_0.1-do_0.0-sd_0.0.npz
    hf://timm/vit_base_patch8_224.{augreg_in21k,augreg_in21k_ft_in1k,augreg2_in21k_ft_in1k}
ViT-L/32
    gs://vit_models/{imagenet21k,imagenet21k+imagenet2012}/ViT-L_32.npz
    gs://vit_models/sam/ViT-L_32.npz
    hf://timm/vit_large_patch32_{224.orig_in21k,384.orig_in21k_ft_in1k}
ViT-L/16
    gs://vit_models/{imagenet21k/ViT-L_16,imagenet21k+imagenet2012/ViT-L_16-224}.npz
    gs://vit_models/imagenet21k+imagenet2012/ViT-L_16.npz
    gs://vit_models/augreg/L_16-i21k-300ep-lr_0.001-aug_strong1-wd_0.1-do_0.0-sd_0.0.npz
    gs://vit_models/sam/ViT-L_16.npz
    hf://google/vit-large-patch16-{224,384}
    hf://timm/vit_large_patch16_{224.augreg_in21k,224.augreg_in21k_ft_in1k,384.augreg_in21k_ft_in1k}
ViT-H/14
    gs://vit_models/imagenet21k/ViT-H_14.npz
    hf://google/vit-huge-patch14-224-in21k
    hf://timm/vit_huge_patch14_224.orig_in21k
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
PUBLISHED = {
    name: tuple(address for short in addresses for address in expanded(short))
    for name, *addresses in map(str.split, blocks(_ADDRESSES))
}
for _name in ("R50x1", "R50x3", "R101x1", "R101x3", "R152x2", "R152x4"):
    PUBLISHED[_name] = (
        *expanded(f"gs://bit_models/{{BiT-M-{_name},BiT-M-{_name}-ILSVRC2012,BiT-S-{_name}}}.npz"),
        *expanded(f"hf://timm/resnetv2_{_name[1:]}_bit.{{goog_in21k,goog_in21k_ft_in1k}}"),
    )
"""Addresses of public weights, by the name of their network."""


def releases_of(name: str) -> list[str]:
    """Return the releases that have weights of this network."""
    addresses = PUBLISHED.get(name, ())
    return [
        release
        for start, release in RELEASES.items()
        if any(address.startswith(start) for address in addresses)
    ]


class Family(NamedTuple):
    """Pre-trained networks of one training method."""

    name: str
    addresses: tuple[str, ...]  # on the Hub, with {A,B}
    # Regular expression of Hub names, timm's models with their tag, and transformers' model types of this family alone.
    pattern: str
    use: str
    licence: str  # as the Hub names it, when this was written
    pixels: str  # preprocessing of its authors
    accuracy: str = ""  # ImageNet-1k top-1 in percent; "" if the source below was not at hand
    source: str = ""  # of the accuracy


# One block for each family: name | pattern | licence, use | pixels, accuracy | source if known, addresses.
_FAMILIES = r"""
MAE | \.mae$|vit-mae-|^vit_mae$ | cc-by-nc-4.0
    fine-tuning | short side 256 bicubic, middle 224
    fine-tuned B 83.6, L 85.9, H 86.9; linear B 68.0, L 75.8, H 76.6 | arXiv:2111.06377
    hf://timm/vit_{base_patch16,large_patch16,huge_patch14}_224.mae hf://facebook/vit-mae-{base,large,huge}
I-JEPA | ijepa | cc-by-nc-4.0
    linear probes on the mean of patches | short side 256 bicubic, middle 224
    linear H/14 79.3, H/16 at 448 81.1 | arXiv:2301.08243
    hf://timm/vit_huge_patch14_gap_224.in1k_ijepa hf://facebook/ijepa_vit{h14_1k,h14_22k,h16_1k,g16_22k}
DeiT | (^|/)deit(_\w+?_patch|-\w+?-(distilled-)?patch|$) | apache-2.0
    classification of ImageNet, small networks | short side 256 bicubic, middle 224
    supervised S 79.8, B 81.8; distilled B 83.4 | arXiv:2012.12877
    hf://timm/deit_{tiny,small,base}_patch16_224.fb_in1k hf://facebook/deit-{tiny,small,base}-patch16-224
DeiT III | (^|/)deit3_ | apache-2.0
    classification, supervised features | short side 256 bicubic, middle 224
    supervised S 81.4, B 83.8, L 84.9 (ImageNet-1k alone) | arXiv:2204.07118
    hf://timm/deit3_{small,base,large}_patch16_224.fb_in22k_ft_in1k
DINOv2 | dinov2-(small|base|large|giant)|patch14_dinov2|^dinov2$ | apache-2.0
    frozen features, k-NN, linear probes, dense tasks | short side 256 bicubic, middle 224
    k-NN S 79.0, B 82.1, L 83.5, g 83.5; linear S 81.1, B 84.5, L 86.3, g 86.5 | arXiv:2304.07193, table 4
    hf://facebook/dinov2-{small,base,large,giant} hf://timm/vit_{small,base,large,giant}_patch14_dinov2.lvd142m
DINOv2 with registers | dinov2-with-registers|reg4_dinov2|^dinov2_with_registers$ | apache-2.0
    as DINOv2, with cleaner attention pictures | short side 256 bicubic, middle 224
    k-NN S 79.1, B 82.0, L 83.8, g 83.7; linear S 80.9, B 84.6, L 86.7, g 87.1 | README of facebookresearch/dinov2
    hf://facebook/dinov2-with-registers-{small,base,large,giant} hf://timm/vit_base_patch14_reg4_dinov2.lvd142m
TIPSv2 | tipsv2 | apache-2.0
    dense features with text supervision | both sides 448 bilinear, pixels in [0, 1]
    hf://timm/vit_{base,large,so400m,giant}_patch14_reg1_tipsv2.webli hf://google/tipsv2-b14
DINOv3 | dinov3-vit|patch16_dinov3(?!_qkvb\.eupe)|^dinov3_vit$ | dinov3-license
    frozen features at any resolution, dense tasks | both sides 256 bilinear
    linear 7B 88.4 | arXiv:2508.10104
    hf://facebook/dinov3-vit{s16,s16plus,b16,l16,h16plus,7b16}-pretrain-lvd1689m
    hf://timm/vit_{small,base,large,huge_plus,7b}_patch16_dinov3.lvd1689m
EUPE | \.eupe | fair-noncommercial-research-license
    small encoders for many tasks | both sides 256 bilinear
    hf://timm/vit_{tiny,small,base}_patch16_dinov3_qkvb.eupe_lvd1689m
SigLIP | (^|/)siglip-|_siglip_\w+\.webli | apache-2.0
    fine-tuning, features that match text | both sides bicubic, pixels in [-1, 1]
    zero-shot B/16 76.2, L/16 at 256 80.5, So400m/14 82.2 | arXiv:2502.14786, table 1
    hf://google/siglip-{base-patch16-224,large-patch16-256} hf://timm/vit_base_patch16_siglip_{224,384}.webli
SigLIP 2 | siglip2-|\.v2_webli | apache-2.0
    fine-tuning, features that match text, dense tasks | both sides bicubic, pixels in [-1, 1]
    zero-shot B/16 78.2, L/16 at 256 82.5, So400m/14 83.2 | arXiv:2502.14786, table 1
    hf://google/siglip2-{base-patch16-224,large-patch16-256,so400m-patch14-224}
    hf://timm/vit_{base_patch16_siglip_224,large_patch16_siglip_256,so400m_patch14_siglip_224}.v2_webli
CLIP | openai/clip-vit|_clip_\w+\.openai | mit
    features that match text | short side bicubic, middle 224
    linear B/32 76.1, B/16 80.2, L/14 83.9, L/14 at 336 85.4 | arXiv:2103.00020, table 10
    hf://openai/clip-vit-{base-patch32,base-patch16,large-patch14} hf://timm/vit_base_patch16_clip_quickgelu_224.openai
OpenCLIP | laion/CLIP-|_clip_\w+\.laion | mit
    features that match text | short side bicubic, middle 224
    hf://timm/vit_{base_patch32,base_patch16,large_patch14,huge_patch14}_clip_224.laion2b
    hf://laion/CLIP-ViT-B-32-laion2B-s34B-b79K
DFN | apple/DFN|_clip_\w+\.dfn | apple-ascl
    features that match text | short side bicubic, middle 224
    hf://timm/vit_large_patch14_clip_quickgelu_224.dfn2b
MetaCLIP | facebook/metaclip|_clip_\w+\.metaclip | cc-by-nc-4.0
    features that match text | short side bicubic, middle 224
    hf://timm/vit_base_patch16_clip_quickgelu_224.metaclip_2pt5b hf://facebook/metaclip-b16-fullcc2.5b
EVA-02 | (^|/)eva02_ | mit
    fine-tuning at high resolution | both sides 448 bicubic
    fine-tuned Ti 80.7, S 85.8, B 88.6, L 90.0 | arXiv:2303.11331
    hf://timm/eva02_{tiny,small,base,large}_patch14_224.mim_in22k
Perception Encoder | (^|/)vit_pe_|facebook/PE- | apache-2.0
    core: features that match text; lang, spatial: dense tasks | both sides bilinear, pixels in [-1, 1]
    zero-shot (core) B 78.4, L 83.5, G 85.4 | arXiv:2504.13181
    hf://timm/vit_pe_{core_base_patch16_224,core_large_patch14_336,lang_large_patch14_448}.fb
AIMv2 | aimv2 | apple-ascl
    frozen features | short side bicubic, middle 224
    attentive probe L 86.6, H 87.5, 1B 88.1, 3B 88.5 | arXiv:2411.14402
    hf://timm/aimv2_{large,huge,1b,3b}_patch14_224.apple_pt hf://apple/aimv2-large-patch14-224
C-RADIO | _radio_v\d|nvidia/C-RADIO|^radio$ | nvidia-open-model-license
    dense tasks, features of several teachers | 512 bicubic; mean and deviation are in the file
    hf://timm/vit_{base,large,huge,giant}_patch16_radio_v3.c_radio hf://nvidia/C-RADIOv4-H
InternViT | vit_intern300m | apache-2.0
    vision tower of language models | both sides 448 bicubic
    hf://timm/vit_intern300m_patch14_448.ogvl_2pt5
"""


def _read_family(block: str) -> Family:
    lines = [line.strip() for line in block.splitlines()]
    addresses = tuple(
        address for line in lines if line.startswith("hf://") for address in line.split()
    )
    (name, pattern, licence), (use, pixels), *measured = (
        line.split(" | ") for line in lines if not line.startswith("hf://")
    )
    return Family(
        name, addresses, pattern, use, licence, pixels, *(measured[0] if measured else ())
    )


FAMILIES = tuple(map(_read_family, blocks(_FAMILIES)))
"""Current families of pre-trained ViTs that are read, with facts of their authors."""

FAMILY_HEAD = ("family", "good for", "licence", "pixels", "accuracy", "source")


def family_cells(family: Family) -> tuple[str, ...]:
    """Return the cells of a family below `FAMILY_HEAD`."""
    return (family.name, family.use, family.licence, family.pixels, family.accuracy, family.source)


def licence_of(name: str) -> str:
    """Return the licence of the family of a Hub name, a timm model with its tag, or a model type of transformers.

    "" if no or several families have it.
    """
    licences = {family.licence for family in FAMILIES if name and re.search(family.pattern, name)}
    return licences.pop() if len(licences) == 1 else ""
