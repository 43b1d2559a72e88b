"""Configurations that timm and Hugging Face read beside weights, so that they build the network themselves."""

import json
import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from vit_jax.config.architecture import Architecture
from vit_jax.config.sizes import RESNET_UNITS
from vit_jax.storage.files import write_atomically
from vit_jax.weights.folding import Normalisation, stored_normalisation
from vit_jax.weights.names.library_classes import (
    huggingface_class,
    huggingface_model,
    is_eva,
    timm_model,
    whole_ratio,
)
from vit_jax.weights.sidecar import (
    CONFIG,
    HUGGINGFACE_SIZES,
    MULTI_LABEL,
    POOLS,
    PREPROCESSOR,
    SINGLE_LABEL,
    TIMM_SIZES,
)

_TIMM_HYBRIDS: dict[tuple[int, ...], str] = {
    (): "vit_tiny_r_s16_p8_224",
    (2, 2, 2, 2): "vit_small_r26_s32_224",
    (3, 4, 9): "vit_base_r50_s16_224",
    (3, 4, 6, 3): "vit_large_r50_s32_224",
}
_TIMM_RESNETS: dict[tuple[tuple[int, ...], float], str] = {
    (RESNET_UNITS[depth], factor): f"resnetv2_{depth}x{factor}_bit"
    for depth, factor in ((50, 1), (50, 3), (101, 1), (101, 3), (152, 2), (152, 4))
}
_TIMM_POOLS = {ours: theirs for theirs, ours in POOLS.items()}
_TIMM_ACTIVATIONS = {"exact": "gelu", "tanh": "gelu_tanh", "quick": "quick_gelu"}
_ACTIVATIONS = {
    "exact": "gelu",
    "tanh": "gelu_pytorch_tanh",
    "quick": "quick_gelu",
}  # of transformers


def write_library_config(
    folder: pathlib.Path,
    format_name: str,
    a: Architecture,
    class_names: Sequence[str] | None,
    preprocessing: Mapping[str, object] | None,
    *,
    is_multilabel: bool = False,
) -> tuple[str, ...]:
    """Write the configuration of a network whose weights are in `folder`; return notes for the report.

    A configuration of other weights is replaced or removed. Unknown preprocessing is not written, so that readers of
    the folder choose it instead of trusting a guess.
    """
    is_timm = format_name == "timm"
    config = (timm_config if is_timm else huggingface_config)(a, class_names, preprocessing)
    if config is not None and a.num_classes:  # timm ignores the field; we read it again
        config["problem_type"] = MULTI_LABEL if is_multilabel else SINGLE_LABEL
    processor = _huggingface_processor(a, preprocessing) if preprocessing and not is_timm else None
    for path, value in ((folder / CONFIG, config), (folder / PREPROCESSOR, processor)):
        if value is None:
            path.unlink(missing_ok=True)
        else:
            write_atomically(path, json.dumps(value, indent=2) + "\n")
    if config is None:
        return (
            f"timm has no model with the ResNet of {a.name}, so there is no {CONFIG}: build the network yourself.",
        )
    notes = []
    if not (is_timm or a.num_classes or a.pool in ("token", "map")):
        notes.append(
            f"Its class in transformers does not pool by {a.pool}: take last_hidden_state."
        )
    if not is_known(preprocessing):
        where = f"{CONFIG} does not state it" if is_timm else f"there is no {PREPROCESSOR}"
        notes.append(
            f"How images were resized and cropped for this network is not known, so {where}."
        )
    elif (
        preprocessing
        and processor
        and preprocessing["crop_fraction"] != 1.0
        and "crop_size" not in processor
    ):
        notes.append(
            "Hugging Face's processor resizes the full image; this network was tested on central crops."
        )
    return tuple(notes)


def is_known(preprocessing: Mapping[str, object] | None) -> bool:
    """Return True if it is stated how images are resized and cropped."""
    return {"resize", "crop_fraction"} <= (preprocessing or {}).keys()


def huggingface_config(
    a: Architecture, class_names: Sequence[str] | None, preprocessing: Mapping[str, object] | None
) -> dict[str, object]:
    """Return the `config.json` of the class of transformers that computes a ViT."""
    labels = list(class_names or [f"LABEL_{number}" for number in range(a.num_classes)])
    model = huggingface_model(a)
    arguments = _huggingface_arguments(a, model.model_type, stored_normalisation(preprocessing))
    return {
        "architectures": [huggingface_class(a)],
        "model_type": model.model_type,
        "image_size": _one_or_two(a.image_size),
        "patch_size": _one_or_two(a.patch_size),
        "num_channels": 3,
        **{
            theirs: getattr(a, ours)
            for ours, theirs in HUGGINGFACE_SIZES.items()
            if ours != "mlp_dim"
        },
        "hidden_act": "silu"
        if a.mlp == "swiglu" and model.family != "dinov2"
        else _ACTIVATIONS[a.gelu],
        "rms_norm_eps" if a.norm == "rms" else "layer_norm_eps": a.layer_norm_epsilon,
        **({} if "mlp_ratio" in arguments else {HUGGINGFACE_SIZES["mlp_dim"]: a.mlp_dim}),
        **arguments,
        "id2label": {str(number): label for number, label in enumerate(labels)},
        "label2id": {label: number for number, label in enumerate(labels)},
    }


def _huggingface_arguments(
    a: Architecture, model_type: str, pixels: Normalisation
) -> dict[str, object]:
    """Return the arguments of a class that not all classes have; "mlp_ratio" replaces the width of the MLP."""
    has_qkv_bias = a.qkv_bias == "all"
    match model_type:
        case "dinov2" | "dinov2_with_registers":
            sizes: dict[str, object] = {
                "mlp_ratio": whole_ratio(a),
                "use_swiglu_ffn": a.mlp == "swiglu",
                "qkv_bias": has_qkv_bias,
            }
            tokens = (
                {"use_mask_token": False}
                if model_type == "dinov2"
                else {"num_register_tokens": a.registers}
            )
            return sizes | tokens
        case "dinov3_vit":
            biases = {
                "query_bias": a.qkv_bias != "none",
                "key_bias": has_qkv_bias,
                "value_bias": a.qkv_bias != "none",
            }
            biases |= {"proj_bias": a.linear_bias, "mlp_bias": a.linear_bias}
            return {
                "use_gated_mlp": a.mlp == "swiglu",
                "num_register_tokens": a.registers,
                **biases,
            }
        case "clip_vision_model":
            return {"projection_dim": a.num_classes or a.width}
        case "siglip_vision_model":
            return {}
        case "aimv2_vision_model":
            return {"qkv_bias": False, "mlp_bias": False, "use_head": False}
        case "radio":
            tokens = {"num_cls_tokens": a.num_class_tokens, "num_registers": a.registers}
            numbers = {
                "summary_idxs": [*range(a.num_class_tokens)],
                "max_img_size": a.image_size[0],
            }
            sizes = {"mlp_ratio": a.mlp_dim / a.width, "qkv_bias": has_qkv_bias}
            return {
                **tokens,
                **numbers,
                **sizes,
                "norm_mean": [*pixels.mean],
                "norm_std": [*pixels.std],
            }
    return {
        "qkv_bias": has_qkv_bias,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    }


def _huggingface_processor(
    a: Architecture, preprocessing: Mapping[str, Any]
) -> dict[str, object] | None:
    """Return the `preprocessor_config.json` of known preprocessing; None for other."""
    if not is_known(preprocessing):
        return None
    height, width = a.image_size
    pixels = stored_normalisation(preprocessing)
    is_cropped = preprocessing["resize"] == "short_side" and height == width
    edge = math.floor(height / preprocessing["crop_fraction"])
    return {
        # Both take pixels as Pillow resizes them; the first can crop.
        "image_processor_type": "BitImageProcessor" if is_cropped else "ViTImageProcessor",
        "do_resize": True,
        "size": {"shortest_edge": edge} if is_cropped else {"height": height, "width": width},
        **(
            {"do_center_crop": True, "crop_size": {"height": height, "width": width}}
            if is_cropped
            else {}
        ),
        "resample": 3
        if preprocessing.get("interpolation") == "bicubic"
        else 2,  # Pillow's numbers; 2 is bilinear
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": huggingface_model(a).family != "radio",  # which does it in the network
        "image_mean": [*pixels.mean],
        "image_std": [*pixels.std],
    }


def timm_config(
    a: Architecture, class_names: Sequence[str] | None, preprocessing: Mapping[str, object] | None
) -> dict[str, object] | None:
    """Return the `config.json` of a model that timm knows by name, with every number; None if timm has none."""
    name: str | None
    if a.family == "resnet":
        name = _TIMM_RESNETS.get((a.units, a.width_factor))
        arguments = {}
    elif a.family == "hybrid":
        name = _TIMM_HYBRIDS.get(a.units) if a.width_factor == 1 else None
        arguments = _timm_arguments(a)
    else:
        name = timm_model(a).name
        arguments = _timm_arguments(a) | _timm_component_arguments(a)
    if name is None:
        return None
    pixels = stored_normalisation(preprocessing if a.family == "vit" else None)
    pretrained: dict[str, object] = {
        "input_size": [3, *a.image_size],
        "mean": [*pixels.mean],
        "std": [*pixels.std],
    }
    pretrained["num_classes"] = a.num_classes
    if preprocessing and is_known(preprocessing):
        pretrained["interpolation"] = preprocessing.get("interpolation") or "bilinear"
        pretrained["crop_pct"] = preprocessing["crop_fraction"]
        pretrained["crop_mode"] = "squash" if preprocessing["resize"] == "direct" else "center"
    return {
        "architecture": name,
        "num_classes": a.num_classes,
        "num_features": a.width,
        "model_args": arguments,
        "pretrained_cfg": pretrained,
        **({} if class_names is None else {"label_names": list(class_names)}),
        **({"global_pool": _TIMM_POOLS[a.pool]} if a.has_transformer else {}),
    }


def _timm_component_arguments(a: Architecture) -> dict[str, object]:
    """Return the arguments of timm's classes for parts that the paper's ViT does not have."""
    common: dict[str, object] = {"init_values": a.layer_scale, "qkv_bias": a.qkv_bias != "none"}
    if not is_eva(a):
        return common | {
            "reg_tokens": a.registers,
            "pre_norm": a.embedding_norm == "tokens",
            "final_norm": a.final_norm != "none",
            "fc_norm": a.final_norm == "pooled",
            "proj_bias": a.linear_bias,
            **({"pool_include_prefix": True} if a.pool == "map" and a.prefix_length else {}),
            **({"embed_norm_layer": None} if a.norm == "rms" and a.embedding_norm is None else {}),
        }
    counted = list(a.rope_grid or a.grid)
    reference = {
        None: {},
        "centred": {},
        "grid": {"ref_feat_shape": [16, 16]},
        "index": {"ref_feat_shape": counted},
    }
    pool = {
        "attn_pool_num_heads": a.pool_num_heads or a.num_heads,
        "attn_pool_mlp_ratio": _ratio(a),
    }
    return common | {
        "num_reg_tokens": a.registers,
        "qkv_fused": a.mlp != "swiglu_norm",
        "swiglu_mlp": a.mlp != "gelu",
        "swiglu_align_to": int(a.rope == "centred"),  # not 0 gives gate and value one array each
        "scale_mlp": a.mlp == "swiglu_norm",
        "scale_attn_inner": a.attention_norm,
        "use_abs_pos_emb": a.position_embedding != "none",
        "use_post_transformer_norm": a.final_norm == "tokens",
        "use_fc_norm": a.final_norm == "pooled",
        **reference[a.rope],
        **(pool if a.pool == "map" else {}),
    }


def _ratio(a: Architecture) -> float:
    """Return a ratio of MLP and width from which timm computes `mlp_dim`: it multiplies and rounds down."""
    # Packed SwiGLU of VisionTransformer counts gate and value as one. The quotient alone can end one below.
    mlp_dim = (
        2 * a.mlp_dim if a.mlp == "swiglu" and a.rope is None and a.norm == "layer" else a.mlp_dim
    )
    ratio = mlp_dim / a.width
    return ratio if int(a.width * ratio) == mlp_dim else (mlp_dim + 0.5) / a.width


def _timm_arguments(a: Architecture) -> dict[str, object]:
    plain = (
        {"pos_embed": "learn", "act_layer": _TIMM_ACTIVATIONS[a.gelu]} if a.mlp == "gelu" else {}
    )
    return {
        "img_size": list(a.image_size),
        "patch_size": _one_or_two(a.patch_size),
        **{theirs: getattr(a, ours) for ours, theirs in TIMM_SIZES.items()},
        "mlp_ratio": _ratio(a),
        "class_token": a.num_class_tokens > 0,
        **({"no_embed_class": True} if a.position_tokens == "patches" else {}),
        "global_pool": _TIMM_POOLS[a.pool],
        **({"fc_norm": False, **plain} if not is_eva(a) else {}),
    }


def _one_or_two(size: tuple[int, int]) -> int | list[int]:
    return size[0] if size[0] == size[1] else list(size)
