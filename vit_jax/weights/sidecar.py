"""Reading of `config.json` and `preprocessor_config.json` beside weights of timm or Hugging Face.

A value of another type than that of its library is an error, see `typed_values`. Preparation of
images that ours cannot do is left unknown, with a note.
"""

import contextlib
import math
import pathlib
import re
from collections.abc import Mapping
from typing import NamedTuple

from vit_jax.config.schema import INTERPOLATIONS
from vit_jax.imports.references import mark_stored
from vit_jax.storage.files import read_json
from vit_jax.weights import architectures
from vit_jax.weights.folding import OURS, Normalisation, parse_normalisation
from vit_jax.weights.formats.stored import naming, shown
from vit_jax.weights.published import licence_of
from vit_jax.weights.typed_values import (
    read_class_names,
    read_count,
    read_flag,
    read_object,
    read_positive,
    read_size,
    read_string,
    require_three_channels,
    wrong_value,
)

CONFIG = "config.json"
PREPROCESSOR = "preprocessor_config.json"
WEIGHTS = "model.safetensors"
MAX_BYTES = (
    4 * 2**20
)  # names of 21,843 classes, twice, take 2; parsing takes 25 times as much memory
POOLS = {
    "token": "token",
    "avg": "gap",
    "map": "map",
}  # timm's → ours; "" is stated for features of all tokens
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
_RESAMPLING = {
    0: "nearest",
    1: "lanczos",
    2: "bilinear",
    3: "bicubic",
    4: "box",
    5: "hamming",
}  # Pillow's numbers
_OF_SHORT_SIDES = (
    "CLIP",
    "Bit",
)  # processors in which one number is the short side, not both sides
MULTI_LABEL = "multi_label_classification"
SINGLE_LABEL = "single_label_classification"
Prepared = tuple[dict[str, object] | None, tuple[str, ...]]
"""Preprocessing as our checkpoints have it, and notes."""
# Of Hugging Face: the arrays tell whether there are biases, but a value of another type is a mistake.
_CHECKED_FLAGS = ("attention_bias", "mlp_bias", "qkv_bias")


class Sidecar(NamedTuple):
    """Facts beside a file of weights."""

    fields: Mapping[
        str, object
    ] = {}  # of the architecture, and those that the file decides, to compare
    class_names: tuple[str, ...] | None = None  # in the order of the logits
    preprocessing: Mapping[str, object] | None = None  # as our checkpoints have it
    notes: tuple[str, ...] = ()  # sentences for the report
    normalisation: Normalisation = OURS  # of the pixels that the file's parameters take
    licence: str = ""  # of the family that the configuration names
    is_multilabel: bool = False  # images may have several labels: sigmoid instead of softmax


def read_sidecar(folder: pathlib.Path, architecture: str | None = None) -> Sidecar:
    """Return the facts that the files of a folder state, if any; `architecture` replaces the name of the network.

    Raises:
      ValueError: one is no JSON object, has a value of another type, or names a network or an
        activation that is not read.
    """
    config = _read(folder / CONFIG)
    if not config:
        return Sidecar() if architecture is None else name_sidecar(architecture)
    is_timm = "pretrained_cfg" in config or "architecture" in config
    if architecture is not None:
        config["architecture" if is_timm else "model_type"] = architecture
    if is_timm:
        with naming(str(folder / CONFIG)):
            return _from_timm(config)

    processor = _read(folder / PREPROCESSOR)
    with naming(str(folder / CONFIG)):
        sidecar = _from_huggingface(config)
    with naming(str(folder / PREPROCESSOR)):
        tower = {**config, **read_object(config, "vision_config")}
        preprocessing, notes = of_huggingface(tower, processor)
        normalisation = _normalisation(processor, "image_mean", "image_std")
    return sidecar._replace(preprocessing=preprocessing, notes=notes, normalisation=normalisation)


def name_sidecar(architecture: str) -> Sidecar:
    """Return the facts that the name of a network states, for weights without a configuration."""
    note = (
        "WARNING: there is no config.json, so pixels in [-1, 1] are assumed, which other families do not have. Give "
        "the folder with both files."
    )
    if architecture in architectures.model_types():
        return Sidecar(architectures.huggingface_fields(architecture, {}), notes=(note,))
    fields = architectures.timm_fields(architectures.current_name(architecture), {})
    return Sidecar(fields, notes=(note,), licence=licence_of(architecture))


def _read(path: pathlib.Path) -> dict[str, object]:
    value = read_json(path, MAX_BYTES) if path.exists() else {}
    if not isinstance(value, dict):
        raise ValueError(f"{path} is no JSON object but {type(value).__name__}.")
    return mark_stored(value, str(path), ())  # type: ignore[no-any-return]


def _from_huggingface(config: Mapping[str, object]) -> Sidecar:
    """Return the facts of `config.json`."""
    model_type = read_string(config, "model_type")
    config = {**config, **read_object(config, "vision_config")}  # of a model with a text tower
    named = architectures.huggingface_fields(model_type, config)
    require_three_channels("num_channels", config.get("num_channels"))
    for flag in _CHECKED_FLAGS:
        read_flag(config, flag)
    labels = read_class_names(config, "id2label")
    activation = read_string(config, "hidden_act")
    is_gated = activation in ("silu", "swish") or read_flag(config, "use_swiglu_ffn") is True
    if read_flag(config, "use_gated_mlp") is True and not is_gated:
        raise ValueError(
            f"its gated MLPs have the activation {config.get('hidden_act')!r}: ours have silu only."
        )
    fields = {
        "image_size": read_size(config, "image_size"),
        "patch_size": read_size(config, "patch_size"),
        "num_classes": None if labels is None else len(labels),
        **{ours: read_count(config, theirs) for ours, theirs in HUGGINGFACE_SIZES.items()},
        "layer_norm_epsilon": read_positive(config, "layer_norm_eps")
        or read_positive(config, "rms_norm_eps"),
        "gelu": None if is_gated else _gelu(activation),
        **named,
    }
    return Sidecar(
        fields=_known(fields),
        class_names=_given_names(labels),
        licence=licence_of(model_type or ""),
        is_multilabel=read_problem_type(config),
    )


def read_problem_type(config: Mapping[str, object]) -> bool:
    """Return whether images may have several labels, by the field that Hugging Face has and we write for timm.

    Raises:
      ValueError: it states a regression, or is unknown.
    """
    stated = read_string(config, "problem_type")
    if stated not in (None, SINGLE_LABEL, MULTI_LABEL):
        raise ValueError(
            f"problem_type={shown(stated)}: must be {SINGLE_LABEL} or {MULTI_LABEL}, since outputs are classes. For "
            "the features of another network remove it from the file, and replace the head."
        )
    return stated == MULTI_LABEL


def _from_timm(config: Mapping[str, object]) -> Sidecar:
    pretrained = read_object(config, "pretrained_cfg") or config
    arguments = read_object(config, "model_args")
    name = architectures.current_name(read_string(config, "architecture") or "")
    named = architectures.timm_fields(name, arguments)
    family = architectures.require_compared(name)
    require_three_channels("in_chans", arguments.get("in_chans"))
    size = read_size(arguments, "img_size") or _read_input_size(pretrained)
    mlp_dim = _product(read_count(arguments, "embed_dim"), read_positive(arguments, "mlp_ratio"))
    fields: dict[str, object] = {
        "image_size": size,
        "patch_size": read_size(arguments, "patch_size"),
        "num_classes": read_count(config, "num_classes", least=0),
        "mlp_dim": None if re.search(family.doubled_ratio, name) else mlp_dim,  # the file decides
        "gelu": _gelu(read_string(arguments, "act_layer")),
        "pool": _read_pool(config) or _read_pool(arguments),
        "pool_num_heads": read_count(arguments, "attn_pool_num_heads"),
    }
    for ours, theirs in TIMM_SIZES.items():
        fields[ours] = read_count(arguments, theirs)
    preprocessing, notes = of_timm(pretrained, size)
    labels = read_class_names(config if "label_names" in config else pretrained, "label_names")
    return Sidecar(
        fields=named | _known(fields),
        class_names=_given_names(labels),
        preprocessing=preprocessing,
        notes=(*notes, family.note) if family.note else notes,
        normalisation=_normalisation(pretrained, "mean", "std"),
        licence=licence_of(f"{name}.{pretrained.get('tag', '')}"),
        is_multilabel=read_problem_type(config),
    )


def _read_pool(values: Mapping[str, object]) -> str | None:
    """Return our pooling for timm's; None where it is not stated, or the weights give all tokens."""
    pool = read_string(values, "global_pool")
    if not pool:
        return None
    if pool not in POOLS:
        raise ValueError(
            f"global_pool={shown(pool)}: must be one of {', '.join(POOLS)}. Take other weights."
        )
    return POOLS[pool]


def _read_input_size(pretrained: Mapping[str, object]) -> tuple[int, int] | None:
    """Return height and width of timm's `input_size`, which begins with the number of channels."""
    stated = pretrained.get("input_size")
    if stated is None:
        return None
    if not isinstance(stated, list) or len(stated) != 3:
        raise wrong_value("input_size", stated, "must be channels, height and width")
    require_three_channels("input_size[0]", stated[0])
    return read_size({"input_size": stated[1:]}, "input_size")


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


def _given_names(labels: tuple[str, ...] | None) -> tuple[str, ...] | None:
    """Return names of classes; None if there are none, or transformers made them up."""
    if labels is None:
        return None
    is_made_up = labels == tuple(f"LABEL_{number}" for number in range(len(labels)))
    return None if is_made_up else labels


# How images are prepared: resized directly, or the middle cropped; pixels in [-1, 1].


def of_huggingface(config: Mapping[str, object], processor: Mapping[str, object]) -> Prepared:
    """Return the preparation that `preprocessor_config.json` states, to its image size or that of `config.json`."""
    if not processor:  # the network takes images of some size; how they are resized is not stated
        return None, ()
    size, edge = _read_resizing(config, processor)
    is_cropped = read_flag(processor, "do_center_crop") is True
    stated_crop = read_size(processor, "crop_size")
    crop = stated_crop if is_cropped else size
    prepared: dict[str, object] | None = None
    if read_flag(processor, "do_resize") is not False and crop:
        if crop == size:
            prepared = {"image_size": list(crop), "resize": "direct", "crop_fraction": 1.0}
        elif edge and crop[0] == crop[1] and 0 < crop[0] <= edge:
            fraction = _find_fraction(crop[0], edge)
            prepared = {"image_size": list(crop), "resize": "short_side", "crop_fraction": fraction}
    stated = ("do_resize", "size", "do_center_crop", "crop_size")
    filter_name = _read_resampling(processor)
    return _finished(prepared, filter_name, processor, stated)


def _read_resizing(
    config: Mapping[str, object], processor: Mapping[str, object]
) -> tuple[tuple[int, int] | None, int | None]:
    """Return the size of both sides or the short side, to which images are resized before a crop."""
    stated = processor.get("size")
    size = read_size(processor, "size")
    kind = read_string(processor, "image_processor_type")
    kind = kind or read_string(processor, "feature_extractor_type") or ""
    if stated is None:
        return read_size(config, "image_size"), None
    if kind.startswith(_OF_SHORT_SIDES) and type(stated) is int:
        return None, stated
    edge = read_count(stated, "shortest_edge") if isinstance(stated, dict) else None
    return size, edge


def _find_fraction(crop: int, edge: int) -> float:
    """Return the fraction of the short side that a crop keeps, so that no pixel is lost by rounding."""
    fraction = crop / edge
    if crop / fraction < edge:
        return math.nextafter(fraction, 0.0)
    return fraction


def _read_resampling(processor: Mapping[str, object]) -> str:
    number = read_count(processor, "resample", least=0)
    if number is None:
        return "bilinear"
    if number not in _RESAMPLING:
        raise wrong_value(
            "resample", number, f"must be a filter of Pillow, 0 to {max(_RESAMPLING)}"
        )
    return _RESAMPLING[number]


def of_timm(pretrained: Mapping[str, object], size: tuple[int, int] | None) -> Prepared:
    """Return the preparation that timm's `pretrained_cfg` states."""
    crop = read_positive(pretrained, "crop_pct")
    mode = read_string(pretrained, "crop_mode") or "center"
    filter_name = read_string(pretrained, "interpolation") or "bicubic"
    stated = ("crop_pct", "crop_mode") if crop else ()
    is_central = mode == "center" and crop is not None and crop <= 1
    is_direct = mode == "squash" and crop == 1
    if not size or not (is_central or is_direct):
        return _finished(None, filter_name, pretrained, stated)
    prepared: dict[str, object] = {
        "image_size": list(size),
        "resize": "direct" if is_direct else "short_side",
        "crop_fraction": crop,
        "resize_library": "timm",
    }
    return _finished(prepared, filter_name, pretrained, stated)


def _finished(
    prepared: dict[str, object] | None,
    filter_name: str,
    values: Mapping[str, object],
    names: tuple[str, ...],
) -> Prepared:
    """Add the interpolation, or the closest of ours and a note; without a preparation, note the stated values."""
    if prepared is None:
        stated = ", ".join(f"{name}={values[name]}" for name in names if name in values)
        if not stated:
            return None, ()
        note = (
            f"The images of these weights were prepared by {stated}, which ours cannot do, so their preprocessing is "
            "left unknown: resize and crop_fraction can be given where they are used."
        )
        return None, (note,)

    closest = "bicubic" if filter_name == "lanczos" else "bilinear"
    is_ours = filter_name in INTERPOLATIONS
    prepared["interpolation"] = filter_name if is_ours else closest
    prepared["pixel_range"] = [-1.0, 1.0]
    if is_ours:
        return prepared, ()
    note = f"Their images were resized with {filter_name} interpolation; ours is {closest}, so logits differ a little."
    return prepared, (note,)


def _normalisation(values: Mapping[str, object], mean: str, std: str) -> Normalisation:
    """Return mean and standard deviation of pixels in [0, 1]; ours if nothing is stated.

    Raises:
      ValueError: they are not three numbers each, or a value has another type.
    """
    step = read_positive(values, "rescale_factor")  # between two grey levels
    step = 1 / 255 if step is None else step
    if read_flag(values, "do_rescale") is False:
        step = 1.0
    if read_flag(values, "do_normalize") is False:
        stated = Normalisation((0.0,) * 3, (1.0,) * 3)
    elif values.get(mean) is None and values.get(std) is None:
        return OURS
    else:
        stated = parse_normalisation(values.get(mean), values.get(std))
    if abs(step * 255 - 1) < 1e-3:
        return stated
    return stated.scaled(1 / (255 * step))
