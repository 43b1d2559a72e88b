"""Reading of `config.json` and `preprocessor_config.json` beside weights of timm or Hugging Face.

A value must have the type that its library gives it (`typed_values`). Preparation of
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
from vit_jax.weights.formats.stored import naming, quote
from vit_jax.weights.published import find_finetuning_rule, find_licence
from vit_jax.weights.typed_values import (
    build_value_error,
    read_class_names,
    read_count,
    read_flag,
    read_object,
    read_positive,
    read_size,
    read_string,
    require_three_channels,
)

CONFIG = "config.json"
PREPROCESSOR = "preprocessor_config.json"
# Names of 21,843 classes, twice, take 2 MiB; parsing takes 25 times as much memory.
MAX_BYTES = 4 * 2**20
# Pooling of timm → our pooling; timm states "" for features of all tokens.
POOLS = {
    "token": "token",
    "avg": "gap",
    "map": "map",
}
# Our fields → fields of transformers.
HUGGINGFACE_SIZES = {
    "width": "hidden_size",
    "depth": "num_hidden_layers",
    "mlp_dim": "intermediate_size",
    "num_heads": "num_attention_heads",
}
TIMM_SIZES = {
    "width": "embed_dim",
    "depth": "depth",
    "num_heads": "num_heads",
}
_ACTIVATIONS = {
    "gelu": "exact",
    "gelu_python": "exact",
    "gelu_new": "tanh",
    "gelu_tanh": "tanh",
    "gelu_fast": "tanh",
    "gelu_pytorch_tanh": "tanh",
    "quick_gelu": "quick",
}
# Filters by Pillow's numbers.
_RESAMPLING = {
    0: "nearest",
    1: "lanczos",
    2: "bilinear",
    3: "bicubic",
    4: "box",
    5: "hamming",
}
# Processors in which one number is the short side, not both sides.
_SHORT_SIDE_PROCESSORS = ("CLIP", "Bit")
MULTI_LABEL = "multi_label_classification"
SINGLE_LABEL = "single_label_classification"
Prepared = tuple[dict[str, object] | None, tuple[str, ...]]
"""Preprocessing in the form of our checkpoints, and notes."""
# Fields of Hugging Face. Arrays tell whether there are biases, but a value of another type is a
# mistake.
_CHECKED_FLAGS = ("attention_bias", "mlp_bias", "qkv_bias")


class Sidecar(NamedTuple):
    """Facts beside a file of weights."""

    # Fields of the architecture, and those that the file decides, to compare.
    fields: Mapping[str, object] = {}
    class_names: tuple[str, ...] | None = None  # in the order of the logits
    preprocessing: Mapping[str, object] | None = None  # in the form of our checkpoints
    notes: tuple[str, ...] = ()  # sentences for the report
    normalisation: Normalisation = (
        OURS  # normalisation of the pixels that the file's parameters take
    )
    licence: str = ""  # licence of the family that the configuration names
    finetuning_rule: str = ""  # rule of the recipe finetune for this family
    is_multilabel: bool = False  # images may have several labels: sigmoid instead of softmax


def read_sidecar(folder: pathlib.Path, architecture: str | None = None) -> Sidecar:
    """Return the facts that the files of a folder state, if any.

    `architecture` replaces the name of the network.

    Raises:
      ValueError: one is no JSON object, has a value of another type, or names a network or an
        activation that is not read.
    """
    config = _read(folder / CONFIG)
    if not config:
        if architecture is None:
            return Sidecar()
        return build_sidecar(architecture)

    is_timm = "pretrained_cfg" in config or "architecture" in config
    if architecture is not None:
        name_field = "architecture" if is_timm else "model_type"
        config[name_field] = architecture

    if is_timm:
        with naming(str(folder / CONFIG)):
            return _parse_timm(config)

    processor = _read(folder / PREPROCESSOR)
    with naming(str(folder / CONFIG)):
        sidecar = _parse_huggingface(config)
    with naming(str(folder / PREPROCESSOR)):
        tower = {**config, **read_object(config, "vision_config")}
        preprocessing, notes = read_huggingface_preparation(tower, processor)
        normalisation = _read_normalisation(processor, "image_mean", "image_std")
    return sidecar._replace(preprocessing=preprocessing, notes=notes, normalisation=normalisation)


def build_sidecar(architecture: str) -> Sidecar:
    """Return the facts that the name of a network states, for weights without a configuration."""
    note = (
        "WARNING: there is no config.json, so pixels in [-1, 1] are assumed, which other families "
        "do not have. Give the folder with both files."
    )
    if architecture in architectures.list_model_types():
        fields = architectures.find_huggingface_fields(architecture, {})
        return Sidecar(fields, notes=(note,))

    current_name = architectures.find_current_name(architecture)
    fields = architectures.find_timm_fields(current_name, {})
    return Sidecar(
        fields,
        notes=(note,),
        licence=find_licence(architecture),
        finetuning_rule=find_finetuning_rule(architecture),
    )


def _read(path: pathlib.Path) -> dict[str, object]:
    value = {}
    if path.exists():
        value = read_json(path, MAX_BYTES)
    if not isinstance(value, dict):
        raise ValueError(f"{path} is no JSON object but {type(value).__name__}.")
    return mark_stored(value, str(path), ())  # type: ignore[no-any-return]


def _parse_huggingface(config: Mapping[str, object]) -> Sidecar:
    """Return the facts of `config.json`."""
    model_type = read_string(config, "model_type")
    # A model with a text tower has another object for the network of images.
    config = {**config, **read_object(config, "vision_config")}
    named = architectures.find_huggingface_fields(model_type, config)
    require_three_channels("num_channels", config.get("num_channels"))
    for flag in _CHECKED_FLAGS:
        read_flag(config, flag)
    labels = read_class_names(config, "id2label")
    activation = read_string(config, "hidden_act")
    is_gated = activation in ("silu", "swish") or read_flag(config, "use_swiglu_ffn") is True
    if read_flag(config, "use_gated_mlp") is True and not is_gated:
        raise ValueError(
            f"its gated MLPs have the activation {config.get('hidden_act')!r}: "
            "vit_jax has silu only."
        )

    fields: dict[str, object] = {
        "image_size": read_size(config, "image_size"),
        "patch_size": read_size(config, "patch_size"),
        "num_classes": len(labels) if labels is not None else None,
    }
    for ours, theirs in HUGGINGFACE_SIZES.items():
        fields[ours] = read_count(config, theirs)
    epsilon = read_positive(config, "layer_norm_eps")
    fields["layer_norm_epsilon"] = epsilon or read_positive(config, "rms_norm_eps")
    fields["gelu"] = None
    if not is_gated:
        fields["gelu"] = _read_gelu(activation)
    fields |= named

    return Sidecar(
        fields=_select_known(fields),
        class_names=_select_given_names(labels),
        licence=find_licence(model_type or ""),
        finetuning_rule=find_finetuning_rule(model_type or ""),
        is_multilabel=read_problem_type(config),
    )


def read_problem_type(config: Mapping[str, object]) -> bool:
    """Return whether images may have several labels.

    Hugging Face has the field, and we write it for timm.

    Raises:
      ValueError: it states a regression, or is unknown.
    """
    stated = read_string(config, "problem_type")
    if stated not in (None, SINGLE_LABEL, MULTI_LABEL):
        raise ValueError(
            f"problem_type={quote(stated)}: must be {SINGLE_LABEL} or {MULTI_LABEL}, "
            "since outputs are classes. For the features of another network remove it from "
            "the file, and replace the head."
        )
    return stated == MULTI_LABEL


def _parse_timm(config: Mapping[str, object]) -> Sidecar:
    """Return the facts of timm's `config.json`."""
    pretrained = read_object(config, "pretrained_cfg") or config
    arguments = read_object(config, "model_args")

    stated_name = read_string(config, "architecture") or ""
    name = architectures.find_current_name(stated_name)
    named = architectures.find_timm_fields(name, arguments)
    family = architectures.require_compared(name)
    require_three_channels("in_chans", arguments.get("in_chans"))

    size = read_size(arguments, "img_size") or _read_input_size(pretrained)
    width = read_count(arguments, "embed_dim")
    mlp_ratio = read_positive(arguments, "mlp_ratio")
    mlp_dim = _multiply(width, mlp_ratio)
    if re.search(family.doubled_ratio, name):
        mlp_dim = None  # the file decides
    fields: dict[str, object] = {
        "image_size": size,
        "patch_size": read_size(arguments, "patch_size"),
        "num_classes": read_count(config, "num_classes", least=0),
        "mlp_dim": mlp_dim,
        "gelu": _read_gelu(read_string(arguments, "act_layer")),
        "pool": _read_pool(config) or _read_pool(arguments),
        "pool_num_heads": read_count(arguments, "attn_pool_num_heads"),
    }
    for ours, theirs in TIMM_SIZES.items():
        fields[ours] = read_count(arguments, theirs)

    preprocessing, notes = read_timm_preparation(pretrained, size)
    if family.note:
        notes = (*notes, family.note)
    labelled = pretrained
    if "label_names" in config:
        labelled = config
    labels = read_class_names(labelled, "label_names")
    return Sidecar(
        fields=named | _select_known(fields),
        class_names=_select_given_names(labels),
        preprocessing=preprocessing,
        notes=notes,
        normalisation=_read_normalisation(pretrained, "mean", "std"),
        licence=find_licence(f"{name}.{pretrained.get('tag', '')}"),
        finetuning_rule=find_finetuning_rule(f"{name}.{pretrained.get('tag', '')}"),
        is_multilabel=read_problem_type(config),
    )


def _read_pool(values: Mapping[str, object]) -> str | None:
    """Return our pooling for timm's; None if it is not stated, or the weights give all tokens."""
    pool = read_string(values, "global_pool")
    if not pool:
        return None
    if pool not in POOLS:
        raise ValueError(
            f"global_pool={quote(pool)}: must be one of {', '.join(POOLS)}. Take other weights."
        )
    return POOLS[pool]


def _read_input_size(pretrained: Mapping[str, object]) -> tuple[int, int] | None:
    """Return height and width of timm's `input_size`, which begins with the number of channels."""
    stated = pretrained.get("input_size")
    if stated is None:
        return None
    if not isinstance(stated, list) or len(stated) != 3:
        raise build_value_error("input_size", stated, "must be channels, height and width")
    require_three_channels("input_size[0]", stated[0])
    return read_size({"input_size": stated[1:]}, "input_size")


def _multiply(width: int | None, ratio: float | None) -> int | None:
    """Return the product rounded down, as timm does; a ratio is written with rounding errors."""
    if width is None or ratio is None:
        return None
    with contextlib.suppress(OverflowError, ValueError):  # numbers that are not finite
        return int(width * ratio + 1e-6)
    return None


def _read_gelu(activation: str | None) -> str | None:
    """Return our form of GELU for the name of an activation."""
    if activation is None:
        return None
    if activation not in _ACTIVATIONS:
        raise ValueError(
            f"it names the activation {quote(activation)}; our networks have GELU only, "
            f"known as {', '.join(_ACTIVATIONS)}."
        )
    return _ACTIVATIONS[activation]


def _select_known(fields: Mapping[str, object]) -> dict[str, object]:
    return {name: value for name, value in fields.items() if value is not None}


def _select_given_names(labels: tuple[str, ...] | None) -> tuple[str, ...] | None:
    """Return names of classes; None if there are none, or transformers made them up."""
    if labels is None:
        return None
    made_up = tuple(f"LABEL_{number}" for number in range(len(labels)))
    if labels == made_up:
        return None
    return labels


# Preparation of images: resized directly, or the middle cropped; pixels in [-1, 1].


def read_huggingface_preparation(
    config: Mapping[str, object], processor: Mapping[str, object]
) -> Prepared:
    """Return the preparation that `preprocessor_config.json` states.

    Images are resized to its size, or to the size of `config.json`.
    """
    if not processor:  # no file states the resizing
        return None, ()

    size, edge = _read_resizing(config, processor)
    is_cropped = read_flag(processor, "do_center_crop") is True
    stated_crop = read_size(processor, "crop_size")
    crop = size
    if is_cropped:
        crop = stated_crop
    prepared: dict[str, object] | None = None
    if read_flag(processor, "do_resize") is not False and crop:
        prepared = _describe_crop(crop, size, edge)

    stated = ("do_resize", "size", "do_center_crop", "crop_size")
    filter_name = _read_resampling(processor)
    return _add_interpolation(prepared, filter_name, processor, stated)


def _describe_crop(
    crop: tuple[int, int],
    size: tuple[int, int] | None,
    edge: int | None,
) -> dict[str, object] | None:
    """Return our preparation with a crop of an image that is resized to `size` or a short `edge`.

    It is None if ours cannot do it.
    """
    if crop == size:
        return {
            "image_size": list(crop),
            "resize": "direct",
            "crop_fraction": 1.0,
        }

    height, width = crop
    if not edge or height != width or not 0 < height <= edge:
        return None
    return {
        "image_size": list(crop),
        "resize": "short_side",
        "crop_fraction": _find_fraction(height, edge),
    }


def _read_resizing(
    config: Mapping[str, object], processor: Mapping[str, object]
) -> tuple[tuple[int, int] | None, int | None]:
    """Return the size of both sides or of the short side after resizing, before a crop."""
    stated = processor.get("size")
    size = read_size(processor, "size")
    kind = read_string(processor, "image_processor_type")
    kind = kind or read_string(processor, "feature_extractor_type") or ""
    if stated is None:
        return read_size(config, "image_size"), None
    if kind.startswith(_SHORT_SIDE_PROCESSORS) and type(stated) is int:
        return None, stated
    if not isinstance(stated, dict):
        return size, None
    edge = read_count(stated, "shortest_edge")
    return size, edge


def _find_fraction(crop: int, edge: int) -> float:
    """Return the fraction of the short side that a crop keeps; rounding loses no pixel."""
    fraction = crop / edge
    if crop / fraction < edge:
        return math.nextafter(fraction, 0.0)
    return fraction


def _read_resampling(processor: Mapping[str, object]) -> str:
    number = read_count(processor, "resample", least=0)
    if number is None:
        return "bilinear"
    if number not in _RESAMPLING:
        rule = f"must be a filter of Pillow, 0 to {max(_RESAMPLING)}"
        raise build_value_error("resample", number, rule)
    return _RESAMPLING[number]


def read_timm_preparation(
    pretrained: Mapping[str, object], size: tuple[int, int] | None
) -> Prepared:
    """Return the preparation that timm's `pretrained_cfg` states."""
    crop = read_positive(pretrained, "crop_pct")
    mode = read_string(pretrained, "crop_mode") or "center"
    filter_name = read_string(pretrained, "interpolation") or "bicubic"
    stated = ("crop_pct", "crop_mode") if crop else ()
    is_central = mode == "center" and crop is not None and crop <= 1
    is_direct = mode == "squash" and crop == 1
    if not size or not (is_central or is_direct):
        return _add_interpolation(None, filter_name, pretrained, stated)

    prepared: dict[str, object] = {
        "image_size": list(size),
        "resize": "direct" if is_direct else "short_side",
        "crop_fraction": crop,
        "resize_library": "timm",
    }
    return _add_interpolation(prepared, filter_name, pretrained, stated)


def _add_interpolation(
    prepared: dict[str, object] | None,
    filter_name: str,
    values: Mapping[str, object],
    names: tuple[str, ...],
) -> Prepared:
    """Add the interpolation, or our closest one and a note.

    Without a preparation, the note has the stated values.
    """
    if prepared is None:
        return None, _describe_unknown(values, names)

    prepared["interpolation"] = filter_name
    prepared["pixel_range"] = [-1.0, 1.0]
    if filter_name in INTERPOLATIONS:
        return prepared, ()

    closest = "bilinear"
    if filter_name == "lanczos":
        closest = "bicubic"
    prepared["interpolation"] = closest
    note = (
        f"Their images were resized with {filter_name} interpolation; vit_jax uses {closest}, "
        "so logits differ a little."
    )
    return prepared, (note,)


def _describe_unknown(values: Mapping[str, object], names: tuple[str, ...]) -> tuple[str, ...]:
    """Return a note on a stated preparation that vit_jax cannot do, if there is one."""
    stated = [f"{name}={values[name]}" for name in names if name in values]
    if not stated:
        return ()
    note = (
        f"The images of these weights were prepared by {', '.join(stated)}, which vit_jax cannot "
        "do, so their preprocessing is unknown: resize and crop_fraction can be given where "
        "they are used."
    )
    return (note,)


def _read_normalisation(values: Mapping[str, object], mean: str, std: str) -> Normalisation:
    """Return mean and standard deviation of pixels in [0, 1]; `OURS` if nothing is stated.

    Raises:
      ValueError: they are not three numbers each, or a value has another type.
    """
    step = read_positive(values, "rescale_factor")  # between two grey levels
    if step is None:
        step = 1 / 255
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
    return stated.scale(1 / (255 * step))
