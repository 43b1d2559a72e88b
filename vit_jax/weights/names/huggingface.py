"""Names of Hugging Face's vision transformers (.safetensors), by class of the library.

ViT has the names that MAE, I-JEPA and DeiT share. Files carry the classic names; newer versions of the library use
shorter ones in memory, which are read too. Text towers, decoders of pre-training and mask tokens are ignored.
"""

import dataclasses
import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np

from vit_jax.config.architecture import Architecture
from vit_jax.weights.folding import Normalisation
from vit_jax.weights.names import timm, tokens
from vit_jax.weights.names.entry import QKV, Rule, invert, pytorch_rules, transformer_rules
from vit_jax.weights.names.facts import Facts, classes_of, vit_facts
from vit_jax.weights.names.library_classes import huggingface_model
from vit_jax.weights.names.ours import Shape

POOLER = "vit.pooler.dense"
_CLASSIC = {  # newer → classic, below a layer
    **{f"attention.{ours[0]}_proj": f"attention.attention.{ours}" for ours in QKV},
    "attention.o_proj": "attention.output.dense",
}
_CLASSIC_VIT = {**_CLASSIC, "mlp.fc1": "intermediate.dense", "mlp.fc2": "output.dense"}


class Family(NamedTuple):
    """Names that some classes of the library share."""

    prefixes: tuple[str, ...]  # of the network in a file; the first is used in names here
    patches: str  # a name by which files are recognised, with one of a block
    block: str  # beginning of the names of a block
    layers: Mapping[str, str]  # ours → theirs; names that begin with a dot are in a block
    arrays: Mapping[str, str] = {}  # the same for single arrays
    layouts: Mapping[str, str] = {}  # of single arrays
    newer: Mapping[str, str] = {}  # newer → classic names, below a layer
    ignored: str = r"(?!)"  # names that are not part of the network


_TOKENS = {
    "class_token": "embeddings.cls_token",
    "register_tokens": "embeddings.register_tokens",
    "positions/table": "embeddings.position_embeddings",
}
_ATTENTION = {
    **{f".attention/{ours}": f".attention.attention.{ours}" for ours in QKV},
    ".attention/out": ".attention.output.dense",
}
_SCALES = {".attention_scale": ".layer_scale1.lambda1", ".mlp_scale": ".layer_scale2.lambda1"}
_PROJECTIONS = {f".attention/{ours}": f".attention.{ours[0]}_proj" for ours in QKV}
_GATED = {".mlp/gate": "gate_proj", ".mlp/expand": "up_proj", ".mlp/contract": "down_proj"}
_TWO_LAYERS = {".mlp/expand": ".mlp.fc1", ".mlp/contract": ".mlp.fc2"}
_NORMS = {".attention_norm": ".norm1", ".mlp_norm": ".norm2"}
FAMILIES = {
    "vit": Family(
        ("vit.", "", "deit.", "ijepa."),
        "embeddings.patch_embeddings.projection",
        "encoder.layer.",
        {
            **_ATTENTION,
            ".attention_norm": ".layernorm_before",
            ".mlp_norm": ".layernorm_after",
            ".mlp/expand": ".intermediate.dense",
            ".mlp/contract": ".output.dense",
            "encoder/norm": "layernorm",
            "head/hidden": "pooler.dense",
        },
        _TOKENS,
        newer=_CLASSIC_VIT,
        ignored=r"decoder\.|(embeddings\.)?mask_token$",
    ),
    "dinov2": Family(
        ("", "dinov2.", "dinov2_with_registers."),
        "embeddings.patch_embeddings.projection",
        "encoder.layer.",
        {
            **_ATTENTION,
            **_NORMS,
            **_TWO_LAYERS,
            ".mlp/gate": ".mlp.weights_in",
            "encoder/norm": "layernorm",
        },
        {**_TOKENS, **_SCALES},
        newer=_CLASSIC,
        ignored=r"embeddings\.mask_token$",
    ),
    "dinov3": Family(
        ("",),
        "embeddings.patch_embeddings",
        "layer.",
        {
            **_NORMS,
            **_PROJECTIONS,
            ".attention/out": ".attention.o_proj",
            **{ours: f".mlp.{theirs}" for ours, theirs in _GATED.items()},
            "encoder/norm": "norm",
        },
        {**_TOKENS, **_SCALES},
        ignored=r"embeddings\.mask_token$",
    ),
    "clip": Family(
        ("vision_model.", "", "vision_model.vision_model."),
        "embeddings.patch_embedding",
        "encoder.layers.",
        {
            "embedding_norm": "pre_layrnorm",
            ".attention_norm": ".layer_norm1",
            **{
                ours: theirs.replace(".attention.", ".self_attn.")
                for ours, theirs in _PROJECTIONS.items()
            },
            ".attention/out": ".self_attn.out_proj",
            ".mlp_norm": ".layer_norm2",
            **_TWO_LAYERS,
            "encoder/norm": "post_layernorm",
            "pooling/attention/out": "head.attention.out_proj",
            "pooling/norm": "head.layernorm",
            "pooling/mlp/expand": "head.mlp.fc1",
            "pooling/mlp/contract": "head.mlp.fc2",
        },
        {
            "class_token": "embeddings.class_embedding",
            "positions/table": "embeddings.position_embedding.weight",
            "pooling/probe": "head.probe",
            "pooling/attention/(?:query|key|value)/kernel": "head.attention.in_proj_weight",
            "pooling/attention/(?:query|key|value)/bias": "head.attention.in_proj_bias",
        },
        {
            "class_token": "abD->(abD)",
            "positions/table": "aSD->(aS)D",
            "pooling/attention/(?:query|key|value)/kernel": "DTh->(Th)D",
            "pooling/attention/(?:query|key|value)/bias": "Th->(Th)",
        },
        ignored=r"text_model\.|text_projection|logit_(scale|bias)$|.*\.position_ids$",
    ),
    "aimv2": Family(
        ("", "vision_model."),
        "embeddings.patch_embed",
        "encoder.layers.",
        {
            "embedding_norm": "embeddings.rms_norm",
            ".attention_norm": ".rms_norm1",
            **_PROJECTIONS,
            ".attention/out": ".attention.out_proj",
            ".mlp_norm": ".rms_norm2",
            **{ours: f".ffn.{theirs}" for ours, theirs in _GATED.items()},
            "encoder/norm": "rms_norm",
        },
        {"positions/table": "embeddings.position_embedding.weight"},
        {"positions/table": "aSD->(aS)D"},
        ignored=r"text_model\.|(text|visual)_projection\.|logit_scale$|.*\.position_ids$",
    ),
}


def rules(
    family: str, *, prefix: str = "", is_packed: bool = False, distilled: str = ""
) -> list[Rule]:
    """Return the names of a family, with the prefix of the network and our name of a distillation token.

    With `is_packed` gate and hidden layer of the MLP are one array.
    """
    names = FAMILIES[family]
    layers = {"embedding": names.patches, **names.layers}
    if is_packed:
        layers |= {".mlp/expand": layers[".mlp/gate"], ".mlp/contract": ".mlp.weights_out"}
    arrays = {**names.arrays, **({distilled: "embeddings.distillation_token"} if distilled else {})}
    head = {"head/linear": "visual_projection" if family == "clip" else "classifier"}
    if distilled == "distillation_token":
        head = {"head/linear": "cls_classifier", "head/distillation": "distillation_classifier"}
    return [
        *transformer_rules(names.block, layers, arrays, names.layouts, prefix),
        *pytorch_rules(head),
    ]


def family_of(shapes: Mapping[str, Shape] | Iterable[str]) -> str | None:
    """Return the family whose names, with its first prefix, a file has."""
    names = set(shapes)
    for family, table in FAMILIES.items():
        prefix = table.prefixes[0]
        norm = table.layers[".attention_norm"]
        if {f"{prefix}{table.patches}.weight", f"{prefix}{table.block}0{norm}.weight"} <= names:
            return family
    return None


def rules_of(a: Architecture, shapes: Mapping[str, Shape]) -> list[Rule]:
    """Return the names of a file, or without shapes of the class for a network."""
    if family := family_of(shapes):
        return _rules_of_file(family, shapes)
    model = huggingface_model(a)
    if model.family == "radio":
        return [rule._replace(name=tokens.own_name(str(rule.name))) for rule in timm.radio_rules()]
    token = (
        "distillation_token"
        if a.num_class_tokens == 2
        else "register_tokens"
        if model.model_type == "deit"
        else ""
    )
    # ViT and CLIP's vision tower have the prefix without a classifier too.
    prefix = (
        model.prefix if a.num_classes or model.model_type in ("vit", "clip_vision_model") else ""
    )
    is_packed = model.family == "dinov2" and a.mlp == "swiglu"
    return rules(model.family, prefix=prefix, is_packed=is_packed, distilled=token)


def added(a: Architecture, normalisation: Normalisation) -> dict[str, np.ndarray]:
    """Return arrays of the library's class that hold no parameter of ours: mask tokens, C-RADIO's normalisation."""
    model = huggingface_model(a)
    if model.family == "radio":
        return tokens.added(a, normalisation)
    prefix = model.prefix if a.num_classes else ""
    masks: dict[str, Shape] = {"dinov2_with_registers": (1, a.width), "dinov3_vit": (1, 1, a.width)}
    shape = masks.get(model.model_type)
    return {} if shape is None else {f"{prefix}embeddings.mask_token": np.zeros(shape, np.float32)}


def _rules_of_file(family: str, shapes: Mapping[str, Shape]) -> list[Rule]:
    is_packed = family == "dinov2" and "encoder.layer.0.mlp.weights_in.weight" in shapes
    prefix = FAMILIES[family].prefixes[0]
    return rules(family, prefix=prefix, is_packed=is_packed, distilled=_distillation(shapes))


def _distillation(shapes: Mapping[str, Shape]) -> str:
    """Return our name of a distillation token; "" without one. One that no head reads is a register."""
    if "vit.embeddings.distillation_token" not in shapes:
        return ""
    return "distillation_token" if "distillation_classifier.weight" in shapes else "register_tokens"


def canonical(names: Iterable[str]) -> dict[str, str] | None:
    """Return classic names → names in the file; None where the file is of another format.

    A pooler beside a classifier is left out: the library's classifier does not see it.
    """
    names = set(names)
    for family, table in FAMILIES.items():
        for prefix in table.prefixes:
            classic = {name: _classic_name(name, table, prefix) for name in names}
            kept = {name: new for name, new in classic.items() if not re.match(table.ignored, new)}
            if family_of(kept.values()) == family:
                inverse = invert(kept)
                has_classifier = "classifier.weight" in inverse
                return {
                    new: old
                    for new, old in inverse.items()
                    if not (has_classifier and new.startswith(POOLER))
                }
    return None


def find_names(names: Iterable[str], in_file: Iterable[str]) -> dict[str, str]:
    """Return names that the library has in memory → names in a file, for those that the file has."""
    names = list(names)
    classic_names = canonical(in_file)
    if classic_names is None:
        return {}
    table = FAMILIES[str(family_of(classic_names))]
    best: dict[str, str] = {}
    for prefix in table.prefixes:
        found = {}
        for name in names:
            classic = _classic_name(name, table, prefix)
            if classic in classic_names:
                found[name] = classic_names[classic]
        best = max(best, found, key=len)
    return best


def _classic_name(name: str, table: Family, prefix: str) -> str:
    if not name.startswith(prefix) or name.startswith(("classifier.", "visual_projection.")):
        return name
    name = name.removeprefix(prefix)
    if re.match(table.ignored, name):
        return name
    match = (
        re.fullmatch(r"(?:model\.|encoder\.)?layers?\.(\d+)\.(.+)\.(\w+)", name)
        if table.block != "encoder.layers."
        else None
    )
    if match:
        name = f"{table.block}{match[1]}.{table.newer.get(match[2], match[2])}.{match[3]}"
    return f"{table.prefixes[0]}{name}"


def facts(shapes: Mapping[str, Shape]) -> Facts:
    """Return the facts of a file; not the number of heads. ValueError as for `shape_of`."""
    family = family_of(shapes)
    assert family is not None
    distilled = _distillation(shapes)
    head = "cls_classifier" if distilled == "distillation_token" else "classifier"
    head = "visual_projection" if family == "clip" else head
    epsilon = {"vit": 1e-12, "dinov3": 1e-5, "aimv2": 1e-5}.get(family, 1e-6)
    vit = vit_facts(
        shapes,
        _rules_of_file(family, shapes),
        num_classes=classes_of(shapes, f"{head}.weight", 0, f"{head}.bias"),
        head="mlp" if f"{POOLER}.weight" in shapes else "linear",
        fixed_positions="none" if family == "dinov3" else "sincos2d",
        defaults={"gelu": "exact", "layer_norm_epsilon": epsilon},
    )
    width = shapes.get(f"{head}.weight", (0, 0))[-1]
    pool = "token_gap" if family == "dinov2" and width == 2 * vit.width else vit.pool
    absent = frozenset(["head/linear/bias"]) if family == "clip" else frozenset[str]()
    modern_options = vit.modern_options | (
        {"embedding_norm": "patches"} if family == "aimv2" else {}
    )
    return dataclasses.replace(vit, pool=pool, absent=absent, modern_options=modern_options)
