"""What users say of weights whose file does not tell it."""

from collections.abc import Mapping
from typing import Any

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


def normal_answers(answers: Mapping[str, Any]) -> dict[str, Any]:
    """Answers that are given, pairs as tuples.

    Raises:
      ValueError: an image size that is not two numbers.
    """
    given = {name: value for name, value in answers.items() if value is not None}
    if "image_size" in given:
        given["image_size"] = tuple(given["image_size"])
        if len(given["image_size"]) != 2 or not all(
            type(pixels) is int and pixels > 0 for pixels in given["image_size"]
        ):
            raise ValueError(f"image_size={answers['image_size']!r}: give height and width in pixels, such as 224,224")
    return given


def refuse_contradictions(given: Mapping[str, Any], known: Mapping[str, Any], source: str) -> None:
    """Raises ValueError for an answer to what is known, if it is another."""
    for name, value in given.items():
        if known.get(name) is not None and known[name] != value:
            raise ValueError(f"{name}={value!r} is given, but {source} says {known[name]!r}: leave it out")
