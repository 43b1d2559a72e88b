"""Models by name with initial parameters, models of stored weights, and their image preparation."""

import dataclasses
import functools
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from vit_jax import pytree
from vit_jax.api.model import Model, make_preparation_error, number_classes
from vit_jax.api.model_options import (
    LoadOptions,
    ModelOptions,
    Resize,
    require_known_options,
    split_load_options,
)
from vit_jax.config import (
    AdaptConfig,
    Architecture,
    ModelConfig,
    adapt_architecture,
    build_architecture,
    from_dict,
)
from vit_jax.config.field_checks import is_value_range
from vit_jax.config.network_options import ComputeDtype
from vit_jax.config.schema import (
    INTERPOLATIONS,
    ChannelWeights,
    Interpolation,
    PositionResize,
)
from vit_jax.config.sizes import RGB_CHANNELS
from vit_jax.data.decoding.bands import BandChoice, read_bands
from vit_jax.data.subset import TrainingData
from vit_jax.data.transforms import EvaluationTransform
from vit_jax.models import abstract_model, build_model
from vit_jax.storage.files import JsonObject, use_compilation_cache
from vit_jax.weights.description import choose_orientation, describe_preparation
from vit_jax.weights.fit import fit
from vit_jax.weights.folding import read_normalisation
from vit_jax.weights.head_edits import cut_after_layer, remove_head, set_classifier
from vit_jax.weights.image_channels import fit_channels
from vit_jax.weights.library_config import Preprocessing
from vit_jax.weights.load import Weights, load_weights, resize_weights

if TYPE_CHECKING:
    from vit_jax.evals.least_squares import LinearClassifier
    from vit_jax.evals.logistic import LogisticClassifier

_FOREIGN_ARGUMENTS = {
    "pretrained": "load_model(source) reads weights",
    "checkpoint_path": "load_model(source) reads weights",
    "img_size": "give image_size=",
    "input_size": "give image_size=",
    "in_chans": "give channels=",
}
"""Arguments of other libraries, and what to do here."""

_BOTH_SIDES = {"resize": "direct", "crop_fraction": 1.0}
_AUTHORS_PREPARATION: Mapping[str, Preprocessing] = {
    "released": _BOTH_SIDES,
    "bit": _BOTH_SIDES,
    "big_vision": {"resize": "short_side", "crop_fraction": 0.875},
}
"""Preparation of test images in the authors' code, by format of files that do not state one."""
_ASSUMED_PREPARATION = (
    "Images are prepared as by the authors of the format, with --images.resize={}."
)


def create_model(
    name: str,
    *,
    num_classes: int = 1000,
    image_size: int | tuple[int, int] = 224,
    seed: int = 0,
    compute_dtype: ComputeDtype = "float32",
    resize: Resize = "short_side",
    crop_fraction: float = 0.875,
    interpolation: Interpolation | None = None,
    channels: int = RGB_CHANNELS,
    value_range: tuple[float, float] | None = None,
    **options: Unpack[ModelOptions],
) -> Model:
    """Build a network with initial parameters.

    Args:
      name: "ViT-B/16", "R50x1", "R50+ViT-B/16"; see `config.variants`.
      num_classes: length of the logits; 0 for a network that ends in its features.
      image_size: in pixels, one side of a square or (height, width).
      seed: random seed of the initial values, which are those of a pre-training run with this seed.
      compute_dtype: "float32" or "bfloat16"; parameters and logits are float32.
      resize: how `preprocess` prepares images: "short_side" or "direct".
      crop_fraction: share of the short side that the crop keeps; 1 with "direct".
      interpolation: "bilinear" or "bicubic", as `InputConfig.test_interpolation`.
      channels: channels of the images, 1 to 32; other numbers than 3 are bands as stored.
      value_range: values of bands that become -1 and 1, of deep RGB 0 and 255; None: (0, 255).
      **options: other fields of `config.ModelConfig`, such as depth=6, pool="gap" or
        block="package.module:name".

    Raises:
      ValueError: an unknown name or option, or numbers that do not fit together.
    """
    require_known_options(create_model, options, ModelOptions.__optional_keys__, _FOREIGN_ARGUMENTS)
    num_classes = _require_integer("num_classes", num_classes, "from 0, where 0 gives features")
    channels = _require_integer("channels", channels, "from 1 to 32")

    fields = {"name": name, "compute_dtype": compute_dtype, **options}
    config = from_dict(ModelConfig, fields, "model.")
    architecture = build_architecture(
        config,
        image_size=_to_height_and_width(image_size),
        num_classes=num_classes,
        channels=channels,
    )
    source = f"{name} with initial parameters of seed {seed}"
    size = architecture.image_size
    transform = build_transform(
        resize, crop_fraction, interpolation, size, source, value_range=value_range
    )
    transform = _set_channels(transform, channels)

    use_compilation_cache(True)
    return Model(
        module=_initialise(architecture, jax.random.key(seed)),
        architecture=architecture,
        class_names=number_classes(num_classes),
        transform=transform,
        source=source,
    )


def _require_integer(name: str, value: int, allowed: str) -> int:
    """Return the value; raise ValueError for one that is no integer, or negative."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 0:
        raise ValueError(f"{name}={value!r}: must be an integer {allowed}.")
    return int(value)


def _set_channels(transform: EvaluationTransform, channels: int) -> EvaluationTransform:
    """Return the preparation for other channels than RGB, by a range of values."""
    if channels == RGB_CHANNELS:
        return transform
    low, high = transform.value_range or (0.0, 255.0)
    bands = BandChoice(channels).set_range(low, high)
    return dataclasses.replace(transform, bands=bands)


@functools.partial(jax.jit, static_argnames="architecture")
def _initialise(architecture: Architecture, key: jax.Array) -> nnx.Module:
    """Return the network with initial parameters; compiled once for each architecture."""
    return build_model(architecture, key)


def load_model(
    source: str | pathlib.Path,
    *,
    num_classes: int | None = None,
    image_size: int | tuple[int, int] | None = None,
    class_names: Sequence[str] | None = None,
    polyak: bool = True,
    allow_code: str | Iterable[str] = (),
    facts: JsonObject | None = None,
    **options: Unpack[LoadOptions],
) -> Model:
    """Load weights of any format as a network that is ready to use.

    Args:
      source: a workdir of a run; a .npz or .safetensors file, or a folder with one; or
        "hf://owner/name".
      num_classes: replaces the head, with its hidden layer, by a linear one of zeros; 0 leaves
        features only.
      image_size: input size of the network in pixels, one side of a square or (height, width);
        learned positions are resized.
      class_names: for a file that does not hold them.
      polyak: use the Polyak average of a workdir if there is one.
      allow_code: packages whose code the source may name and this program may run, ("mypackage",);
        (): none.
      facts: values that the file does not state, as a mapping.
      **options: values that the file does not state, by the names in `vit_jax.weights.OPTIONS`:
        num_heads, gelu, ...; and other arguments of `from_weights`: compute_dtype, resize,
        crop_fraction, interpolation, exif_orientation, value_range, position_resize, channels,
        channel_weights.

    Raises:
      ValueError: an unknown or damaged file, values that are missing or do not fit the network.
      TypeError: an unknown option.
      CodeNotAllowed: a ValueError; the network needs code of a package that is not allowed.
    """
    require_known_options(load_model, options, LoadOptions.__optional_keys__, error=TypeError)
    build_options, stated = split_load_options(options)
    stated |= facts or {}
    weights = load_weights(
        source,
        polyak=polyak,
        class_names=class_names,
        allow_code=allow_code,
        keep_size=image_size is not None,
        **stated,
    )
    return from_weights(
        weights,
        num_classes=num_classes,
        image_size=image_size,
        **build_options,
    )


def from_weights(
    weights: Weights,
    *,
    num_classes: int | None = None,
    image_size: int | tuple[int, int] | None = None,
    compute_dtype: ComputeDtype = "float32",
    resize: Resize | None = None,
    crop_fraction: float | None = None,
    interpolation: Interpolation | None = None,
    exif_orientation: bool | None = None,
    value_range: tuple[float, float] | None = None,
    position_resize: PositionResize = "library",
    channels: int | None = None,
    channel_weights: ChannelWeights = "cyclic",
    sharding: jax.sharding.Sharding | None = None,
    data: str = "",
) -> Model:
    """Build the network of weights, without dropout, and its preparation of images.

    Args:
      weights: from `vit_jax.weights.load_weights`.
      num_classes: the same as for `load_model`.
      image_size: the same as for `load_model`.
      compute_dtype: "float32" or "bfloat16".
      resize: "short_side" or "direct", for weights that do not state how images are prepared.
      crop_fraction: share of the short side that the crop keeps, for the same.
      interpolation: "bilinear" or "bicubic", for weights that do not state an antialiased filter.
      exif_orientation: turn photographs upright by Exif; None: as in training, else upright.
      value_range: values of files of more than 8 bits that become 0 and 255; None: as stated.
      position_resize: a value of `AdaptConfig.position_resize`; "library": that of the names.
      channels: channels of the images, 1 to 32, as for `create_model`; None: those of the weights.
      channel_weights: a value of `AdaptConfig.channel_weights`.
      sharding: layout of every parameter; None for the default device.
      data: datasets of the images, for a default of exif_orientation; "": image files.

    Raises:
      ValueError: an unknown dtype, or values that do not fit the network or contradict the weights.
    """
    weights = _fit_images(weights, image_size, position_resize, channels, channel_weights)
    weights, architecture, notes = _adapt(weights, num_classes, compute_dtype, position_resize)
    transform, assumption = _build_preparation(
        weights,
        architecture,
        data,
        resize=resize,
        crop_fraction=crop_fraction,
        interpolation=interpolation,
        exif_orientation=exif_orientation,
        value_range=value_range,
    )
    model = Model(
        module=_build_module(architecture, weights.parameters, sharding),
        architecture=architecture,
        class_names=weights.class_names or number_classes(architecture.num_classes),
        transform=transform,
        source=weights.source,
        notes=(*notes, *assumption),
        is_multilabel=weights.is_multilabel and num_classes is None,
    )
    return _add_origin(model, weights)


def _add_origin(model: Model, weights: Weights) -> Model:
    """Return the model with what it keeps of the weights for files that are made of it."""
    return dataclasses.replace(
        model,
        training=weights.training,
        normalisation=read_normalisation(weights.preprocessing),
        licence=weights.licence,
        finetuning_rule=weights.finetuning_rule,
    )


def _fit_images(
    weights: Weights,
    image_size: int | tuple[int, int] | None,
    position_resize: PositionResize,
    channels: int | None,
    channel_weights: ChannelWeights,
) -> Weights:
    """Return the weights for images of this size and with these channels; None: unchanged."""
    if image_size is not None:
        weights = resize_weights(weights, _to_height_and_width(image_size), position_resize)
    if channels is None or channels == weights.architecture.channels:
        return weights
    channels = _require_integer("channels", channels, "from 1 to 32")
    return fit_channels(weights, channels, channel_weights, "channel_weights")


def _build_preparation(
    weights: Weights,
    architecture: Architecture,
    data: str,
    **requested: Any,
) -> tuple[EvaluationTransform | None, tuple[str, ...]]:
    """Return the preparation of images that weights or the caller state, and notes on it."""
    preprocessing, assumption = _find_preparation(
        weights,
        requested["resize"],
        requested["crop_fraction"],
        data,
    )
    transform = build_stored_transform(
        preprocessing,
        architecture.image_size,
        weights.source,
        **requested,
    )
    if transform is not None and transform.bands is None:
        transform = _set_channels(transform, architecture.channels)
    return transform, assumption


def _find_preparation(
    weights: Weights,
    resize: Resize | None,
    crop_fraction: float | None,
    data: str,
) -> tuple[Mapping[str, Any], tuple[str, ...]]:
    """Return the preparation of images that weights state, or that of their authors, with a note.

    The authors' is not used if the caller requests another. The orientation is always stated.
    """
    stated = weights.preprocessing or {}
    states_preparation = any(field != "bands" for field in stated)
    notes: tuple[str, ...] = ()
    preparation = _AUTHORS_PREPARATION.get(weights.format)
    is_requested = resize is not None or crop_fraction is not None
    if not states_preparation and not is_requested and preparation is not None:
        stated = {**stated, **preparation}
        notes = (_ASSUMED_PREPARATION.format(preparation["resize"]),)
    is_upright = choose_orientation(stated, weights.training, data)
    return {**stated, "exif_orientation": is_upright}, notes


def _adapt(
    weights: Weights,
    num_classes: int | None,
    compute_dtype: str,
    position_resize: str,
) -> tuple[Weights, Architecture, tuple[str, ...]]:
    """Return the weights with the number of classes, their architecture, and notes on them."""
    changes = {"compute_dtype": compute_dtype, "position_resize": position_resize}
    architecture = _adapt_architecture(weights.architecture, num_classes, changes)
    notes = (*weights.notes, *weights.warnings())
    if num_classes is None:
        return weights, architecture, notes
    weights, note = _replace_head(weights, architecture)
    return weights, architecture, (*notes, note)


def _adapt_architecture(
    stored: Architecture,
    num_classes: int | None,
    changes: Mapping[str, str],
) -> Architecture:
    """Return the architecture with these changes and without dropout.

    With a number of classes the head is a new one; otherwise it stays, also one of patches.
    """
    if num_classes is None:
        fields = {**changes, "dropout_fraction": 0.0, "head": "keep"}
        num_outputs = stored.num_classes
    else:
        fields = {**changes, "dropout_fraction": 0.0, "head": "zero"}
        num_outputs = num_classes

    architecture = adapt_architecture(
        stored,
        from_dict(AdaptConfig, fields, "model."),
        image_size=stored.image_size,
        num_classes=num_outputs,
    )
    if num_classes is not None:
        return architecture
    return dataclasses.replace(architecture, patch_outputs=stored.patch_outputs)


def _replace_head(weights: Weights, architecture: Architecture) -> tuple[Weights, str]:
    """Return the weights for an architecture with a new head, which is zero, and a summary."""
    headless = remove_head(weights, keep_hidden=False)
    fitted = fit(headless, architecture)
    replaced = dataclasses.replace(
        weights,
        architecture=architecture,
        parameters=fitted.parameters,
        class_names=None,
    )
    return replaced, fitted.summary()


def _build_module(
    architecture: Architecture,
    parameters: Mapping[str, np.ndarray],
    sharding: jax.sharding.Sharding | None,
) -> Any:
    """Return the module with these parameters."""

    def place(name: str, leaf: Any) -> jax.Array:
        parameter = parameters[name]
        if sharding is None:
            return jnp.asarray(parameter)
        return jax.make_array_from_callback(leaf.shape, sharding, lambda index: parameter[index])

    return pytree.map_with_names(place, abstract_model(architecture))


def _to_height_and_width(image_size: int | tuple[int, int]) -> tuple[int, int]:
    """Return height and width; a number is the side of a square."""
    if isinstance(image_size, int):
        return image_size, image_size
    height, width = image_size
    return height, width


def attach_probe(
    weights: Weights,
    transform: EvaluationTransform,
    layer: str,
    classifier: "LogisticClassifier | LinearClassifier",
    class_names: tuple[str, ...],
    training: TrainingData | None,
) -> Weights:
    """Return weights whose last layer is a classifier of features.

    Args:
      weights: weights of the network that computed the features.
      transform: preparation of their images.
      layer: layer of the features, one that a network can end in.
      classifier: classifier of the features.
      class_names: names of its classes.
      training: the data that it was fitted on.
    """
    from vit_jax.evals.logistic import LogisticClassifier

    base = cut_after_layer(weights, layer)
    kernel, bias = classifier.to_linear()
    fitted = set_classifier(base, kernel, bias, class_names)

    normalisation = read_normalisation(weights.preprocessing)
    preparation = describe_preparation(transform, normalisation)
    has_several_labels = False
    if isinstance(classifier, LogisticClassifier):
        has_several_labels = classifier.has_several_labels
    return dataclasses.replace(
        fitted,
        preprocessing=preparation,
        training=training,
        has_several_labels=has_several_labels,
    )


def build_stored_transform(
    stored: Preprocessing | None,
    image_size: tuple[int, int],
    source: str,
    *,
    resize: str | None = None,
    crop_fraction: float | None = None,
    interpolation: str | None = None,
    exif_orientation: bool | None = None,
    value_range: tuple[float, float] | None = None,
) -> EvaluationTransform | None:
    """Return the preparation of images that the weights (`stored`) or the caller state.

    The caller may override the orientation and the range of values of the weights: both depend on
    how files are stored. None if neither states a preparation.

    Raises:
      ValueError: another value is not allowed, contradicts the weights, or lacks the others.
    """
    requested = {
        "resize": resize,
        "crop_fraction": crop_fraction,
        "interpolation": interpolation,
    }
    known = _merge_preparation(stored or {}, requested)
    if not {"resize", "crop_fraction"} <= known.keys():
        options = (*requested.values(), exif_orientation, value_range)
        if any(option is not None for option in options):
            raise make_preparation_error(source)
        return None

    if exif_orientation is None:
        exif_orientation = known.get("exif_orientation") is True
    is_requested_range = value_range is not None
    if value_range is None:
        value_range = known.get("value_range")
    transform = build_transform(
        known["resize"],
        known["crop_fraction"],
        known.get("interpolation"),
        image_size,
        source,
        exif_orientation,
        value_range,
    )
    bands = read_bands(known)
    if bands is not None:
        if is_requested_range:
            assert transform.value_range is not None
            bands = bands.set_range(*transform.value_range)
        transform = dataclasses.replace(transform, bands=bands)
    library: Literal["timm", "huggingface"] = "huggingface"
    if known.get("resize_library") == "timm":
        library = "timm"
    return dataclasses.replace(transform, library=library)


def _merge_preparation(stored: Preprocessing, requested: Preprocessing) -> dict[str, Any]:
    """Return the values of a preparation that the weights or the caller state.

    Raises:
      ValueError: they contradict each other.
    """
    known = {field: value for field, value in stored.items() if value is not None}

    for field, value in requested.items():
        if value is None:
            continue
        if known.setdefault(field, value) != value:
            raise ValueError(
                f"{field}={value}: the weights were trained with {field}={known[field]}. "
                f"Remove {field}."
            )

    if known.get("resize") == "direct":
        known.setdefault("crop_fraction", 1.0)
    return known


def build_transform(
    resize: Any,
    fraction: Any,
    interpolation: Any,
    image_size: tuple[int, int],
    source: str,
    exif_orientation: bool = False,
    value_range: Any = None,
) -> EvaluationTransform:
    """Return the preparation of images with these values, which a foreign file may state.

    Raises:
      ValueError: a value is not allowed, or contradicts another one.
    """
    problem = (
        _find_resizing_problem(resize, fraction)
        or _find_interpolation_problem(interpolation)
        or _find_range_problem(value_range)
    )
    if problem:
        raise ValueError(f"{source}: {problem}")

    if value_range is not None:
        low, high = value_range
        value_range = (low, high)
    return EvaluationTransform(
        image_size,
        resize,
        float(fraction),
        exif_orientation=exif_orientation,
        value_range=value_range,
        interpolation=interpolation,
    )


def _find_resizing_problem(resize: Any, fraction: Any) -> str:
    """Return the problem of a way to resize and its crop, or ""."""
    if resize not in ("direct", "short_side"):
        return f"resize={resize!r}: must be direct or short_side."
    if type(fraction) not in (int, float) or not 0 < fraction <= 1:
        return f"crop_fraction={fraction!r}: must be a number in (0, 1]."
    if resize == "direct" and fraction != 1:
        return f"crop_fraction={fraction}: has no effect with resize=direct. Remove it."
    return ""


def _find_interpolation_problem(interpolation: object) -> str:
    """Return the problem of an interpolation, or ""."""
    if interpolation in (None, *INTERPOLATIONS):
        return ""
    known = " or ".join(INTERPOLATIONS)
    return f"interpolation={interpolation!r}: must be {known}, or None."


def _find_range_problem(value_range: object) -> str:
    """Return the problem of a range of values, or ""."""
    if value_range is None or is_value_range(value_range):
        return ""
    return f"value_range={value_range!r}: must be two finite numbers, low < high."
