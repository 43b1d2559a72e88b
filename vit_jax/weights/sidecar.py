"""What `config.json` and `preprocessor_config.json` beside weights from timm or Hugging Face state.

A value of an unexpected type is ignored, as if it were not there. Preparation of images that ours cannot do is left
unknown, with a note; so is what ours does otherwise.
"""

import math
import pathlib
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from vit_jax.config.schema import INTERPOLATIONS
from vit_jax.files import read_json
from vit_jax.references import mark_stored
from vit_jax.weights.folding import OURS, Normalisation, parse_normalisation
from vit_jax.weights.formats.arrays import naming, shown

CONFIG, PREPROCESSOR, WEIGHTS = "config.json", "preprocessor_config.json", "model.safetensors"
MAX_BYTES = 4 * 2**20  # names of 21,843 classes, twice, take 2; parsing takes 25 times as much memory
_ACTIVATIONS = dict.fromkeys(("gelu", "gelu_python"), "exact")
_ACTIVATIONS |= dict.fromkeys(("gelu_new", "gelu_tanh", "gelu_fast", "gelu_pytorch_tanh"), "tanh")
_ACTIVATIONS |= {"quick_gelu": "quick"}
_TIMM_PARTS: tuple[tuple[str, dict[str, Any]], ...] = (
    # (part of the name of timm's model, fields of the architecture that its file does not show)
    (r"_dinov3", {"rope": "centred", "layer_norm_epsilon": 1e-5}),
    (r"^eva02_", {"rope": "grid"}),
    (r"^vit_pe_core_", {"rope": "index", "layer_norm_epsilon": 1e-5, "pool_num_heads": 8}),
    (r"^vit_pe_", {"rope": "index", "layer_norm_epsilon": 1e-5}),
    (r"_clip_quickgelu", {"gelu": "quick", "layer_norm_epsilon": 1e-5}),
    (r"_clip_", {"layer_norm_epsilon": 1e-5}),
    (r"^aimv2_", {"layer_norm_epsilon": 1e-5}),
    (r"_siglip_", {"gelu": "tanh"}),  # as in the original code; timm has the exact GELU in most of its models
)
_HUGGINGFACE_PARTS: dict[str, dict[str, Any]] = {
    "dinov3_vit": {"rope": "centred"},
    "ijepa": {"pool": "gap"},
}
_TOWERS = ("vision_config",)  # of a model with a text tower
_SIGLIP_NOTE = (
    "SigLIP was trained with the tanh GELU, which is taken here. timm computes some of its SigLIP models with the "
    "exact GELU: its logits differ a little there."
)
_RESAMPLING = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic", 4: "box", 5: "hamming"}  # Pillow's numbers
_RANGE = {"pixel_range": [-1.0, 1.0]}  # of our networks, whatever the pixels of the library are
_OF_SHORT_SIDES = ("CLIP", "Bit")  # processors in which one number is the short side, not both sides
_TIMM = {"resize_library": "timm"}
_CLOSEST = {"lanczos": "bicubic"}  # of other filters bilinear
Prepared = tuple[dict[str, Any] | None, tuple[str, ...]]
POOLS = {"token": "token", "avg": "gap", "map": "map"}


class Sidecar(NamedTuple):
    """Facts beside a file of weights."""

    fields: Mapping[str, Any] = {}  # of the architecture, and those that the file decides, to compare
    class_names: tuple[str, ...] | None = None  # in the order of the logits
    preprocessing: Mapping[str, Any] | None = None  # as our checkpoints have it
    notes: tuple[str, ...] = ()  # sentences for the report
    normalisation: Normalisation = OURS  # of the pixels that the file's parameters take
    model: str = ""  # timm's model with its tag, or the model type of transformers


def read_sidecar(folder: pathlib.Path) -> Sidecar:
    """Reads what is there, if anything; ValueError for no JSON object, or an activation that our networks lack."""
    config = _read(folder / CONFIG)
    if not config:
        return Sidecar()
    is_timm = "pretrained_cfg" in config or "architecture" in config
    processor = {} if is_timm else _read(folder / PREPROCESSOR)
    with naming(str(folder / CONFIG)):
        return _from_timm(config) if is_timm else _from_huggingface(config, processor)


def _read(path: pathlib.Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    value = read_json(path, MAX_BYTES)
    if not isinstance(value, dict):
        raise ValueError(f"{path} is no JSON object but {type(value).__name__}.")
    return mark_stored(value, str(path), ())  # type: ignore[no-any-return]


def _from_huggingface(config: Mapping[str, Any], processor: Mapping[str, Any]) -> Sidecar:
    for tower in _TOWERS:
        config = {**config, **(typed(config, tower, dict) or {})}
    labels = config.get("id2label")
    is_gated = typed(config, "hidden_act", str) in ("silu", "swish") or config.get("use_swiglu_ffn") is True
    if config.get("use_gated_mlp") is True and not is_gated:
        raise ValueError(f"its gated MLPs have the activation {config.get('hidden_act')!r}: ours have silu only.")
    fields = {
        "image_size": pair(config.get("image_size")),
        "patch_size": pair(config.get("patch_size")),
        "num_classes": len(labels) if isinstance(labels, dict) else None,
        "width": typed(config, "hidden_size", int),
        "depth": typed(config, "num_hidden_layers", int),
        "mlp_dim": typed(config, "intermediate_size", int),
        "num_heads": typed(config, "num_attention_heads", int),
        "layer_norm_epsilon": typed(config, "layer_norm_eps", float, int) or typed(config, "rms_norm_eps", float, int),
        "gelu": None if is_gated else _gelu(typed(config, "hidden_act", str)),
        **_HUGGINGFACE_PARTS.get(str(config.get("model_type")), {}),
    }
    normalisation = _normalisation(processor, "image_mean", "image_std")
    model = str(config.get("model_type", ""))
    return Sidecar(_known(fields), _names(labels), *of_huggingface(config, processor), normalisation, model)


def _from_timm(config: Mapping[str, Any]) -> Sidecar:
    pretrained = typed(config, "pretrained_cfg", dict) or config
    arguments = typed(config, "model_args", dict) or {}
    input_size = typed(pretrained, "input_size", list)
    size = pair(arguments.get("img_size")) or pair(input_size[-2:] if input_size else None)
    width, name = typed(arguments, "embed_dim", int), str(config.get("architecture"))
    fields = {
        "image_size": size,
        "patch_size": pair(arguments.get("patch_size")),
        "num_classes": typed(config, "num_classes", int),
        "width": width,
        "depth": typed(arguments, "depth", int),
        # The ratio of packed SwiGLU counts gate and value as one: the file decides.
        "mlp_dim": None if "_giant_patch14_" in name else _product(width, typed(arguments, "mlp_ratio", float, int)),
        "num_heads": typed(arguments, "num_heads", int),
        "gelu": _gelu(typed(arguments, "act_layer", str)),
        "pool": POOLS.get(str(config.get("global_pool"))),
        "pool_num_heads": typed(arguments, "attn_pool_num_heads", int),
    }
    if re.match(r"vit_\w+_rope_", name):  # an axial one has the arrays of other networks
        raise ValueError(f"{shown(name)} is a RoPE-ViT, whose rotary positions are not read: take DINOv3 or EVA-02.")
    parts = next((parts for pattern, parts in _TIMM_PARTS if re.search(pattern, name)), {})
    fields = {**fields, **{part: value for part, value in parts.items() if fields.get(part) is None}}
    preprocessing, notes = of_timm(pretrained, size)
    if "siglip" in name and parts and "gelu" in parts:
        notes += (_SIGLIP_NOTE,)
    labels = config.get("label_names", pretrained.get("label_names"))
    normalisation = _normalisation(pretrained, "mean", "std")
    tagged = f"{name}.{pretrained.get('tag', '')}"
    return Sidecar(_known(fields), _names(labels), preprocessing, notes, normalisation, tagged)


def _product(width: int | None, ratio: float | None) -> int | None:
    """Rounded down, as timm does; a ratio is written with rounding errors."""
    try:
        return None if width is None or ratio is None else int(width * ratio + 1e-6)
    except (OverflowError, ValueError):  # of numbers that are not finite
        return None


def _gelu(activation: str | None) -> str | None:
    if activation not in (None, *_ACTIVATIONS):
        raise ValueError(
            f"it names the activation {shown(str(activation))}; our networks have GELU only, "
            f"known as {', '.join(_ACTIVATIONS)}."
        )
    return _ACTIVATIONS.get(str(activation))


def _known(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def _names(labels: Any) -> tuple[str, ...] | None:
    """Names in the order of their numbers; None where they are only made up."""
    if isinstance(labels, dict) and all(key.isdecimal() for key in labels):
        labels = [labels[key] for key in sorted(labels, key=int)]
    if not isinstance(labels, list) or not labels or not all(isinstance(label, str) for label in labels):
        return None
    is_made_up = labels == [f"LABEL_{number}" for number in range(len(labels))]
    return None if is_made_up else tuple(labels)


# How images are prepared: resized directly, or the middle cropped; pixels in [-1, 1].


def of_huggingface(config: Mapping[str, Any], processor: Mapping[str, Any]) -> Prepared:
    """Preprocessing, as our checkpoints have it, and notes; from `config.json` and `preprocessor_config.json`."""
    if not processor:  # the network takes images of some size; how they are brought to it is not stated
        return None, ()
    size = typed(processor, "size", dict, int) or config.get("image_size")
    kind = processor.get("image_processor_type") or processor.get("feature_extractor_type")
    if str(kind).startswith(_OF_SHORT_SIDES) and typed(processor, "size", int):
        size = {"shortest_edge": size}
    target, edge = pair(size), typed(size, "shortest_edge", int) if isinstance(size, dict) else None
    crop = pair(processor.get("crop_size")) if processor.get("do_center_crop") is True else target
    found = None
    if processor.get("do_resize") is not False and crop:
        if crop == target:
            found = _prepared(crop, "direct", 1.0)
        elif edge and crop[0] == crop[1] and 0 < crop[0] <= edge:
            found = _prepared(crop, "short_side", _fraction(crop[0], edge))
    notes = () if found else _unknown(processor, "do_resize", "size", "do_center_crop", "crop_size")
    network = pair(config.get("image_size"))
    if found and network and found["image_size"] != list(network):
        notes = (f"Their images were made {found['image_size']}, but config.json says {list(network)}, which counts.",)
    found, told = _resampled(_RESAMPLING.get(typed(processor, "resample", int), "bilinear"), found)
    return found and {**found, **_RANGE}, (*notes, *told)


def of_timm(pretrained: Mapping[str, Any], size: tuple[int, int] | None) -> Prepared:
    """Preprocessing, as our checkpoints have it, and notes; from timm's `pretrained_cfg`."""
    crop, mode = typed(pretrained, "crop_pct", float, int), typed(pretrained, "crop_mode", str) or "center"
    found = None
    if size and crop and 0 < crop <= 1:
        if mode == "center":
            found = _prepared(size, "short_side", float(crop)) | _TIMM
        elif mode == "squash" and crop == 1:
            found = _prepared(size, "direct", 1.0) | _TIMM
    notes = () if found or not crop else _unknown(pretrained, "crop_pct", "crop_mode")
    found, told = _resampled(typed(pretrained, "interpolation", str) or "bicubic", found)
    return found and {**found, **_RANGE}, (*notes, *told)


def typed(values: Mapping[str, Any], name: str, *kinds: type) -> Any:
    """A value of one of these types, or None."""
    value = values.get(name)
    return value if isinstance(value, kinds) and not isinstance(value, bool) else None


def pair(size: Any) -> tuple[int, int] | None:
    """Height and width, in whichever of the libraries' ways they are written."""
    if isinstance(size, dict):
        size = [size.get("height"), size.get("width")]
    if type(size) is int:
        size = [size, size]
    is_pair = isinstance(size, list) and len(size) == 2 and all(type(pixels) is int for pixels in size)
    return (size[0], size[1]) if is_pair else None


def _prepared(size: tuple[int, int], resize: str, crop_fraction: float) -> dict[str, Any]:
    return {"image_size": list(size), "resize": resize, "crop_fraction": crop_fraction}


def _unknown(values: Mapping[str, Any], *names: str) -> tuple[str, ...]:
    stated = ", ".join(f"{name}={values[name]}" for name in names if name in values)
    note = (
        f"The images of these weights were prepared by {stated}, which ours cannot do, so their preprocessing is left "
        "unknown: resize and crop_fraction can be given where they are used."
    )
    return (note,) if stated else ()


def _fraction(crop: int, edge: int) -> float:
    """Return the fraction of `edge` pixels that the crop keeps, from which crop / fraction is not below `edge`."""
    fraction = crop / edge
    return fraction if crop / fraction >= edge else math.nextafter(fraction, 0.0)


def _resampled(theirs: str, prepared: dict[str, Any] | None) -> Prepared:
    """Add the interpolation, or the closest of ours and a note."""
    if prepared is None:
        return None, ()
    ours = theirs if theirs in INTERPOLATIONS else _CLOSEST.get(theirs, "bilinear")
    note = f"Their images were resized with {theirs} interpolation; ours is {ours}, so logits differ a little."
    return {**prepared, "interpolation": ours}, () if ours == theirs else (note,)


def _normalisation(values: Mapping[str, Any], mean: str, std: str) -> Normalisation:
    """Return mean and standard deviation of pixels in [0, 1]; ours if nothing is stated.

    Raises:
      ValueError: they are not three numbers each.
    """
    factor = typed(values, "rescale_factor", float, int)
    unit = factor if factor is not None and 0 < factor < 1e6 else 1 / 255  # of a step between two grey levels
    unit = 1.0 if values.get("do_rescale") is False else unit
    if values.get("do_normalize") is False:
        found = Normalisation((0.0,) * 3, (1.0,) * 3)
    elif values.get(mean) is None and values.get(std) is None:
        return OURS
    else:
        found = parse_normalisation(values.get(mean), values.get(std))
    return found if abs(unit * 255 - 1) < 1e-3 else found.scaled(1 / (255 * unit))
