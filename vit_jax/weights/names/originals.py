"""Names of the authors' own files of CLIP, AIMv2 and DINOv3 (.safetensors), as renames onto timm's names.

Layouts stay as they are in the file: `timm.Style` has them. Text towers and arrays of pre-training are ignored.
"""

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from vit_jax.weights.names.entry import invert


class Original(NamedTuple):
    """Names of a family in its own code."""

    mark: str  # a name that only this family has
    renames: Mapping[str, str]  # regular expression → what takes its place, in this order; all that match
    network: str = ""  # prefix of the network's names; other names are ignored
    ignored: str = r"(?!)"


ORIGINALS = (
    Original(
        "visual.transformer.resblocks.0.ln_1.weight",
        {
            r"^conv1\.": "patch_embed.proj.",
            r"^class_embedding$": "cls_token",
            r"^positional_embedding$": "pos_embed",
            r"^ln_pre\.": "norm_pre.",
            r"^ln_post\.": "norm.",
            r"^transformer\.resblocks\.": "blocks.",
            r"\.ln_(\d)\.": r".norm\1.",
            r"\.attn\.in_proj_": ".attn.qkv.",
            r"\.attn\.out_proj\.": ".attn.proj.",
            r"\.mlp\.c_fc\.": ".mlp.fc1.",
            r"\.mlp\.c_proj\.": ".mlp.fc2.",
        },
        network="visual.",
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
)


def canonical(names: Iterable[str]) -> dict[str, str] | None:
    """Return timm's names → names in the file; None for a file of another format."""
    names = set(names)
    original = next((original for original in ORIGINALS if original.mark in names), None)
    if original is None:
        return None
    found = {}
    for name in names:
        new = name.removeprefix(original.network)
        if name.startswith(original.network) and not re.match(original.ignored, new):
            for pattern, replacement in original.renames.items():
                new = re.sub(pattern, replacement, new)
            found[name] = new
    return invert(found)
