"""Average of several weights of one network, such as checkpoints of a run (weight averaging)."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from vit_jax.config.schema import RUNTIME_FIELDS
from vit_jax.weights.load import Weights, load_weights


def load_average(sources: Sequence[str], **options: Any) -> Weights:
    """Read weights one after the other and return their mean, computed in float64.

    The metadata are those of the first weights. Two networks are in memory at a time, and one of
    sums.

    Args:
      sources: at least two sources, as `load_weights` takes them.
      **options: other arguments of `load_weights`, for each of them.

    Raises:
      ValueError: fewer than two sources, or weights of different networks, classes, images or
        hold-outs; and the errors of `load_weights`.
    """
    if len(sources) < 2:
        raise ValueError(
            f"{''.join(sources)}: must be at least two weights to average. "
            "Use RUN@STEP,RUN@STEP or FILE,FILE."
        )

    first = load_weights(sources[0], **options)
    sums = {name: array.astype(np.float64) for name, array in first.parameters.items()}
    for source in sources[1:]:
        weights = load_weights(source, **options)
        _require_same_classes(first, weights)
        _require_same_network(first, weights)
        _require_same_preprocessing(first, weights)
        _require_same_split(first, weights)
        for name, array in weights.parameters.items():
            sums[name] += array

    parameters = _divide(sums, len(sources))
    averaged = dataclasses.replace(
        first,
        parameters=parameters,
        source=f"mean of {', '.join(sources)}",
    )
    return averaged.add_note(f"The parameters are the mean of {len(sources)} weights.")


def _divide(sums: Mapping[str, np.ndarray], number: int) -> dict[str, np.ndarray]:
    """Return the means in float32."""
    return {name: (array / number).astype(np.float32) for name, array in sums.items()}


def _require_same_classes(first: Weights, other: Weights) -> None:
    """Raise ValueError if two weights differ in the names or the order of the classes."""
    if first.class_names != other.class_names:
        raise ValueError(
            f"{other.source}: must have the classes of {first.source} to be averaged with it. "
            "Use weights of one run, or of runs on the same data."
        )


def _require_same_network(first: Weights, other: Weights) -> None:
    """Raise ValueError if two weights differ in the network, except for how it is executed."""
    stated = dataclasses.asdict(other.architecture)
    stated["name"] = first.architecture.name  # it may be one that a user chose
    for field, value in dataclasses.asdict(first.architecture).items():
        if f"model.{field}" in RUNTIME_FIELDS:
            continue
        if stated[field] != value:
            raise ValueError(
                f"{other.source}: must be the network of {first.source} to be averaged with it. "
                f"Its {field} is {stated[field]}, not {value}."
            )


def _require_same_preprocessing(first: Weights, other: Weights) -> None:
    """Raise ValueError if both weights state how they take images, and differ in it.

    Mean and standard deviation of a library are in the parameters. Images without bands are RGB.
    """
    here = first.preprocessing
    there = other.preprocessing
    if here is None or there is None:
        return
    stated = here.keys() & there.keys() - {"mean", "std", "image_size"}
    for field in sorted(stated | {"bands"}):
        if there.get(field) != here.get(field):
            raise ValueError(
                f"{other.source}: must take the images of {first.source} to be averaged with it. "
                f"Its {field} is {there.get(field)}, not {here.get(field)}."
            )


def _require_same_split(first: Weights, other: Weights) -> None:
    """Raise ValueError if two weights of the same data were trained on different images of them.

    The mean would be evaluated on images that one of them was trained on.
    """
    if first.training is None or other.training is None:
        return
    if first.training.data != other.training.data:
        return
    for field in ("train_split", "test_split", "held_up_to"):
        if getattr(other.training, field) != getattr(first.training, field):
            raise ValueError(
                f"{other.source}: must be trained on the images of {first.source} to be averaged "
                f"with it. It holds out others: its {field} is different, its seed "
                f"{other.training.seed}, not {first.training.seed}. Use runs with the same seed "
                "and splits."
            )
