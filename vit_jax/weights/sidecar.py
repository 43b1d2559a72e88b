"""Reading of `config.json` and `preprocessor_config.json` beside weights of timm or Hugging Face.

A value of an unexpected type is ignored. Preparation of images that ours cannot do is left unknown, with a note.
"""

import contextlib
import math
import pathlib
from collections.abc import Mapping
from typing import Any, NamedTuple

from vit_jax.config.schema import INTERPOLATIONS
from vit_jax.files import read_json
from vit_jax.references import mark_stored
from vit_jax.weights import architectures
from vit_jax.weights.folding import OURS, Normalisation, parse_normalisation
from vit_jax.weights.formats.stored import naming, shown
from vit_jax.weights.published import licence_of

CONFIG, PREPROCESSOR, WEIGHTS = "config.json", "preprocessor_config.json", "model.safetensors"
MAX_BYTES = 4 * 2**20  # names of 21,843 classes, twice, take 2; parsing takes 25 times as much memory
POOLS = {"token": "token", "avg": "gap", "map": "map"}  # timm's → ours; "" is stated for features of all tokens
HUGGINGFACE_SIZES = {  # ours → transformers'
    "width": "hidden_size",
    "depth": "num_hidden_layers",
    "mlp_dim": "intermediate_size",
    "num_heads": "num_attention_heads",
}
TIMM_SIZES = {"width": "embed_dim", "depth": "depth", "num_heads": "num_heads"}
_ACTIVATIONS = {
    **dict.fromkeys(("gelu", "gelu_python"), "exact"),
    **dict.fromkeys(("gelu_new", "gelu_tanh", "gelu_fast", "gelu_pytorch_tanh"), "tanh"),
    "quick_gelu": "quick",
}
_SIGLIP_NOTE = (
    "SigLIP was trained with the tanh GELU, which is taken here. timm computes some of its SigLIP models with the "
    "exact GELU: its logits differ a little there."
)
_RESAMPLING = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic", 4: "box", 5: "hamming"}  # Pillow's numbers
_OF_SHORT_SIDES = ("CLIP", "Bit")  # processors in which one number is the short side, not both sides
Prepared = tuple[dict[str, object] | None, tuple[str, ...]]
"""Preprocessing as our checkpoints have it, and notes."""


class Sidecar(NamedTuple):
    """Facts beside a file of weights."""

    fields: Mapping[str, object] = {}  # of the architecture, and those that the file decides, to compare
    class_names: tuple[str, ...] | None = None  # in the order of the logits
    preprocessing: Mapping[str, object] | None = None  # as our checkpoints have it
    notes: tuple[str, ...] = ()  # sentences for the report
    normalisation: Normalisation = OURS  # of the pixels that the file's parameters take
    licence: str = ""  # of the family that the configuration names


def read_sidecar(folder: pathlib.Path, architecture: str | None = None) -> Sidecar:
    """Read the files of a folder, if any, with another name of the network than config.json has, if given.

    Raises:
      ValueError: a file is no JSON object, or names a network or an activation that is not read.
    """
    config = _read(folder / CONFIG)
    if not config:
        return Sidecar() if architecture is None else name_sidecar(architecture)
    is_timm = "pretrained_cfg" in config or "architecture" in config
    processor = {} if is_timm else _read(folder / PREPROCESSOR)
    if architecture is not None:
        config = {**config, "architecture" if is_timm else "model_type": architecture}
    with naming(str(folder / CONFIG)):
        return _from_timm(config) if is_timm else _from_huggingface(config, processor)


def name_sidecar(architecture: str) -> Sidecar:
    """Return the facts that the name of a network states, for weights without a configuration."""
    note = (
        "WARNING: there is no config.json, so pixels in [-1, 1] are assumed, which other families do not have. Give "
        "the folder with both files."
    )
    if architecture in architectures.MODEL_TYPES:
        return Sidecar(architectures.huggingface_fields({"model_type": architecture}), notes=(note,))
    name = architectures.current_name(architecture)
    return Sidecar(architectures.timm_fields(name, {}), notes=(note,), licence=licence_of(architecture))


def _read(path: pathlib.Path) -> dict[str, object]:
    value = read_json(path, MAX_BYTES) if path.exists() else {}
    if not isinstance(value, dict):
        raise ValueError(f"{path} is no JSON object but {type(value).__name__}.")
    return mark_stored(value, str(path), ())  # type: ignore[no-any-return]


def _from_huggingface(config: Mapping[str, object], processor: Mapping[str, object]) -> Sidecar:
    vision_config = typed(config, "vision_config", dict) or {}  # of a model with a text tower
    named = architectures.huggingface_fields({**config, **vision_config, "model_type": config.get("model_type")})
    config = {**config, **vision_config}
    labels, activation = config.get("id2label"), typed(config, "hidden_act", str)
    is_gated = activation in ("silu", "swish") or config.get("use_swiglu_ffn") is True
    if config.get("use_gated_mlp") is True and not is_gated:
        raise ValueError(f"its gated MLPs have the activation {config.get('hidden_act')!r}: ours have silu only.")
    fields = {
        "image_size": pair(config.get("image_size")),
        "patch_size": pair(config.get("patch_size")),
        "num_classes": len(labels) if isinstance(labels, dict) else None,
        **{ours: typed(config, theirs, int) for ours, theirs in HUGGINGFACE_SIZES.items()},
        "layer_norm_epsilon": typed(config, "layer_norm_eps", float, int) or typed(config, "rms_norm_eps", float, int),
        "gelu": None if is_gated else _gelu(activation),
        **named,
    }
    normalisation = _normalisation(processor, "image_mean", "image_std")
    licence = licence_of(str(config.get("model_type", "")))
    return Sidecar(_known(fields), _names(labels), *of_huggingface(config, processor), normalisation, licence)


def _from_timm(config: Mapping[str, object]) -> Sidecar:
    pretrained = typed(config, "pretrained_cfg", dict) or config
    arguments = typed(config, "model_args", dict) or {}
    name = architectures.current_name(str(config.get("architecture")))
    named = architectures.timm_fields(name, arguments)
    input_size = typed(pretrained, "input_size", list)
    size = pair(arguments.get("img_size")) or pair(input_size[-2:] if input_size else None)
    width, ratio = typed(arguments, "embed_dim", int), typed(arguments, "mlp_ratio", float, int)
    fields = {
        "image_size": size,
        "patch_size": pair(arguments.get("patch_size")),
        "num_classes": typed(config, "num_classes", int),
        **{ours: typed(arguments, theirs, int) for ours, theirs in TIMM_SIZES.items()},
        # The ratio of packed SwiGLU counts gate and value as one: the file decides.
        "mlp_dim": None if "_giant_patch14_" in name else _product(width, ratio),
        "gelu": _gelu(typed(arguments, "act_layer", str)),
        "pool": _pool(config.get("global_pool", arguments.get("global_pool"))),
        "pool_num_heads": typed(arguments, "attn_pool_num_heads", int),
    }
    preprocessing, notes = of_timm(pretrained, size)
    notes += (_SIGLIP_NOTE,) if "siglip" in name and "gelu" in named else ()
    labels = config.get("label_names", pretrained.get("label_names"))
    normalisation = _normalisation(pretrained, "mean", "std")
    licence = licence_of(f"{name}.{pretrained.get('tag', '')}")
    return Sidecar(named | _known(fields), _names(labels), preprocessing, notes, normalisation, licence)


def _pool(pool: object) -> str | None:
    """Return our pooling for timm's; None where it is not stated, or the weights give all tokens."""
    if pool in (None, ""):
        return None
    if str(pool) not in POOLS:
        raise ValueError(f"global_pool={shown(str(pool))}: must be one of {', '.join(POOLS)}. Take other weights.")
    return POOLS[str(pool)]


def _product(width: int | None, ratio: float | None) -> int | None:
    """Return the product rounded down, as timm does; a ratio is written with rounding errors."""
    with contextlib.suppress(OverflowError, ValueError):  # of numbers that are not finite
        return None if width is None or ratio is None else int(width * ratio + 1e-6)
    return None


def _gelu(activation: str | None) -> str | None:
    if activation not in (None, *_ACTIVATIONS):
        known = ", ".join(_ACTIVATIONS)
        raise ValueError(
            f"it names the activation {shown(str(activation))}; our networks have GELU only, known as {known}."
        )
    return _ACTIVATIONS.get(str(activation))


def _known(fields: Mapping[str, object]) -> dict[str, object]:
    return {name: value for name, value in fields.items() if value is not None}


def _names(labels: object) -> tuple[str, ...] | None:
    """Return names in the order of their numbers; None if there are none, or transformers made them up."""
    if isinstance(labels, dict) and all(key.isdecimal() for key in labels):
        labels = [labels[key] for key in sorted(labels, key=int)]
    if not isinstance(labels, list) or not labels or not all(isinstance(label, str) for label in labels):
        return None
    is_made_up = labels == [f"LABEL_{number}" for number in range(len(labels))]
    return None if is_made_up else tuple(labels)


# How images are prepared: resized directly, or the middle cropped; pixels in [-1, 1].


def of_huggingface(config: Mapping[str, object], processor: Mapping[str, object]) -> Prepared:
    """Return the preparation that `preprocessor_config.json` states; `config.json` has the image size."""
    if not processor:  # the network takes images of some size; how they are brought to it is not stated
        return None, ()
    size = typed(processor, "size", dict, int) or config.get("image_size")
    kind = processor.get("image_processor_type") or processor.get("feature_extractor_type")
    if str(kind).startswith(_OF_SHORT_SIDES) and typed(processor, "size", int):
        size = {"shortest_edge": size}
    target, edge = pair(size), typed(size, "shortest_edge", int) if isinstance(size, dict) else None
    crop = pair(processor.get("crop_size")) if processor.get("do_center_crop") is True else target
    prepared = None
    if processor.get("do_resize") is not False and crop:
        if crop == target:
            prepared = {"image_size": list(crop), "resize": "direct", "crop_fraction": 1.0}
        elif edge and crop[0] == crop[1] and 0 < crop[0] <= edge:
            fraction = crop[0] / edge
            if crop[0] / fraction < edge:  # rounding would lose a pixel
                fraction = math.nextafter(fraction, 0.0)
            prepared = {"image_size": list(crop), "resize": "short_side", "crop_fraction": fraction}
    network, notes = pair(config.get("image_size")), tuple[str, ...]()
    if prepared and network and prepared["image_size"] != list(network):
        made = prepared["image_size"]
        notes = (f"Their images were made {made}, but config.json says {list(network)}, which counts.",)
    stated = ("do_resize", "size", "do_center_crop", "crop_size")
    filter_name = _RESAMPLING.get(typed(processor, "resample", int), "bilinear")
    prepared, told = _finished(prepared, filter_name, processor, stated)
    return prepared, (*notes, *told)


def of_timm(pretrained: Mapping[str, object], size: tuple[int, int] | None) -> Prepared:
    """Return the preparation that timm's `pretrained_cfg` states."""
    crop, mode = typed(pretrained, "crop_pct", float, int), typed(pretrained, "crop_mode", str) or "center"
    prepared = None
    if size and crop and 0 < crop <= 1 and (mode == "center" or (mode == "squash" and crop == 1)):
        resize = "direct" if mode == "squash" else "short_side"
        prepared = {"image_size": list(size), "resize": resize, "crop_fraction": float(crop), "resize_library": "timm"}
    filter_name = typed(pretrained, "interpolation", str) or "bicubic"
    return _finished(prepared, filter_name, pretrained, ("crop_pct", "crop_mode") if crop else ())


def _finished(
    prepared: dict[str, object] | None, filter_name: str, values: Mapping[str, object], names: tuple[str, ...]
) -> Prepared:
    """Add the interpolation, or the closest of ours and a note; without a preparation, note the stated values."""
    if prepared is None:
        stated = ", ".join(f"{name}={values[name]}" for name in names if name in values)
        note = (
            f"The images of these weights were prepared by {stated}, which ours cannot do, so their preprocessing is "
            "left unknown: resize and crop_fraction can be given where they are used."
        )
        return None, (note,) if stated else ()
    closest = "bicubic" if filter_name == "lanczos" else "bilinear"
    ours = filter_name if filter_name in INTERPOLATIONS else closest
    note = f"Their images were resized with {filter_name} interpolation; ours is {ours}, so logits differ a little."
    prepared |= {"interpolation": ours, "pixel_range": [-1.0, 1.0]}
    return prepared, () if ours == filter_name else (note,)


def typed(values: Mapping[str, object], name: str, *kinds: type) -> Any:
    """Return a value of one of these types, or None."""
    value = values.get(name)
    return value if isinstance(value, kinds) and not isinstance(value, bool) else None


def pair(size: object) -> tuple[int, int] | None:
    """Return height and width, in any of the libraries' forms."""
    if isinstance(size, dict):
        size = [size.get("height"), size.get("width")]
    if type(size) is int:
        size = [size, size]
    is_pair = isinstance(size, list) and len(size) == 2 and all(type(pixels) is int for pixels in size)
    return (size[0], size[1]) if is_pair else None  # type: ignore[index]


def _normalisation(values: Mapping[str, object], mean: str, std: str) -> Normalisation:
    """Return mean and standard deviation of pixels in [0, 1]; ours if nothing is stated.

    Raises:
      ValueError: they are not three numbers each.
    """
    factor = typed(values, "rescale_factor", float, int)
    unit = factor if factor is not None and 0 < factor < 1e6 else 1 / 255  # of a step between two grey levels
    unit = 1.0 if values.get("do_rescale") is False else unit
    if values.get("do_normalize") is False:
        stated = Normalisation((0.0,) * 3, (1.0,) * 3)
    elif values.get(mean) is None and values.get(std) is None:
        return OURS
    else:
        stated = parse_normalisation(values.get(mean), values.get(std))
    return stated if abs(unit * 255 - 1) < 1e-3 else stated.scaled(1 / (255 * unit))
