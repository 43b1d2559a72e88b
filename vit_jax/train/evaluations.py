"""The evaluations of a run: each an evaluator, the prefix of its results, and its cadence."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import cast

from vit_jax.arrays import Batch
from vit_jax.config import Architecture, EvaluatorConfig, RunConfig
from vit_jax.config.directions import read_directions
from vit_jax.config.metric_names import MULTILABEL_RESULTS
from vit_jax.data.decoding.bands import choose_bands
from vit_jax.data.records import Source
from vit_jax.data.transforms import (
    EvaluationTransform,
    build_fewshot_transform,
)
from vit_jax.data.unreadable import UnreadableLog
from vit_jax.evals import (
    ClassificationEvaluator,
    Evaluator,
    LabelSetEvaluator,
    MultilabelEvaluator,
    Split,
)
from vit_jax.evals.running_metrics import choose_metrics
from vit_jax.imports.references import explain_call, is_reference, resolve
from vit_jax.train.assembly import Assembly
from vit_jax.train.cadence import Cadence, ScheduledEvaluator
from vit_jax.train.inputs import Datasets, open_evaluation_batches
from vit_jax.train.state import TrainState

_METRICS_FIELD = "config.evaluation.metrics"


def build_evaluations(
    run: Assembly,
    data: Datasets,
    after_batch: Callable[[], object],
) -> list[ScheduledEvaluator]:
    """Build the evaluators of `data.test` and `config.evaluation.evaluators`.

    Args:
      run: the parts of the run.
      data: its splits, open.
      after_batch: called after each batch of any evaluator; it may raise, which ends the
        evaluation.

    Raises:
      ValueError: arguments that an evaluator does not take; a referenced one that cannot be built
        or has no method `run`.
    """
    require_possible_evaluators(run.config, run.architecture, data.train_sources)

    builder = _EvaluatorBuilder(run, data, after_batch)
    evaluators = {data.test_name: builder.build_classification(data.test_name, data.test)}
    for name, config in run.config.evaluation.evaluators.items():
        evaluators[name] = builder.build(name, config)

    every = {data.test_name: run.steps.evaluate_every, **run.steps.evaluators_every}
    scheduled = []
    for name, evaluator in evaluators.items():
        cadence = Cadence(every[name], run.steps.total)
        logs = builder.logs.get(name, [])
        scheduled.append(ScheduledEvaluator(name, evaluator, cadence, logs))
    return scheduled


class _EvaluatorBuilder:
    """Builds the evaluators of a run.

    Args:
      run: the parts of the run.
      data: its splits, open.
      after_batch: called after each batch of any evaluator.

    Attributes:
      logs: unreadable images of the splits of each evaluator, by its name.
    """

    def __init__(self, run: Assembly, data: Datasets, after_batch: Callable[[], object]):
        self._run = run
        self._data = data
        self._after_batch = after_batch
        self._chosen = choose_metrics(run.config.evaluation.metrics, _METRICS_FIELD)
        self.logs: dict[str, list[UnreadableLog]] = {}

    def build(self, name: str, config: EvaluatorConfig) -> Evaluator[TrainState]:
        """Build an evaluator of the config by its kind."""
        if config.kind == "classification":
            return self.build_classification(name, self._data.others[name])
        if is_reference(config.kind):
            return self._build_custom(name, config)
        return self._build_frozen(name, config)

    def build_classification(self, name: str, source: Source) -> Evaluator[TrainState]:
        """Build the evaluator of loss and accuracy, or of metrics of several labels."""
        step = self._run.evaluation_step
        if _is_multilabel(source, self._run.config):
            self._chosen.require_labels("several", _METRICS_FIELD)
            return MultilabelEvaluator(self._open_split(name, source), step, self._chosen)

        self._chosen.require_labels("one", _METRICS_FIELD)
        split = self._open_split(name, source)
        if name in self._data.correct:
            return LabelSetEvaluator(
                split=split,
                step=step,
                chosen=self._chosen,
                correct_NS=self._data.correct[name],
            )
        return ClassificationEvaluator(split, step, self._chosen)

    def _build_custom(self, name: str, config: EvaluatorConfig) -> Evaluator[TrainState]:
        """Build an evaluator of the user's code."""
        field = f"config.evaluation.evaluators.{name}"
        arguments = f"arguments={dict(config.arguments)}"
        with explain_call(f"{field}: {config.kind!r}", f"(split, run) and {arguments}"):
            build_custom = resolve(config.kind, f"{field}.kind")
            split = self._open_split(name, self._data.others[name])
            evaluator = build_custom(split, self._run, **config.arguments)

        if not callable(getattr(evaluator, "run", None)):
            kind = type(evaluator).__name__
            raise ValueError(
                f"{field}.kind={config.kind!r}: must give an object with a method run, not {kind}."
            )
        return cast(Evaluator[TrainState], evaluator)

    def _build_frozen(self, name: str, config: EvaluatorConfig) -> Evaluator[TrainState]:
        """Build an evaluator on frozen features."""
        from vit_jax.train.frozen_evaluators import build_frozen_evaluator

        transform = None
        if config.kind == "fewshot":
            inputs = self._run.config.input
            transform = build_fewshot_transform(
                inputs.pixels,
                inputs.max_image_megapixels,
                inputs.exif_orientation,
                inputs.value_range,
                choose_bands(inputs),
            )

        train = self._data.train_sources[name]
        test = self._data.others[name]
        return build_frozen_evaluator(
            name,
            config,
            self._run.architecture,
            self._run.compiler.mesh,
            train=(self._open_split(name, train, transform), train.labels),
            test=(self._open_split(name, test, transform), test.labels),
        )

    def _open_split(
        self,
        name: str,
        source: Source,
        transform: EvaluationTransform | None = None,
    ) -> Split:
        """Return a split, with one log of unreadable images for all its evaluations."""
        inputs = self._run.config.input
        log = UnreadableLog(
            source,
            inputs.max_unreadable,
            inputs.max_image_megapixels,
            inputs.value_range,
            bands=choose_bands(inputs),
        )
        log.defer_errors()  # no process may stop alone

        self.logs.setdefault(name, []).append(log)

        @contextlib.contextmanager
        def open_batches() -> Iterator[Iterator[Batch]]:
            with open_evaluation_batches(self._run, source, log, transform) as batches:
                yield self._yield_interruptibly(batches)

        return Split(name, source.class_names, len(source), open_batches)

    def _yield_interruptibly(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Yield batches, and ask after each of them whether the run has to stop."""
        for batch in batches:
            yield batch
            self._after_batch()


def require_possible_evaluators(
    config: RunConfig,
    architecture: Architecture,
    train_sources: Mapping[str, Source] | None,
) -> None:
    """Check the arguments of evaluators on frozen features; no image is read.

    Args:
      config: config of the run.
      architecture: network of the run.
      train_sources: images that evaluators learn from, by name; None: they are elsewhere.

    Raises:
      ValueError: an argument has a wrong value, the network has no such layer, or there are too few
        images.
    """
    evaluators = config.evaluation.evaluators
    frozen = {name: evaluator for name, evaluator in evaluators.items() if evaluator.frozen}
    if not frozen:
        return

    from vit_jax.train.frozen_evaluators import require_possible

    for name, evaluator in frozen.items():
        num_images = None if train_sources is None else len(train_sources[name])
        require_possible(name, evaluator, architecture, num_images)


def with_best_metric(config: RunConfig, data: Datasets) -> RunConfig:
    """Return the config, with average precision as best metric if images have several labels."""
    prefix, _, result = config.checkpoint.best_metric.partition("_")
    if result != "accuracy":
        return config
    source = data.test
    if prefix != "test":
        evaluator = config.evaluation.evaluators.get(prefix)
        if evaluator is None or evaluator.kind != "classification":
            return config
        source = data.others[prefix]

    if not _is_multilabel(source, config):
        return config
    best_metric = f"{prefix}_{MULTILABEL_RESULTS[0]}"
    checkpoint = dataclasses.replace(config.checkpoint, best_metric=best_metric)
    return dataclasses.replace(config, checkpoint=checkpoint)


def with_stated_mode(config: RunConfig, further: Sequence[ScheduledEvaluator]) -> RunConfig:
    """Return the config with the direction of its best metric that a custom evaluator states."""
    metric = config.checkpoint.best_metric
    for scheduled in further:
        directions = read_directions(scheduled.evaluator, f"The evaluator {scheduled.prefix!r}")
        for name, mode in directions.items():
            if metric == f"{scheduled.prefix}_{name}":
                checkpoint = dataclasses.replace(config.checkpoint, best_mode=mode)
                return dataclasses.replace(config, checkpoint=checkpoint)
    return config


def _is_multilabel(source: Source, config: RunConfig) -> bool:
    """Return whether metrics of several labels apply; predicted patches have no labels."""
    return source.is_multilabel and config.objective.kind == "classification"
