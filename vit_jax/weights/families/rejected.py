"""Networks that are not read, because our models do not compute a part of them.

Patterns recognise them by name or by an array of the file.
"""

from vit_jax.weights.family import Family, RejectedArrays, RejectedModels

_MODELS = (
    RejectedModels(
        "beit3_",
        "BEiT-3",
        "norms in MLPs without a gate",
    ),
    RejectedModels(
        "beit(v2)?_",
        "BEiT",
        "relative positions",
    ),
    RejectedModels(
        "cait_",
        "CaiT",
        "attention that mixes heads, and blocks for the class token alone",
    ),
    RejectedModels(
        "convit_",
        "ConViT",
        "gated positional attention",
    ),
    RejectedModels(
        "deepseek_vit_|gemma4_vit_|qwen3_vit_",
        "the image tower of a language model",
        "parts for images of any aspect ratio",
    ),
    RejectedModels(
        "vit_base_patch16_rpn_",
        "a ViT with post-norm blocks",
        "a norm behind each branch in place of before",
    ),
    RejectedModels(
        "naflexvit_",
        "a NaFlex model",
        "patches of images of any aspect ratio",
    ),
    RejectedModels(
        r"resnetv2_(?!\d+x\d_bit$)",
        "a ResNet v2 other than Big Transfer's",
        "other roots, norms or strides",
    ),
    RejectedModels(
        "samvit_",
        "SAM",
        "attention in windows, with relative positions",
    ),
    RejectedModels(
        r"vit_\w*_(xp|18x2)_|vit_d?pwee_",
        "a ViT with parallel layers",
        "several branches beside each other in a block",
    ),
    RejectedModels(
        "vit_(dlittle|dwee)_",
        "a ViT with differential attention",
        "a difference of two attentions",
    ),
    RejectedModels(
        r"vit_\w+_rope_",
        "RoPE-ViT",
        "rotary positions of other forms than DINOv3, EVA-02 and PE",
    ),
    RejectedModels(
        r"vit_\w+_sapiens2",
        "Sapiens 2",
        "fewer keys and values than queries",
    ),
    RejectedModels(
        "vit_base_mci_",
        "MobileCLIP",
        "a root of several convolutions",
    ),
    RejectedModels(
        "vit_s?relpos_|test_vit_relpos",
        "a ViT with relative positions",
        "relative positions",
    ),
    RejectedModels(
        "vit_so150m_patch16_reg4_map_",
        "a ViT with attention pooling and registers",
        "a pooling of patches without registers",
    ),
)
_ARRAYS = (
    RejectedArrays(
        r"(.*\.)?(detection_tokens|mid_position_embeddings):"
        r"|(class_labels_classifier|bbox_predictor)\.",
        "a detector (YOLOS, DETR)",
        "tokens or heads for boxes",
        "take weights for classification, such as DeiT's",
    ),
    RejectedArrays(
        r"(.*\.)?relative_position_bias\.|beit\.",
        "BEiT",
        "relative positions",
    ),
    RejectedArrays(
        r".*encoder\.(layers\.\d+\.ls1|layer\.\d+\.lambda_1):",
        "InternViT or BEiT of Hugging Face",
        "names that are not known",
        "take weights of a family that docs/pretrained.md lists, such as timm's InternViT",
    ),
    RejectedArrays(
        r".*\.[qk]_norm\.",
        "a ViT with qk-norm",
        "norms of queries and keys",
    ),
    RejectedArrays(
        r".*(relative_position|\.rel_pos[_:])",
        "Swin, BEiT or a similar network",
        "relative positions",
    ),
    RejectedArrays(
        r"blocks_token_only\.",
        "CaiT",
        "blocks for the class token alone",
    ),
    RejectedArrays(
        ".*running_mean:",
        "a network with convolutions",
        "batch norm",
    ),
    RejectedArrays(
        r".*stem\.conv1\.",
        "a ResNet of timm's (D)",
        "a root of several convolutions",
        "take Big Transfer's",
    ),
    RejectedArrays(
        r".*norm\d?\.weight_g:",
        "a network with weight norm",
        "directions and lengths of weights",
    ),
    RejectedArrays(
        r"(freqs(_t_[xy])?|(.*\.)?rope\.freqs):",
        "RoPE-ViT",
        "learned or mixed rotary frequencies",
        "take weights of a family that docs/pretrained.md lists, such as DINOv3",
    ),
    RejectedArrays(
        r".*\.(SCB|absmax|nested_absmax|quant_map|weight_format):|.*\.quant_state\."
        r"|.*weight:\d+:[iu]",
        "a quantised network",
        "integers, with scales, in place of weights",
        "take the file in float32, float16 or bfloat16",
    ),
    RejectedArrays(
        r"embeds\.proj\.weight:2|(.*/)?embedding/kernel:2"
        r"|(.*\.)?embeddings\.patch_embedding\.weight:2",
        "a NaFlex model",
        "a linear patch embedding for images of any aspect ratio",
        "take weights of SigLIP 2 for one resolution, such as google/siglip2-base-patch16-224",
    ),
)

FAMILY = Family(rejected_models=_MODELS, rejected_arrays=_ARRAYS)
