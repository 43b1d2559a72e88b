"""What users say of weights whose file does not tell it."""

import math
from collections.abc import Mapping
from typing import Any, get_args

from vit_jax.config.schema import AddedTo, Gelu, PositionEmbedding

ANSWERS = (
    "image_size",
    "num_heads",
    "gelu",
    "layer_norm_epsilon",
    "group_norm_epsilon",
    "standardization_epsilon",
    "standardization_epsilon_added_to",
    "position_embedding",
)
_CHOICES: dict[str, tuple[str, ...]] = {
    "gelu": get_args(Gelu),
    "standardization_epsilon_added_to": get_args(AddedTo),
    "position_embedding": get_args(PositionEmbedding),
}
_NEEDED = {
    "image_size": "give height and width in pixels, such as 224,224",
    "num_heads": "give a divisor of the network's width",
    **{name: "give a number above 0, such as 1e-6" for name in ANSWERS if name.endswith("epsilon")},
    **{name: f"choose {' or '.join(choices)}" for name, choices in _CHOICES.items()},
}


def normal_answers(answers: Mapping[str, Any]) -> dict[str, Any]:
    """Answers that are given, pairs as tuples.

    Raises:
      ValueError: a value that no network has.
    """
    given = {name: value for name, value in answers.items() if value is not None}
    if "image_size" in given:
        given["image_size"] = tuple(given["image_size"])
    for name, value in given.items():
        if not _is_possible(name, value):
            raise ValueError(f"{name}={answers[name]!r}: {_NEEDED[name]}")
    return given


def _is_possible(name: str, value: Any) -> bool:
    if name in _CHOICES:
        return value in _CHOICES[name]
    if name == "image_size":
        return len(value) == 2 and all(type(pixels) is int and pixels > 0 for pixels in value)
    if name == "num_heads":
        return type(value) is int and value > 0
    return type(value) in (int, float) and 0 < value < math.inf


def refuse_contradictions(given: Mapping[str, Any], known: Mapping[str, Any], source: str) -> None:
    """Raises ValueError for an answer to what is known, if it is another."""
    for name, value in given.items():
        if known.get(name) is not None and known[name] != value:
            raise ValueError(f"{name}={value!r} is given, but {source} says {known[name]!r}: leave it out")
