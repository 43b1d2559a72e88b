"""What timm and Hugging Face want to read beside weights, so that they build the network themselves."""

import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from vit_jax.config.architecture import Architecture
from vit_jax.config.variants import RESNET_UNITS
from vit_jax.files import write_atomically
from vit_jax.weights.folding import stored_normalisation
from vit_jax.weights.sidecar import CONFIG, POOLS, PREPROCESSOR

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
_HALF = [0.5, 0.5, 0.5]  # mean and deviation that bring pixels from [0, 1] to [-1, 1]


def write_library_config(
    folder: pathlib.Path,
    format_name: str,
    a: Architecture,
    class_names: Sequence[str] | None,
    preprocessing: Mapping[str, Any] | None,
) -> tuple[str, ...]:
    """Writes the configuration of a network whose weights are in `folder`; returns notes for the report.

    A configuration of other weights is replaced or removed. Preprocessing that is not known is not written, so that
    readers of the folder choose it instead of trusting a guess.
    """
    is_timm = format_name == "timm"
    config = timm_config(a, class_names, preprocessing) if is_timm else huggingface_config(a, class_names)
    preprocessing = preprocessing if is_known(preprocessing) else None
    processor = None if is_timm or preprocessing is None else _huggingface_processor(a, preprocessing)
    for path, value in ((folder / CONFIG, config), (folder / PREPROCESSOR, processor)):
        if value is None:
            path.unlink(missing_ok=True)
        else:
            write_atomically(path, json.dumps(value, indent=2) + "\n")
    if config is None:
        return (f"timm has no model with the ResNet of {a.name}, so there is no {CONFIG}: build the network yourself.",)
    if preprocessing is None:
        where = f"{CONFIG} does not state it" if is_timm else f"there is no {PREPROCESSOR}"
        return (f"How images were resized and cropped for this network is not known, so {where}.",)
    if processor is not None and preprocessing["crop_fraction"] != 1.0:
        return ("Hugging Face's processor resizes the full image; this network was tested on central crops.",)
    return ()


def is_known(preprocessing: Mapping[str, Any] | None) -> bool:
    """Return True if it is stated how images are resized and cropped."""
    return {"resize", "crop_fraction"} <= (preprocessing or {}).keys()


def huggingface_config(a: Architecture, class_names: Sequence[str] | None) -> dict[str, Any]:
    """`config.json` of ViTForImageClassification; of ViTModel where there are no classes."""
    labels = list(class_names or [f"LABEL_{number}" for number in range(a.num_classes)])
    return {
        "architectures": ["ViTForImageClassification" if a.num_classes else "ViTModel"],
        "model_type": "vit",
        "image_size": _one_or_two(a.image_size),
        "patch_size": _one_or_two(a.patch_size),
        "num_channels": 3,
        "hidden_size": a.width,
        "num_hidden_layers": a.depth,
        "num_attention_heads": a.num_heads,
        "intermediate_size": a.mlp_dim,
        "hidden_act": "gelu" if a.gelu == "exact" else "gelu_pytorch_tanh",
        "layer_norm_eps": a.layer_norm_epsilon,
        "qkv_bias": True,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "id2label": {str(number): label for number, label in enumerate(labels)},
        "label2id": {label: number for number, label in enumerate(labels)},
    }


def _huggingface_processor(a: Architecture, preprocessing: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "image_processor_type": "ViTImageProcessor",
        "do_resize": True,
        "size": {"height": a.image_size[0], "width": a.image_size[1]},
        "resample": 3 if preprocessing.get("interpolation") == "bicubic" else 2,  # Pillow's numbers; 2 is bilinear
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": _HALF,
        "image_std": _HALF,
    }


def timm_config(
    a: Architecture, class_names: Sequence[str] | None, preprocessing: Mapping[str, Any] | None
) -> dict[str, Any] | None:
    """`config.json` of a model that timm knows by name, every number given; None where there is none."""
    if a.family == "resnet":
        name, arguments = _TIMM_RESNETS.get((a.units, a.width_factor)), {}
    elif a.family == "hybrid":
        name, arguments = _TIMM_HYBRIDS.get(a.units) if a.width_factor == 1 else None, _timm_arguments(a)
    else:
        name, arguments = timm_model(a)[0], _timm_arguments(a) | _timm_parts(a)
    if name is None:
        return None
    pixels = stored_normalisation(preprocessing if a.family == "vit" else None)
    pretrained: dict[str, Any] = {"input_size": [3, *a.image_size], "mean": [*pixels.mean], "std": [*pixels.std]}
    pretrained["num_classes"] = a.num_classes
    if is_known(preprocessing):
        assert preprocessing is not None
        crop_mode = "squash" if preprocessing["resize"] == "direct" else "center"
        interpolation = preprocessing.get("interpolation") or "bilinear"
        pretrained |= {
            "interpolation": interpolation,
            "crop_pct": preprocessing["crop_fraction"],
            "crop_mode": crop_mode,
        }
    config: dict[str, Any] = {"architecture": name, "num_classes": a.num_classes, "num_features": a.width}
    config |= {"model_args": arguments, "pretrained_cfg": pretrained}
    config |= {} if class_names is None else {"label_names": list(class_names)}
    return config | ({"global_pool": _TIMM_POOLS[a.pool]} if a.has_transformer else {})


def timm_model(a: Architecture) -> tuple[str, float]:
    """Return the name of a model of timm that computes as this ViT, but for sizes, and the epsilon of its norms."""
    if a.rope == "centred":
        return "vit_base_patch16_dinov3", 1e-5
    if a.rope == "grid":
        return "eva02_base_patch14_224", 1e-6
    if a.rope == "index":
        return "vit_pe_core_base_patch16_224" if a.pool == "map" else "vit_pe_spatial_base_patch16_512", 1e-5
    if a.norm == "rms":
        return "aimv2_large_patch14_224", 1e-5
    if a.mlp == "swiglu":
        return "vit_giant_patch14_dinov2", 1e-6
    return ("vit_base_patch16_clip_224", 1e-5) if a.layer_norm_epsilon == 1e-5 else ("vit_base_patch16_224", 1e-6)


def _timm_parts(a: Architecture) -> dict[str, Any]:
    """Return the arguments of timm's classes for parts that the paper's ViT does not have."""
    common = {"init_values": a.layer_scale, "qkv_bias": a.qkv_bias != "none"}
    if a.rope is None:
        return common | {
            "reg_tokens": a.registers,
            "pre_norm": a.embedding_norm == "tokens",
            "final_norm": a.final_norm != "none",
            "fc_norm": a.final_norm == "pooled",
            "proj_bias": a.linear_bias,
            **({"embed_norm_layer": None} if a.norm == "rms" and a.embedding_norm is None else {}),
        }
    counted = list(a.rope_grid or a.grid)
    reference = {"centred": {}, "grid": {"ref_feat_shape": [16, 16]}, "index": {"ref_feat_shape": counted}}
    pool = {"attn_pool_num_heads": a.pool_num_heads or a.num_heads, "attn_pool_mlp_ratio": _ratio(a)}
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
    mlp_dim = 2 * a.mlp_dim if a.mlp == "swiglu" and a.rope is None and a.norm == "layer" else a.mlp_dim
    ratio = mlp_dim / a.width
    return ratio if int(a.width * ratio) == mlp_dim else (mlp_dim + 0.5) / a.width


def _timm_arguments(a: Architecture) -> dict[str, Any]:
    plain = {"pos_embed": "learn", "act_layer": _TIMM_ACTIVATIONS[a.gelu]} if a.mlp == "gelu" else {}
    return {
        "img_size": list(a.image_size),
        "patch_size": _one_or_two(a.patch_size),
        "embed_dim": a.width,
        "depth": a.depth,
        "num_heads": a.num_heads,
        "mlp_ratio": _ratio(a),
        "class_token": a.num_class_tokens > 0,
        **({"no_embed_class": True} if a.position_tokens == "patches" else {}),
        "global_pool": _TIMM_POOLS[a.pool],
        **({"fc_norm": False, **plain} if a.rope is None else {}),
    }


def _one_or_two(size: tuple[int, int]) -> int | list[int]:
    return size[0] if size[0] == size[1] else list(size)
