"""Rules of evaluations: custom metrics, evaluators by name, the metric of the best checkpoint.

A rule returns the problem that it found as `field=value: rule. fix.`, or None. The statements of
custom evaluators and metrics raise the error of `directions` where they are wrong.
"""

from collections.abc import Iterator, Sequence

from vit_jax.config.directions import (
    find_stated_direction,
    read_direction,
    read_directions,
    require_direction,
)
from vit_jax.config.metric_names import (
    METRICS,
    METRICS_FOR_LABEL_SETS,
    MULTILABEL_RESULTS,
    find_current_name,
    find_metric,
    name_custom_metric,
    require_metric_name,
)
from vit_jax.config.schema import EvaluatorConfig, RunConfig
from vit_jax.imports.references import is_reference
from vit_jax.imports.references import resolve as import_reference
from vit_jax.text.nearest import did_you_mean

_BUILT_IN_PREFIXES = ("test", "validation", "train")


def find_problems(config: RunConfig) -> Iterator[str]:
    """Yield problems of the metrics, of each evaluator and of the metric of the best checkpoint.

    Raises:
      ValueError: an unknown metric, or a wrong statement of a custom metric or evaluator.
    """
    _require_metrics(config)
    for name in config.evaluation.evaluators:
        yield from _find_evaluator_problems(config, name)
    if not config.checkpoint.keep_best:
        return
    for check in (check_best_metric, check_best_mode):
        problem = check(config)
        if problem is not None:
            yield problem
    require_direction(config, config.checkpoint.best_metric)


def _find_evaluator_problems(config: RunConfig, name: str) -> Iterator[str]:
    evaluator = config.evaluation.evaluators[name]
    field = f"evaluation.evaluators.{name}"
    for check in (check_prefix, check_arguments, check_frozen_splits, check_label_sets):
        problem = check(config, name, evaluator)
        if problem is not None:
            yield f"{field}{problem}"
    if is_reference(evaluator.kind):
        custom = import_reference(evaluator.kind, f"config.{field}.kind")
        read_directions(custom, f"config.{field}.kind={evaluator.kind!r}")


def _require_metrics(config: RunConfig) -> None:
    """Raise ValueError for an unknown metric, or a custom one that states a wrong direction."""
    field = "config.evaluation.metrics"
    for metric in config.evaluation.metrics:
        if is_reference(metric):
            read_direction(import_reference(metric, field), f"{field}={metric}")
        else:
            require_metric_name(metric, field)


# One evaluator. A problem goes on from the name of its section.


def check_prefix(config: RunConfig, name: str, evaluator: EvaluatorConfig) -> str | None:
    """The name of an evaluator begins the names of its results."""
    if name.isidentifier() and name not in _BUILT_IN_PREFIXES:
        return None
    return (
        ": must be a prefix of results: letters, digits and _, but not test, validation or train."
    )


def check_arguments(config: RunConfig, name: str, evaluator: EvaluatorConfig) -> str | None:
    """Built-in evaluators have known arguments; they check the values themselves."""
    frozen = evaluator.frozen
    if frozen is None:
        return None
    allowed = (frozen.number_argument, *frozen.arguments)
    for argument in evaluator.arguments:
        if argument not in allowed:
            hint = did_you_mean(argument, allowed, "{}")
            return (
                f".arguments.{argument}: must be one of {', '.join(allowed)}, "
                f"for kind={evaluator.kind!r}.{hint}"
            )
    return None


def check_frozen_splits(config: RunConfig, name: str, evaluator: EvaluatorConfig) -> str | None:
    """A classifier on frozen features is trained on one split and tested on another."""
    train = evaluator.train_split or config.input.train_split
    test = evaluator.split or config.input.test_split
    if evaluator.frozen is None or train != test:
        return None
    return f": split and train_split must differ, and are both {test!r}."


def check_label_sets(config: RunConfig, name: str, evaluator: EvaluatorConfig) -> str | None:
    """Label sets have the classes of the data, and a network that predicts them."""
    if evaluator.label_sets is None:
        return None
    if config.objective.kind != "classification":
        return ".label_sets: needs objective.kind='classification'. Remove it."
    if config.input.classes:
        return ".label_sets: must not be set with input.classes, which changes the classes."
    return None


# The best checkpoint.


def check_best_metric(config: RunConfig) -> str | None:
    """The best checkpoint needs a metric that an evaluator computes."""
    metric = config.checkpoint.best_metric
    known, prefixes = list_result_names(config)
    if metric in known or metric.startswith(prefixes):
        return None
    results = ", ".join([*known, *map("{}...".format, prefixes)])
    rule = f"must be a result of an evaluator. Use one of {results}"
    return f"checkpoint.best_metric={metric!r}: {rule}."


def check_best_mode(config: RunConfig) -> str | None:
    """The direction of the best metric is stated once."""
    mode = config.checkpoint.best_mode
    if mode == "auto":
        return None
    metric = config.checkpoint.best_metric
    stated = find_stated_direction(config, metric)
    if stated is not None:
        return f"checkpoint.best_mode={mode!r}: has no effect on {metric}: {stated}. Use auto."
    known, _ = list_result_names(config)
    if metric in known and find_metric(metric) is not None:
        return f"checkpoint.best_mode={mode!r}: has no effect on {metric}. Use auto."
    return None


# Names of results.


def list_result_names(config: RunConfig) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names of results of a run, and the prefixes of results of custom evaluators."""
    usual = _list_usual_results(config)
    known = [f"test_{result}" for result in usual]
    prefixes = []
    for name, evaluator in config.evaluation.evaluators.items():
        if is_reference(evaluator.kind):
            prefixes.append(f"{name}_")
            continue
        if evaluator.label_sets is not None:
            known += [f"{name}_{result}" for result in _keep_defined(usual)]
            continue
        if evaluator.frozen is None:
            known += [f"{name}_{result}" for result in usual]
            continue
        for number in evaluator.numbers:
            known.append(f"{name}_{number}{evaluator.frozen.result_suffix}")
    return tuple(known), tuple(prefixes)


def _keep_defined(results: Sequence[str]) -> list[str]:
    """Return the results that are defined for images with several correct classes."""
    defined = []
    for result in results:
        is_custom = result not in METRICS
        if is_custom or result in METRICS_FOR_LABEL_SETS:
            defined.append(result)
    return defined


def _list_usual_results(config: RunConfig) -> list[str]:
    """Return the names of results of every evaluation on a split."""
    objective = config.objective
    is_classification = objective.kind == "classification"
    results = ["loss"]
    if is_classification or objective.patch_target != "pixels":
        results = ["accuracy", "loss"]
    if is_classification and objective.loss != "softmax":
        results += MULTILABEL_RESULTS  # the data may be multi-label
    for metric in config.evaluation.metrics:
        if is_reference(metric):
            results.append(name_custom_metric(metric))
        else:
            results.append(find_current_name(metric))
    return results
