"""Names in the authors' files of CLIP, PE, AIMv2, DINOv3, C-RADIO, DINOv2, Franca and TIPSv2, renamed to timm's names.

Layouts stay as they are in the file: `timm.Style` has them. Text towers and arrays of pre-training are ignored.
"""

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from vit_jax.weights.names.entry import invert


class Original(NamedTuple):
    """Names of a family in its own code."""

    mark: str  # a name that only this family has, below the prefix; "" for other files, as timm's
    renames: Mapping[str, str]  # regular expression → replacement, in this order; all matches apply
    prefixes: tuple[str, ...] = (
        "",
    )  # of the network's names, the first of these; other names are ignored
    ignored: str = r"(?!)"


ORIGINALS = (
    Original(
        "conv1.weight",
        {
            r"^conv1\.": "patch_embed.proj.",
            r"^class_embedding$": "cls_token",
            r"^positional_embedding$": "pos_embed",
            r"^ln_pre\.": "norm_pre.",
            r"^ln_post\.": "norm.",
            r"^attn_pool\.attn\.in_proj_": "attn_pool.qkv.",
            r"^attn_pool\.attn\.": "attn_pool.",
            r"^attn_pool\.layernorm\.": "attn_pool.norm.",
            r"^attn_pool\.probe$": "attn_pool.latent",
            r"out_proj\.": "proj.",
            r"\.ls_(\d)\.gamma$": r".gamma_\1",
            r"^transformer\.resblocks\.": "blocks.",
            r"\.ln_(\d)\.": r".norm\1.",
            r"\.attn\.in_proj_": ".attn.qkv.",
            r"\.mlp\.c_fc\.": ".mlp.fc1.",
            r"\.mlp\.c_proj\.": ".mlp.fc2.",
        },
        prefixes=("visual.", ""),
    ),
    Original(
        "preprocessor.patchifier.proj.weight",
        {
            r"^preprocessor\.patchifier\.": "patch_embed.",
            r"^preprocessor\.pos_embed$": "pos_embed",
            r"^trunk\.(post_trunk_)?": "",
            r"\.norm_(\d)\.": r".norm\1.",
            r"\.mlp\.fc1\.": ".mlp.fc1_g.",
            r"\.mlp\.fc3\.": ".mlp.fc1_x.",
        },
    ),
    Original(
        "storage_tokens",
        {
            r"^storage_tokens$": "reg_token",
            r"\.ls(\d)\.gamma$": r".gamma_\1",
            r"\.mlp\.w1\.": ".mlp.fc1_g.",
            r"\.mlp\.w2\.": ".mlp.fc1_x.",
            r"\.mlp\.w3\.": ".mlp.fc2.",
        },
        ignored=r"mask_token$|rope_embed\.|local_cls_norm\.|projectors\.|.*\.bias_mask$",
    ),
    Original(
        "patch_generator.embedder.weight",
        {
            r"^patch_generator\.embedder\.": "patch_embed.proj.",
            r"^patch_generator\.pos_embed$": "pos_embed",
            r"^patch_generator\.cls_token\.token$": "cls_token",
            r"\.grandma$": ".gamma",
            r"\.layer_scale(\d)\.lambda1$": r".ls\1.gamma",
        },
        prefixes=("radio_model.model.",),
        ignored=r"patch_generator\.video_embedder\.",
    ),
    Original(
        "",
        {
            r"^vision_encoder\.": "",
            r"^blocks\.\d+\.(\d+\.)": r"blocks.\1",  # blocks in chunks count through
            r"(?<=\.mlp\.)(w12|c_fc)\.": "fc1.",
            r"(?<=\.mlp\.)(w3|c_proj)\.": "fc2.",
            r"^register_tokens$": "reg_token",
        },
        ignored=r"text_encoder\.|(vision_encoder\.)?mask_token$|temperature$",
    ),
)


def canonical(names: Iterable[str]) -> dict[str, str]:
    """Return timm's names → names in the file; ValueError if two arrays get the same name."""
    names = set(names)
    prefix, original = next(
        (prefix, one)
        for one in ORIGINALS
        for prefix in one.prefixes
        if not one.mark or f"{prefix}{one.mark}" in names
    )
    renamed = {}
    for name in names:
        new = name.removeprefix(prefix)
        if name.startswith(prefix) and not re.match(original.ignored, new):
            for pattern, replacement in original.renames.items():
                new = re.sub(pattern, replacement, new)
            renamed[name] = new
    return invert(renamed)
