"""What timm and Hugging Face want to read beside weights, so that they build the network themselves."""

import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from vit_jax.config.architecture import Architecture
from vit_jax.config.variants import RESNET_UNITS
from vit_jax.files import write_atomically
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
    if preprocessing is not None and not {"resize", "crop_fraction"} <= preprocessing.keys():
        preprocessing = None
    is_timm = format_name == "timm"
    config = timm_config(a, class_names, preprocessing) if is_timm else huggingface_config(a, class_names)
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
        name, arguments = "vit_base_patch16_224", _timm_arguments(a)
    if name is None:
        return None
    pretrained: dict[str, Any] = {"input_size": [3, *a.image_size], "mean": _HALF, "std": _HALF}
    pretrained["num_classes"] = a.num_classes
    if preprocessing is not None:
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


def _timm_arguments(a: Architecture) -> dict[str, Any]:
    ratio = a.mlp_dim / a.width
    return {
        "img_size": list(a.image_size),
        "patch_size": _one_or_two(a.patch_size),
        "embed_dim": a.width,
        "depth": a.depth,
        "num_heads": a.num_heads,
        # timm multiplies the width by it and rounds down: the quotient alone can end one below `mlp_dim`.
        "mlp_ratio": ratio if int(a.width * ratio) == a.mlp_dim else (a.mlp_dim + 0.5) / a.width,
        "class_token": a.pool == "token",
        **({"no_embed_class": True} if a.position_tokens == "patches" else {}),
        "global_pool": _TIMM_POOLS[a.pool],
        "fc_norm": False,
        "pos_embed": "learn",
        "act_layer": "gelu" if a.gelu == "exact" else "gelu_tanh",
    }


def _one_or_two(size: tuple[int, int]) -> int | list[int]:
    return size[0] if size[0] == size[1] else list(size)
