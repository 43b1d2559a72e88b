"""Names of Hugging Face's ViTForImageClassification and ViTModel (.safetensors).

Files carry the classic names; newer versions of the library use shorter ones in memory, which are read too.
"""

import re
from collections.abc import Iterable, Mapping

from vit_jax.weights.names.entry import Facts, Rule, classes_of, count, invert, pytorch_rules, shape_of
from vit_jax.weights.names.ours import Shape

PATCHES = "vit.embeddings.patch_embeddings.projection"
POOLER = "vit.pooler.dense"
_CLASSIC = {  # newer → classic, below a layer
    "attention.q_proj": "attention.attention.query",
    "attention.k_proj": "attention.attention.key",
    "attention.v_proj": "attention.attention.value",
    "attention.o_proj": "attention.output.dense",
    "mlp.fc1": "intermediate.dense",
    "mlp.fc2": "output.dense",
}


def rules() -> list[Rule]:
    """The names of ViTs with a class token and learned positions."""
    block, theirs = r"encoder/blocks/(\d+)", r"vit.encoder.layer.\1"
    layers = {
        "embedding": PATCHES,
        f"{block}/attention_norm": f"{theirs}.layernorm_before",
        f"{block}/attention/(query|key|value)": rf"{theirs}.attention.attention.\2",
        f"{block}/attention/out": f"{theirs}.attention.output.dense",
        f"{block}/mlp_norm": f"{theirs}.layernorm_after",
        f"{block}/mlp/expand": f"{theirs}.intermediate.dense",
        f"{block}/mlp/contract": f"{theirs}.output.dense",
        "encoder/norm": "vit.layernorm",
        "head/hidden": POOLER,
        "head/linear": "classifier",
    }
    tokens = [Rule("class_token", "vit.embeddings.cls_token")]
    return [*tokens, Rule("positions/table", "vit.embeddings.position_embeddings"), *pytorch_rules(layers)]


def canonical(names: Iterable[str]) -> dict[str, str] | None:
    """Classic names → names in the file; None where the file is of another format.

    A pooler beside a classifier is left out: the library's classifier does not see it.
    """
    classic = {name: _classic_name(name) for name in names}
    if f"{PATCHES}.weight" not in classic.values():
        return None
    found = invert(classic)
    has_classifier = "classifier.weight" in found
    return {name: given for name, given in found.items() if not (has_classifier and name.startswith(POOLER))}


def _classic_name(name: str) -> str:
    name = name if name.startswith(("vit.", "classifier.")) else f"vit.{name}"
    match = re.fullmatch(r"vit\.layers\.(\d+)\.(.+)\.(\w+)", name)
    return f"vit.encoder.layer.{match[1]}.{_CLASSIC.get(match[2], match[2])}.{match[3]}" if match else name


def facts(shapes: Mapping[str, Shape]) -> Facts:
    """What the file determines; not the number of heads. ValueError as for `shape_of`."""
    width, _, height, patch_width = shape_of(shapes, f"{PATCHES}.weight", 4)
    return Facts(
        patch_size=(height, patch_width),
        width=width,
        depth=count(shapes, r"vit\.encoder\.layer\.(\d+)\."),
        mlp_dim=shape_of(shapes, "vit.encoder.layer.0.intermediate.dense.weight", 2)[0],
        num_heads=None,
        pool="token",
        head="mlp" if f"{POOLER}.weight" in shapes else "linear",
        num_classes=classes_of(shapes, "classifier.weight", 0, "classifier.bias"),
        position_rows=shape_of(shapes, "vit.embeddings.position_embeddings", 3)[1],
        class_rows=(1,),
        defaults={"gelu": "exact", "layer_norm_epsilon": 1e-12},
    )
