"""Average of several weights of one network, such as checkpoints of a run (weight averaging)."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from vit_jax.weights.load import Weights, load_weights


def load_average(sources: Sequence[str], **options: Any) -> Weights:
    """Read weights one after the other and return their mean, computed in float64.

    The metadata are those of the first weights. Two networks are in memory at a time, and one of
    sums.

    Args:
      sources: at least two sources, as `load_weights` takes them.
      **options: other arguments of `load_weights`, for each of them.

    Raises:
      ValueError: fewer than two sources, or weights of different networks or classes; and the
        errors of `load_weights`.
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
        _require_same_network(first, weights)
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


def _require_same_network(first: Weights, other: Weights) -> None:
    """Raise ValueError if two weights differ in the network or in the classes."""
    if first.class_names != other.class_names:
        raise ValueError(
            f"{other.source}: must have the classes of {first.source} to be averaged with it. "
            "Use weights of one run, or of runs on the same data."
        )
    stated = dataclasses.asdict(other.architecture)
    stated["name"] = first.architecture.name  # it may be one that a user chose
    for field, value in dataclasses.asdict(first.architecture).items():
        if stated[field] != value:
            raise ValueError(
                f"{other.source}: must be the network of {first.source} to be averaged with it. "
                f"Its {field} is {stated[field]}, not {value}."
            )
