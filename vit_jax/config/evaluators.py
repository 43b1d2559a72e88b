"""Built-in evaluators on frozen features."""

from collections.abc import Mapping
from typing import Literal, NamedTuple

FrozenKind = Literal["fewshot", "knn"]


class FrozenEvaluatorSpec(NamedTuple):
    """An evaluator on frozen features.

    Attributes:
      number_argument: argument with one or several numbers; each has its own result.
      default: its default.
      result_suffix: end of the name of a result, after its number.
      arguments: names of further arguments.
    """

    number_argument: str
    default: tuple[int, ...]
    result_suffix: str
    arguments: tuple[str, ...]


FROZEN_EVALUATORS: Mapping[FrozenKind, FrozenEvaluatorSpec] = {
    "fewshot": FrozenEvaluatorSpec(
        "shots",
        (5,),
        "shot_accuracy",
        ("seeds", "l2", "sampling", "layer"),
    ),
    "knn": FrozenEvaluatorSpec("neighbours", (20,), "nn_accuracy", ("temperature", "layer")),
}
