"""Configurations that timm and Hugging Face read beside weights.

With them they build the network themselves.
"""

import json
import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from vit_jax.config.architecture import Architecture
from vit_jax.storage.files import write_atomically
from vit_jax.weights.folding import read_normalisation
from vit_jax.weights.library_lookup import (
    find_huggingface_model,
    find_timm_body,
    find_timm_model,
    name_huggingface_class,
)
from vit_jax.weights.library_models import TransformersModel, is_eva
from vit_jax.weights.sidecar import (
    CONFIG,
    HUGGINGFACE_SIZES,
    MULTI_LABEL,
    POOLS,
    PREPROCESSOR,
    SINGLE_LABEL,
    TIMM_SIZES,
)

_TIMM_POOLS = {ours: theirs for theirs, ours in POOLS.items()}
_TIMM_ACTIVATIONS = {
    "exact": "gelu",
    "tanh": "gelu_tanh",
    "quick": "quick_gelu",
}
_ACTIVATIONS = {
    "exact": "gelu",
    "tanh": "gelu_pytorch_tanh",
    "quick": "quick_gelu",
}
"""GELU forms by transformers' names."""

_PILLOW_BILINEAR = 2
_PILLOW_BICUBIC = 3

Preprocessing = Mapping[str, Any]


def write_library_config(
    folder: pathlib.Path,
    format_name: str,
    a: Architecture,
    class_names: Sequence[str] | None,
    preprocessing: Preprocessing | None,
    *,
    is_multilabel: bool = False,
) -> tuple[str, ...]:
    """Write the configuration of a network into the folder of its weights; return notes.

    A configuration of other weights is replaced or removed. Unknown preprocessing is not written,
    so that readers of the folder choose it instead of trusting a guess.
    """
    config: dict[str, object] | None
    processor: dict[str, object] | None
    if format_name == "timm":
        config = build_timm_config(a, class_names, preprocessing)
        processor = None
    else:
        config = build_huggingface_config(a, class_names, preprocessing)
        processor = _build_processor_config(a, preprocessing)

    if config is not None and a.num_classes:  # timm ignores the field; we read it again
        config["problem_type"] = MULTI_LABEL if is_multilabel else SINGLE_LABEL
    _write_or_remove(folder / CONFIG, config)
    _write_or_remove(folder / PREPROCESSOR, processor)

    if config is None:
        note = (
            f"timm has no model with the ResNet of {a.name}, so there is no {CONFIG}: "
            "build the network yourself."
        )
        return (note,)
    if format_name != "timm":
        return tuple(_describe_huggingface(a, preprocessing, processor))
    if states_preparation(preprocessing):
        return ()
    return (_describe_unknown(f"{CONFIG} does not state it"),)


def _write_or_remove(path: pathlib.Path, value: Mapping[str, object] | None) -> None:
    if value is None:
        path.unlink(missing_ok=True)
        return
    text = json.dumps(value, indent=2)
    write_atomically(path, f"{text}\n")


def _describe_unknown(where: str) -> str:
    return f"How images were resized and cropped for this network is not known, so {where}."


def _describe_huggingface(
    a: Architecture,
    preprocessing: Preprocessing | None,
    processor: Mapping[str, object] | None,
) -> list[str]:
    """Return notes on differences between a network and its class and processor of transformers."""
    notes = []
    if not a.num_classes and a.pool not in ("token", "map"):
        notes.append(
            f"Its class in transformers does not pool by {a.pool}: take last_hidden_state."
        )
    if preprocessing is None or processor is None:
        notes.append(_describe_unknown(f"there is no {PREPROCESSOR}"))
    elif preprocessing["crop_fraction"] != 1.0 and "crop_size" not in processor:
        notes.append(
            "Hugging Face's processor resizes the full image; "
            "this network was tested on central crops."
        )
    return notes


def states_preparation(preprocessing: Preprocessing | None) -> bool:
    """Return True if it is stated how images are resized and cropped."""
    return preprocessing is not None and {"resize", "crop_fraction"} <= preprocessing.keys()


# transformers.


def build_huggingface_config(
    a: Architecture,
    class_names: Sequence[str] | None,
    preprocessing: Preprocessing | None,
) -> dict[str, object]:
    """Return the `config.json` of the class of transformers that computes a ViT."""
    labels = class_names or [f"LABEL_{number}" for number in range(a.num_classes)]
    model = find_huggingface_model(a)
    pixels = read_normalisation(preprocessing)
    arguments = model.arguments(a, pixels)

    config: dict[str, object] = {
        "architectures": [name_huggingface_class(a)],
        "model_type": model.model_type,
        "image_size": _shorten(a.image_size),
        "patch_size": _shorten(a.patch_size),
        "num_channels": 3,
    }
    for ours, theirs in HUGGINGFACE_SIZES.items():
        if ours != "mlp_dim":
            config[theirs] = getattr(a, ours)
    config["hidden_act"] = _name_activation(a, model)
    if a.norm == "rms":
        config["rms_norm_eps"] = a.layer_norm_epsilon
    else:
        config["layer_norm_eps"] = a.layer_norm_epsilon
    if "mlp_ratio" not in arguments:
        config[HUGGINGFACE_SIZES["mlp_dim"]] = a.mlp_dim
    config |= arguments

    config["id2label"] = {str(number): label for number, label in enumerate(labels)}
    config["label2id"] = {label: number for number, label in enumerate(labels)}
    return config


def _name_activation(a: Architecture, model: TransformersModel) -> str:
    if a.mlp == "swiglu" and model.names_silu:
        return "silu"
    return _ACTIVATIONS[a.gelu]


def _build_processor_config(
    a: Architecture,
    preprocessing: Preprocessing | None,
) -> dict[str, object] | None:
    """Return the `preprocessor_config.json` of known preprocessing; None for other."""
    if preprocessing is None or not states_preparation(preprocessing):
        return None

    pixels = read_normalisation(preprocessing)
    resample = _PILLOW_BILINEAR
    if preprocessing.get("interpolation") == "bicubic":
        resample = _PILLOW_BICUBIC
    return {
        **_describe_resizing(a, preprocessing),
        "resample": resample,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": find_huggingface_model(a).normalises_pixels,
        "image_mean": list(pixels.mean),
        "image_std": list(pixels.std),
    }


def _describe_resizing(a: Architecture, preprocessing: Preprocessing) -> dict[str, object]:
    """Return a processor that takes pixels as Pillow resizes them, with a crop if it is needed."""
    height, width = a.image_size
    size = {"height": height, "width": width}
    if preprocessing["resize"] != "short_side" or height != width:
        return {
            "image_processor_type": "ViTImageProcessor",
            "do_resize": True,
            "size": size,
        }
    edge = math.floor(height / preprocessing["crop_fraction"])
    return {
        "image_processor_type": "BitImageProcessor",
        "do_resize": True,
        "size": {"shortest_edge": edge},
        "do_center_crop": True,
        "crop_size": size,
    }


# timm.


def build_timm_config(
    a: Architecture,
    class_names: Sequence[str] | None,
    preprocessing: Preprocessing | None,
) -> dict[str, object] | None:
    """Return the `config.json` of a model that timm knows by name, with every number.

    It is None if timm has no such model.
    """
    name = find_timm_model(a).name if a.family == "vit" else find_timm_body(a)
    if name is None:
        return None

    arguments: dict[str, object] = {}
    if a.has_transformer:
        arguments |= _list_transformer_arguments(a)
    if a.family == "vit" and is_eva(a):
        arguments |= _list_eva_arguments(a)
    elif a.family == "vit":
        arguments |= _list_vit_arguments(a)

    config: dict[str, object] = {
        "architecture": name,
        "num_classes": a.num_classes,
        "num_features": a.width,
        "model_args": arguments,
        "pretrained_cfg": _build_pretrained_config(a, preprocessing),
    }
    if class_names is not None:
        config["label_names"] = list(class_names)
    if a.has_transformer:
        config["global_pool"] = _TIMM_POOLS[a.pool]
    return config


def _build_pretrained_config(
    a: Architecture, preprocessing: Preprocessing | None
) -> dict[str, object]:
    """Return the preprocessing as timm states it."""
    # Only a ViT is written for other pixels than [-1, 1].
    pixels = read_normalisation(preprocessing if a.family == "vit" else None)
    config: dict[str, object] = {
        "input_size": [3, *a.image_size],
        "mean": list(pixels.mean),
        "std": list(pixels.std),
        "num_classes": a.num_classes,
    }
    if preprocessing is not None and states_preparation(preprocessing):
        config["interpolation"] = preprocessing.get("interpolation") or "bilinear"
        config["crop_pct"] = preprocessing["crop_fraction"]
        config["crop_mode"] = "center"
        if preprocessing["resize"] == "direct":
            config["crop_mode"] = "squash"
    return config


def _list_transformer_arguments(a: Architecture) -> dict[str, object]:
    """Return the arguments that all of timm's classes with a transformer have."""
    arguments: dict[str, object] = {
        "img_size": list(a.image_size),
        "patch_size": _shorten(a.patch_size),
    }
    for ours, theirs in TIMM_SIZES.items():
        arguments[theirs] = getattr(a, ours)
    arguments["mlp_ratio"] = _compute_ratio(a)
    arguments["class_token"] = a.num_class_tokens > 0
    if a.position_tokens == "patches":
        arguments["no_embed_class"] = True
    arguments["global_pool"] = _TIMM_POOLS[a.pool]
    if is_eva(a):
        return arguments
    arguments["fc_norm"] = False
    if a.mlp == "gelu":
        arguments["pos_embed"] = "learn"
        arguments["act_layer"] = _TIMM_ACTIVATIONS[a.gelu]
    return arguments


def _list_vit_arguments(a: Architecture) -> dict[str, object]:
    """Return the arguments of timm's VisionTransformer for parts beyond the paper's ViT."""
    arguments: dict[str, object] = {
        "init_values": a.layer_scale,
        "qkv_bias": a.qkv_bias != "none",
        "reg_tokens": a.registers,
        "pre_norm": a.embedding_norm == "tokens",
        "final_norm": a.final_norm != "none",
        "fc_norm": a.final_norm == "pooled",
        "proj_bias": a.linear_bias,
    }
    if a.pool == "map" and a.prefix_length:
        arguments["pool_include_prefix"] = True
    if a.norm == "rms" and a.embedding_norm is None:
        arguments["embed_norm_layer"] = None
    return arguments


def _list_eva_arguments(a: Architecture) -> dict[str, object]:
    """Return the arguments of timm's Eva for parts beyond the paper's ViT."""
    arguments: dict[str, object] = {
        "init_values": a.layer_scale,
        "qkv_bias": a.qkv_bias != "none",
        "num_reg_tokens": a.registers,
        "qkv_fused": a.mlp != "swiglu_norm",
        "swiglu_mlp": a.mlp != "gelu",
        "swiglu_align_to": int(a.rope == "centred"),  # not 0 gives gate and value one array each
        "scale_mlp": a.mlp == "swiglu_norm",
        "scale_attn_inner": a.attention_norm,
        "use_abs_pos_emb": a.position_embedding != "none",
        "use_post_transformer_norm": a.final_norm == "tokens",
        "use_fc_norm": a.final_norm == "pooled",
    }
    if a.rope == "grid":
        arguments["ref_feat_shape"] = [16, 16]
    if a.rope == "index":
        arguments["ref_feat_shape"] = list(a.rope_grid or a.grid)
    if a.pool == "map":
        arguments["attn_pool_num_heads"] = a.pool_num_heads or a.num_heads
        arguments["attn_pool_mlp_ratio"] = _compute_ratio(a)
    return arguments


def _compute_ratio(a: Architecture) -> float:
    """Return a ratio of MLP and width from which timm, which rounds down, computes `mlp_dim`."""
    # Packed SwiGLU of VisionTransformer counts gate and value as one.
    mlp_dim = a.mlp_dim
    is_packed = a.mlp == "swiglu" and a.rope is None and a.norm == "layer"
    if is_packed:
        mlp_dim = 2 * mlp_dim
    ratio = mlp_dim / a.width
    if int(a.width * ratio) == mlp_dim:
        return ratio
    return (mlp_dim + 0.5) / a.width  # the quotient alone can end one below


def _shorten(size: tuple[int, int]) -> int | list[int]:
    """Return one number for a square."""
    height, width = size
    if height == width:
        return height
    return [height, width]
