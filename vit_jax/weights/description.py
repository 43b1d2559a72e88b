"""The metadata of weights, in every format that we write and in the checkpoints of runs.

It describes the network, its classes, the preparation of images, and the data that the weights were
trained on, so that they can later be evaluated on images that they have not seen.
"""

import contextlib
import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vit_jax.config.architecture import Architecture
from vit_jax.config.data_kinds import is_catalogued
from vit_jax.config.networks import read_architecture
from vit_jax.config.parsing import find_references, from_dict
from vit_jax.data.subset import TrainingData
from vit_jax.imports.references import StoredReference
from vit_jax.models.lora import Lora
from vit_jax.weights.folding import OURS, Normalisation, describe_normalisation

if TYPE_CHECKING:
    from vit_jax.data.transforms import EvaluationTransform

FORMAT_VERSION = 1  # version of the metadata that this program writes
MAX_LAYERS = 10_000
MAX_STAGES = 8


def describe(
    a: Architecture,
    class_names: Sequence[str] | None,
    preprocessing: Mapping[str, object] | None,
    training: TrainingData | None,
    licence: str = "",
    *,
    finetuning_rule: str = "",
    is_multilabel: bool = False,
) -> dict[str, object]:
    """Return the metadata of weights. Unknown values are None, an unknown licence is "".

    Args:
      a: the network.
      class_names: in the order of the logits.
      preprocessing: preparation of images, from `describe_preparation`.
      training: data that the weights were trained on.
      licence: licence of the pre-trained weights that these were made of.
      finetuning_rule: rule of the recipe finetune for the family of these pre-trained weights.
      is_multilabel: images may have several labels.
    """
    metadata: dict[str, object] = {
        "format_version": FORMAT_VERSION,
        "architecture": dataclasses.asdict(a),
        **_compute_counts(a),
        "class_names": None,
        "preprocessing": preprocessing,
        "training": None,
    }
    if class_names is not None:
        metadata["class_names"] = list(class_names)
    if training is not None:
        metadata["training"] = dataclasses.asdict(training)
    if licence:
        metadata["licence"] = licence
    if finetuning_rule:
        metadata["finetuning_rule"] = finetuning_rule
    if is_multilabel:
        metadata["is_multilabel"] = True
    return metadata


def parse_licence(metadata: Mapping[str, object]) -> str:
    """Return the licence in metadata; "" if there is none."""
    licence = metadata.get("licence")
    if isinstance(licence, str) and re.fullmatch(r"[\w.-]{1,60}", licence):
        return licence
    return ""


def states_several_labels(metadata: Mapping[str, object]) -> bool:
    """Return whether metadata state that images may have several labels."""
    return metadata.get("is_multilabel") is True


def describe_preparation(
    transform: "EvaluationTransform",
    normalisation: Normalisation = OURS,
) -> dict[str, object]:
    """Return the preparation of images, to pixels in [-1, 1], as metadata.

    The normalisation is the one that is folded into the weights.
    """
    crop_fraction = transform.crop_fraction
    if transform.resize == "direct":
        crop_fraction = 1.0
    value_range = transform.value_range
    bands = {}
    if transform.bands is not None:
        bands = {"bands": dataclasses.asdict(transform.bands)}
    return {
        "image_size": list(transform.image_size),
        "resize": transform.resize,
        "crop_fraction": crop_fraction,
        "interpolation": transform.interpolation,
        "resize_library": transform.library,
        "pixel_range": [-1.0, 1.0],
        "exif_orientation": transform.exif_orientation,
        "value_range": None if value_range is None else list(value_range),
        **bands,
        **describe_normalisation(normalisation),
    }


def choose_orientation(
    preprocessing: Mapping[str, object] | None,
    training: TrainingData | None,
    data: str = "",
) -> bool:
    """Return True if photographs are turned upright by their Exif data.

    All verbs read a file into the same pixels by this choice. Files are turned, unless the weights
    were trained on files that were not. Datasets of a catalogue, whose published results ignore
    Exif data, are turned only for weights that state it.

    Args:
      preprocessing: preparation of images as the weights state it.
      training: data that the weights were trained on.
      data: dataset, or several with commas between them; "": image files.
    """
    stated = (preprocessing or {}).get("exif_orientation")
    if is_catalogued(data):
        return stated is True
    is_trained_on_files = training is None or not is_catalogued(training.data)
    return not (stated is False and is_trained_on_files)


def _compute_counts(a: Architecture) -> dict[str, object]:
    """Return numbers that follow from the network, for readers who do not build it.

    They are compared when metadata is read.
    """
    return {"grid": list(a.grid), "num_class_tokens": a.num_class_tokens}


def parse_architecture(metadata: Mapping[str, object]) -> Architecture:
    """Return the architecture in metadata.

    Raises:
      ValueError: the metadata is from a newer version, has no architecture, or contradicts itself.
    """
    version = metadata.get("format_version", FORMAT_VERSION)
    if type(version) is not int or version > FORMAT_VERSION:
        raise ValueError(
            f"its metadata is of version {version!r}, this program reads {FORMAT_VERSION}: "
            "update vit_jax"
        )
    fields = metadata.get("architecture")
    if not isinstance(fields, Mapping):
        raise ValueError("its metadata describes no network: there is no 'architecture' in it")

    a = parse_bounded_architecture(fields)
    for name, computed in _compute_counts(a).items():
        stated = metadata.get(name, computed)
        if stated != computed:
            raise ValueError(
                f"its metadata contradicts itself: {name} is {stated!r}, but {a.name} on images "
                f"of {a.image_size} has {computed!r}: write it anew from the weights that it was "
                "made of"
            )
    return a


def parse_bounded_architecture(fields: Mapping[str, object]) -> Architecture:
    """Return the architecture with these fields, whose numbers are not trusted but bounded.

    Raises:
      CodeNotAllowed: a part of it is code that the caller does not allow.
      ValueError: fields are missing or unknown, do not fit together, or are too large.
    """
    a = read_architecture(fields)
    # Checked before a caller asks for shapes, which builds the network.
    for _, reference in find_references(a):
        if isinstance(reference, StoredReference):
            reference.require_allowed()

    has_possible_units = all(0 < number <= MAX_LAYERS for number in a.units)
    if a.depth > MAX_LAYERS or len(a.units) > MAX_STAGES or not has_possible_units:
        raise ValueError(
            f"depth {a.depth}, units {a.units}: at most {MAX_LAYERS} layers and {MAX_STAGES} "
            "stages are possible"
        )
    return a


def parse_training_data(metadata: Mapping[str, object]) -> TrainingData | None:
    """Return the training data in metadata; None if they are unknown, or of another form."""
    stored = metadata.get("training")
    config = metadata.get("config")
    if stored is None and isinstance(config, dict):
        section = config.get("input")
        if isinstance(section, dict):  # checkpoints of older versions
            stored = {**section, **config}
    if not isinstance(stored, dict):
        return None

    known = {}
    for field in dataclasses.fields(TrainingData):
        if field.name in stored:
            known[field.name] = stored[field.name]
    with contextlib.suppress(ValueError):
        return from_dict(TrainingData, known, "training.")
    return None


def parse_lora(metadata: Mapping[str, Any]) -> Lora | None:
    """Return the factors beside the kernels of a run's checkpoint; None without any.

    Raises:
      ValueError: their description is damaged.
    """
    stored = metadata.get("lora")
    if stored is None:
        return None
    return from_dict(Lora, stored, "lora.")
