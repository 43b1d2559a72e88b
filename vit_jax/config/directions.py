"""The direction of a result: whether higher or lower values are better.

`evaluators.METRICS` has the directions of built-in metrics. A custom evaluator states those of its results in the
attribute `directions` of the class or function that `evaluation.evaluators.NAME.kind` names.
"""

from collections.abc import Mapping
from typing import NamedTuple, get_args

from vit_jax.config.evaluators import Mode, metric_of
from vit_jax.config.schema import RunConfig
from vit_jax.imports.references import is_reference, resolve

WORDS: Mapping[Mode, str] = {"max": "higher is better", "min": "lower is better"}


class Direction(NamedTuple):
    """The better values of a result, and where this is stated."""

    mode: Mode
    stated_by: str

    def __str__(self) -> str:
        return f"{WORDS[self.mode]} ({self.stated_by})"


def stated_directions(evaluator: object, place: str) -> Mapping[str, Mode]:
    """Return the attribute `directions` of a custom evaluator, by the names that it yields; {} without one.

    Raises:
      ValueError: it is no mapping of names to "max" or "min".
    """
    stated = getattr(evaluator, "directions", {})
    is_mapping = isinstance(stated, Mapping) and all(isinstance(name, str) for name in stated)
    if not is_mapping or any(mode not in get_args(Mode) for mode in stated.values()):
        example = '{"brier_score": "min", "sure_accuracy": "max"}'
        raise ValueError(
            f"{place}: its directions must map results to 'max' or 'min', not {stated!r}. Use {example}."
        )
    return stated


def find_direction(config: RunConfig, result: str) -> Direction | None:
    """Return the direction of a result of a run; None if nothing states it.

    A custom evaluator's statement comes first, then `checkpoint.best_mode` for `checkpoint.best_metric`, then the
    metric that ends the name of the result.

    Raises:
      ValueError: as `stated_directions`.
    """
    if (stated := find_stated_direction(config, result)) is not None:
        return stated
    checkpoint = config.checkpoint
    if result == checkpoint.best_metric and checkpoint.best_mode != "auto":
        return Direction(checkpoint.best_mode, "checkpoint.best_mode")
    if (metric := metric_of(result)) is not None:
        return Direction(metric.mode, "by its name")
    return None


def find_stated_direction(config: RunConfig, result: str) -> Direction | None:
    """Return the direction that a custom evaluator of the run states of its result; None without a statement."""
    for name, evaluator in config.evaluation.evaluators.items():
        if not is_reference(evaluator.kind) or not result.startswith(f"{name}_"):
            continue
        field = f"config.evaluation.evaluators.{name}.kind"
        custom = resolve(evaluator.kind, field)
        directions = stated_directions(custom, f"{field}={evaluator.kind!r}")
        if (mode := directions.get(result.removeprefix(f"{name}_"))) is not None:
            return Direction(mode, f"stated by {evaluator.kind}")
    return None


def require_direction(config: RunConfig, result: str) -> Direction:
    """Return the direction of a result by which checkpoints, evaluations or runs are compared.

    Raises:
      ValueError: nothing states it.
    """
    if (direction := find_direction(config, result)) is not None:
        return direction
    checkpoint = config.checkpoint
    if result == checkpoint.best_metric:
        field = f"config.checkpoint.best_mode={checkpoint.best_mode!r}"
        fix = "Set config.checkpoint.best_mode=max or min"
    else:
        field = f"metric={result}"
        fix = (
            f"Set config.checkpoint.best_metric={result} and config.checkpoint.best_mode=max or min"
        )
    raise ValueError(
        f"{field}: must say whether higher or lower values of {result} are better, which is not known. {fix}, or "
        "state it in the attribute directions of the evaluator (docs/extend.md)."
    )
