"""The direction of a result: whether higher or lower values are better.

`metric_names.METRICS` has the directions of built-in metrics. A custom evaluator states those of
its results in the attribute `directions` of the class or function that
`evaluation.evaluators.NAME.kind` names. A custom metric states its own in the attribute `direction`
of the object that `evaluation.metrics` names.
"""

from collections.abc import Mapping
from typing import NamedTuple, get_args

from vit_jax.config.metric_names import Mode, find_metric, name_custom_metric
from vit_jax.config.schema import RunConfig
from vit_jax.imports.references import is_reference, resolve

WORDS: Mapping[Mode, str] = {"max": "higher is better", "min": "lower is better"}


class Direction(NamedTuple):
    """The better values of a result, and where this is stated."""

    mode: Mode
    stated_by: str

    def __str__(self) -> str:
        return f"{WORDS[self.mode]} ({self.stated_by})"


def read_directions(evaluator: object, place: str) -> Mapping[str, Mode]:
    """Return the attribute `directions` of a custom evaluator, by the names that it yields.

    The mapping is empty without one.

    Raises:
      ValueError: it is no mapping of names to "max" or "min".
    """
    stated = getattr(evaluator, "directions", {})
    is_mapping = isinstance(stated, Mapping) and all(isinstance(name, str) for name in stated)
    if not is_mapping or any(mode not in get_args(Mode) for mode in stated.values()):
        example = '{"brier_score": "min", "sure_accuracy": "max"}'
        raise ValueError(
            f"{place}: its directions must map results to 'max' or 'min', not {stated!r}. Use "
            f"{example}."
        )
    return stated


def read_direction(metric: object, place: str) -> Mode | None:
    """Return the attribute `direction` of a custom metric; None without one.

    Raises:
      ValueError: it is neither "max" nor "min".
    """
    stated = getattr(metric, "direction", None)
    if stated is not None and stated not in get_args(Mode):
        raise ValueError(f"{place}: its direction must be 'max' or 'min', not {stated!r}.")
    return stated


def find_direction(config: RunConfig, result: str) -> Direction | None:
    """Return the direction of a result of a run; None if nothing states it.

    The statement of a custom evaluator or metric comes first, then `checkpoint.best_mode` for
    `checkpoint.best_metric`, then the metric that ends the name of the result.

    Raises:
      ValueError: see `read_directions` and `read_direction`.
    """
    stated = find_stated_direction(config, result)
    if stated is not None:
        return stated
    checkpoint = config.checkpoint
    if result == checkpoint.best_metric and checkpoint.best_mode != "auto":
        return Direction(checkpoint.best_mode, "checkpoint.best_mode")
    metric = find_metric(result)
    if metric is not None:
        return Direction(metric.mode, "by its name")
    return None


def find_stated_direction(config: RunConfig, result: str) -> Direction | None:
    """Return the direction that a custom evaluator or metric of the run states.

    Return None without a statement.
    """
    return _find_in_evaluators(config, result) or _find_in_metrics(config, result)


def _find_in_evaluators(config: RunConfig, result: str) -> Direction | None:
    for name, evaluator in config.evaluation.evaluators.items():
        if not is_reference(evaluator.kind) or not result.startswith(f"{name}_"):
            continue
        field = f"config.evaluation.evaluators.{name}.kind"
        custom = resolve(evaluator.kind, field)
        directions = read_directions(custom, f"{field}={evaluator.kind!r}")
        mode = directions.get(result.removeprefix(f"{name}_"))
        if mode is not None:
            return Direction(mode, f"stated by {evaluator.kind}")
    return None


def _find_in_metrics(config: RunConfig, result: str) -> Direction | None:
    for reference in filter(is_reference, config.evaluation.metrics):
        if not result.endswith(f"_{name_custom_metric(reference)}"):
            continue
        field = "config.evaluation.metrics"
        mode = read_direction(resolve(reference, field), f"{field}={reference}")
        if mode is not None:
            return Direction(mode, f"stated by {reference}")
    return None


def require_direction(config: RunConfig, result: str) -> Direction:
    """Return the direction of a result by which checkpoints, evaluations or runs are compared.

    Raises:
      ValueError: nothing states it.
    """
    direction = find_direction(config, result)
    if direction is not None:
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
        f"{field}: must say whether higher or lower values of {result} are better, which is not "
        f"known. {fix}, or state it in the attribute directions of the evaluator or direction of "
        "the metric (docs/extend.md)."
    )
