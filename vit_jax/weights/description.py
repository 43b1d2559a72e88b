"""What weights say of their network, in every format that we write and in the checkpoints of runs."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from vit_jax.config.architecture import Architecture, read_architecture
from vit_jax.weights.training_data import TrainingData

FORMAT_VERSION = 1  # of the metadata that we write
MOST_LAYERS, MOST_STAGES = 10_000, 8


def describe(
    a: Architecture,
    class_names: Sequence[str] | None,
    preprocessing: Mapping[str, Any] | None,
    training: TrainingData | None,
) -> dict[str, Any]:
    """The metadata that weights carry.

    Args:
      a: the network.
      class_names: in the order of the logits; None where nobody knows.
      preprocessing: image_size, resize, crop_fraction and pixel_range; None where nobody knows.
      training: the data of the run that made the weights; None where nobody knows.
    """
    return {
        "format_version": FORMAT_VERSION,
        "architecture": dataclasses.asdict(a),
        **_counts(a),
        "class_names": None if class_names is None else list(class_names),
        "preprocessing": preprocessing,
        "training": None if training is None else dataclasses.asdict(training),
    }


def _counts(a: Architecture) -> dict[str, Any]:
    """What follows from the network: told to readers who do not build it, and checked when we read it ourselves."""
    return {"grid": list(a.grid), "num_class_tokens": int(a.has_transformer and a.pool == "token")}


def stored_architecture(metadata: Mapping[str, Any]) -> Architecture:
    """The architecture in metadata that we, or somebody who says so, wrote.

    Raises:
      ValueError: it is from a newer version, no architecture, or contradicts itself.
    """
    version = metadata.get("format_version", FORMAT_VERSION)
    if type(version) is not int or version > FORMAT_VERSION:
        raise ValueError(f"its metadata is of version {version!r}, this program reads {FORMAT_VERSION}: update vit_jax")
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


def bounded_architecture(fields: Mapping[str, Any]) -> Architecture:
    """The architecture with these fields, before anything is counted by it: the numbers may be anybody's.

    Raises:
      ValueError: fields of the wrong type, that do not fit together, or of more layers than any network has.
    """
    a = read_architecture(fields)
    if a.depth > MOST_LAYERS or len(a.units) > MOST_STAGES or not all(0 < number <= MOST_LAYERS for number in a.units):
        raise ValueError(
            f"depth {a.depth}, units {a.units}: at most {MOST_LAYERS} layers and {MOST_STAGES} stages are possible"
        )
    return a
