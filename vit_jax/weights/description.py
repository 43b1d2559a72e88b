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
from vit_jax.config.networks import read_architecture
from vit_jax.config.parsing import from_dict, references
from vit_jax.data.subset import TrainingData
from vit_jax.imports.references import StoredReference
from vit_jax.models.lora import Lora
from vit_jax.weights.folding import OURS, Normalisation, describe_normalisation

if TYPE_CHECKING:
    from vit_jax.data.transforms import EvaluationTransform

FORMAT_VERSION = 1  # of the metadata that we write
MOST_LAYERS = 10_000
MOST_STAGES = 8


def describe(
    a: Architecture,
    class_names: Sequence[str] | None,
    preprocessing: Mapping[str, object] | None,
    training: TrainingData | None,
    licence: str = "",
    *,
    is_multilabel: bool = False,
) -> dict[str, object]:
    """Return the metadata that weights carry; None, or "" for the licence, is unknown.

    Class names are in the order of the logits, preprocessing is as from `describe_preparation`, and
    the licence is that of the pre-trained weights that these were made of. Outputs are single-label
    unless it is stated that images may have several labels.
    """
    metadata = {
        "format_version": FORMAT_VERSION,
        "architecture": dataclasses.asdict(a),
        **_counts(a),
        "class_names": None if class_names is None else list(class_names),
        "preprocessing": preprocessing,
        "training": None if training is None else dataclasses.asdict(training),
    }
    if licence:
        metadata["licence"] = licence
    if is_multilabel:
        metadata["is_multilabel"] = True
    return metadata


def stored_licence(metadata: Mapping[str, object]) -> str:
    """Return the licence in metadata; "" if there is none."""
    licence = metadata.get("licence")
    if isinstance(licence, str) and re.fullmatch(r"[\w.-]{1,60}", licence):
        return licence
    return ""


def states_several_labels(metadata: Mapping[str, object]) -> bool:
    """Return whether metadata state that images may have several labels."""
    return metadata.get("is_multilabel") is True


def describe_preparation(
    how: "EvaluationTransform", normalisation: Normalisation = OURS
) -> dict[str, object]:
    """Describe how images are prepared, to pixels in [-1, 1], and the normalisation that is folded into the weights."""
    return {
        "image_size": list(how.image_size),
        "resize": how.resize,
        "crop_fraction": 1.0 if how.resize == "direct" else how.crop_fraction,
        "interpolation": how.interpolation,
        "resize_library": how.library,
        "pixel_range": [-1.0, 1.0],
        "exif_orientation": how.exif_orientation,
        "value_range": None if how.value_range is None else list(how.value_range),
        **describe_normalisation(normalisation),
    }


def _counts(a: Architecture) -> dict[str, object]:
    """Return numbers that follow from the network, for readers who do not build it; we validate them on reading."""
    return {"grid": list(a.grid), "num_class_tokens": a.num_class_tokens}


def stored_architecture(metadata: Mapping[str, object]) -> Architecture:
    """Return the architecture in metadata; ValueError if it is from a newer version, absent or contradictory."""
    version = metadata.get("format_version", FORMAT_VERSION)
    if type(version) is not int or version > FORMAT_VERSION:
        raise ValueError(
            f"its metadata is of version {version!r}, this program reads {FORMAT_VERSION}: update vit_jax"
        )
    fields = metadata.get("architecture")
    if not isinstance(fields, Mapping):
        raise ValueError("its metadata describes no network: there is no 'architecture' in it")
    a = bounded_architecture(fields)
    for name, computed in _counts(a).items():
        if metadata.get(name, computed) != computed:
            raise ValueError(
                f"its metadata contradicts itself: {name} is {metadata[name]!r}, but {a.name} on images of "
                f"{a.image_size} has {computed!r}: write it anew from the weights that it was made of"
            )
    return a


def bounded_architecture(fields: Mapping[str, object]) -> Architecture:
    """Return the architecture with these fields, whose numbers are not trusted but bounded.

    Raises:
      CodeNotAllowed: a part of it is code that the caller does not allow.
      ValueError: fields are missing or unknown, do not fit together, or are too large.
    """
    a = read_architecture(fields)
    for _, reference in references(a):
        if isinstance(
            reference, StoredReference
        ):  # here, before anything asks for shapes, which builds the network
            reference.require_allowed()
    if (
        a.depth > MOST_LAYERS
        or len(a.units) > MOST_STAGES
        or not all(0 < number <= MOST_LAYERS for number in a.units)
    ):
        raise ValueError(
            f"depth {a.depth}, units {a.units}: at most {MOST_LAYERS} layers and {MOST_STAGES} stages are possible"
        )
    return a


def stored_training_data(metadata: Mapping[str, object]) -> TrainingData | None:
    """Return the training data in metadata; None if there is none, or none that we understand."""
    stored = metadata.get("training")
    config = metadata.get("config")
    if stored is None and isinstance(config, dict) and isinstance(config.get("input"), dict):
        stored = {**config["input"], **config}  # checkpoints of older versions
    if not isinstance(stored, dict):
        return None
    names = [field.name for field in dataclasses.fields(TrainingData) if field.name in stored]
    with contextlib.suppress(ValueError):
        return from_dict(TrainingData, {name: stored[name] for name in names}, "training.")
    return None


def stored_lora(metadata: Mapping[str, Any]) -> Lora | None:
    """Return the factors beside the kernels of a run's checkpoint; None where there are none.

    Raises:
      ValueError: their description is damaged.
    """
    stored = metadata.get("lora")
    return None if stored is None else from_dict(Lora, stored, "lora.")
