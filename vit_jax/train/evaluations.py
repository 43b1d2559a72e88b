"""The evaluations of a run: each an evaluator, the prefix of its results, and its cadence."""

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import cast

import jax
import numpy as np

from vit_jax import hosts
from vit_jax.arrays import Batch
from vit_jax.config import Architecture, EvaluatorConfig, RunConfig
from vit_jax.config.directions import stated_directions
from vit_jax.config.evaluators import MULTILABEL_RESULTS, FrozenKind
from vit_jax.data.records import Source
from vit_jax.data.transforms import EvaluationTransform, build_fewshot_transform
from vit_jax.data.unreadable import TooManyUnreadable, UnreadableLog
from vit_jax.evals import ClassificationEvaluator, Evaluator, MultilabelEvaluator, Split
from vit_jax.evals.features import (
    Features,
    FrozenEvaluator,
    MeasureFeatures,
    collect,
    make_feature_step,
    notes_on,
)
from vit_jax.evals.fewshot import make_few_shot_measure
from vit_jax.evals.neighbours import make_neighbour_measure
from vit_jax.imports.references import called, is_reference, resolve
from vit_jax.models.activations import placed_by
from vit_jax.sharding import Placement, replicated
from vit_jax.train.assemble import Assembly, Datasets, open_evaluation_batches
from vit_jax.train.state import TrainState

FROZEN_MEASURES: Mapping[FrozenKind, Callable[..., MeasureFeatures]] = {
    "fewshot": make_few_shot_measure,
    "knn": make_neighbour_measure,
}
"""Measures of `config.evaluators.FROZEN_EVALUATORS`, built from the number of classes and options."""


@dataclasses.dataclass(frozen=True)
class Cadence:
    """Due after every `every` steps, at least 1, and after the `last` step of the run."""

    every: int
    last: int

    def is_due(self, step: int) -> bool:
        """Return whether it is due after this number of steps; never after 0."""
        return step > 0 and (step % self.every == 0 or step == self.last)


@dataclasses.dataclass(frozen=True)
class ScheduledEvaluator:
    """An evaluator with the prefix of its results and its cadence."""

    prefix: str  # "test" makes "test_accuracy" of the evaluator's "accuracy"
    evaluator: Evaluator
    cadence: Cadence
    logs: Sequence[UnreadableLog] = ()  # of the splits that it reads

    def run(self, state: TrainState) -> dict[str, float]:
        """Return the prefixed results on a training state; all processes get those of the first.

        Raises:
          TooManyUnreadable: in every process, if one has met too many unreadable images.
        """
        results = {
            f"{self.prefix}_{name}": float(value) for name, value in self.evaluator.run(state)
        }
        gathered: list[tuple[dict[str, float], list[str]]] = hosts.gather(
            (results, [log.problem for log in self.logs])
        )
        for _, problems in gathered:
            for problem in filter(None, problems):
                raise TooManyUnreadable(f"{self.prefix}: {problem}")
        return gathered[0][0]


def build_evaluations(
    run: Assembly, data: Datasets, split: str, after_batch: Callable[[], object]
) -> list[ScheduledEvaluator]:
    """Build the evaluators of `data.test` and `config.evaluation.evaluators`.

    `split` is the prefix of results on `data.test`: "test", or in a search "validation". `after_batch` is called after
    each batch of any evaluator; it may raise, which ends the evaluation.

    Raises:
      ValueError: arguments that an evaluator does not take; a referenced one that cannot be built or has no method
        `run`.
    """
    inputs = run.config.input
    further = run.config.evaluation.evaluators
    require_possible_evaluators(run.config, run.architecture, data.train_sources)
    logs: dict[str, list[UnreadableLog]] = {}

    def open_split(
        name: str, source: Source, transform: EvaluationTransform | None = None
    ) -> Split:
        # one log for all evaluations of the split
        log = UnreadableLog(
            source, inputs.max_unreadable, inputs.max_image_megapixels, inputs.value_range
        )
        log.defer_errors()  # no process may stop alone
        logs.setdefault(name, []).append(log)

        @contextlib.contextmanager
        def open_batches() -> Iterator[Iterator[Batch]]:
            def interruptible() -> Iterator[Batch]:
                for batch in batches:
                    yield batch
                    after_batch()

            with open_evaluation_batches(run, source, log, transform) as batches:
                yield interruptible()

        return Split(name, source.class_names, len(source), open_batches)

    def classify(name: str, source: Source) -> Evaluator:
        evaluator = (
            MultilabelEvaluator if _is_multilabel(source, run.config) else ClassificationEvaluator
        )
        return evaluator(open_split(name, source), run.evaluation_step)

    def build(name: str, config: EvaluatorConfig) -> Evaluator:
        test = data.others[name]
        if config.kind == "classification":
            return classify(name, test)
        field = f"config.evaluation.evaluators.{name}"
        arguments = f"arguments={dict(config.arguments)}"
        if is_reference(config.kind):
            with called(f"{field}: {config.kind!r}", f"(split, run) and {arguments}"):
                build_custom = resolve(config.kind, f"{field}.kind")
                evaluator = build_custom(open_split(name, test), run, **config.arguments)
            if not callable(getattr(evaluator, "run", None)):
                kind = type(evaluator).__name__
                raise ValueError(
                    f"{field}.kind={config.kind!r}: must give an object with a method run, not {kind}."
                )
            return cast(Evaluator, evaluator)
        assert config.frozen is not None
        train = data.train_sources[name]
        transform = None
        if config.kind == "fewshot":
            megapixels = inputs.max_image_megapixels
            is_upright = inputs.exif_orientation
            transform = build_fewshot_transform(
                inputs.image_size, megapixels, is_upright, inputs.value_range
            )
        splits = [(open_split(name, side, transform), side.labels) for side in (train, test)]
        extract = _make_extract(run, splits, layer_of(config))
        measure = build_measure(name, config, test.num_classes)
        return FrozenEvaluator(extract, measure)

    built = {split: classify(split, data.test)} | {
        name: build(name, config) for name, config in further.items()
    }
    every = {split: run.steps.evaluate_every, **run.steps.evaluators_every}
    return [
        ScheduledEvaluator(
            name, evaluator, Cadence(every[name], run.steps.total), logs.get(name, ())
        )
        for name, evaluator in built.items()
    ]


def require_possible_evaluators(
    config: RunConfig, architecture: Architecture, train_sources: Mapping[str, Source] | None
) -> None:
    """Check the arguments of evaluators on frozen features; no image is read.

    Args:
      config: of the run.
      architecture: of its network.
      train_sources: images that evaluators learn from, by name; None: they are elsewhere.

    Raises:
      ValueError: an argument has a wrong value, the network has no such layer, or there are too few images.
    """
    for name, evaluator in config.evaluation.evaluators.items():
        if not evaluator.frozen:
            continue
        field = f"config.evaluation.evaluators.{name}"
        build_measure(name, evaluator, architecture.num_classes)
        try:
            make_feature_step(layer_of(evaluator), architecture)
        except ValueError as error:
            raise ValueError(f"{field}.arguments: {error}") from error
        if evaluator.kind != "knn" or train_sources is None:
            continue
        largest = max(evaluator.numbers)
        num_images = len(train_sources[name])
        if largest > num_images:
            raise ValueError(
                f"{field}: {largest} neighbours of {num_images} training images. Use fewer neighbours."
            )


def layer_of(config: EvaluatorConfig) -> str:
    """Return the layer of the network whose output an evaluator on frozen features takes."""
    return str(config.arguments.get("layer", "pre_logits"))


def build_measure(name: str, config: EvaluatorConfig, num_classes: int) -> MeasureFeatures:
    """Build the measure of an evaluator on frozen features; raises ValueError, which names it, for its arguments."""
    assert config.frozen is not None
    options = {key: value for key, value in config.arguments.items() if key != "layer"}
    options[config.frozen.number_argument] = config.numbers
    field = f"config.evaluation.evaluators.{name}"
    build = FROZEN_MEASURES[cast(FrozenKind, config.kind)]
    with called(field, f"arguments={dict(config.arguments)}"):
        try:
            return build(num_classes, **options)
        except ValueError as error:
            raise ValueError(f"{field}.arguments: {error}") from error


def _make_extract(
    run: Assembly, splits: Sequence[tuple[Split, np.ndarray]], layer: str
) -> Callable[[TrainState], tuple[Features, Features]]:
    """Return a function from a training state to the features of splits, which come with their labels."""
    mesh = cast(jax.sharding.Mesh, run.batch_sharding.mesh)
    step = placed_by(Placement(mesh))(make_feature_step(layer, run.architecture))
    jitted = jax.jit(
        lambda state, batch: step(state.evaluated_model(), batch), out_shardings=replicated(mesh)
    )

    logged: set[str] = set()

    def extract(state: TrainState) -> tuple[Features, Features]:
        train, test = (
            collect(split.open_batches, jitted, state, labels) for split, labels in splits
        )
        name = splits[0][0].name
        class_names = splits[0][0].class_names
        for note in notes_on(name, class_names, train, test) if hosts.is_first() else ():
            if note not in logged:
                logging.getLogger(__name__).warning("%s", note)
                logged.add(note)
        return train, test

    return extract


def with_best_metric(config: RunConfig, data: Datasets) -> RunConfig:
    """Return the config with average precision instead of accuracy as best metric of splits with several labels."""
    prefix, _, result = config.checkpoint.best_metric.partition("_")
    evaluators = config.evaluation.evaluators
    classified = {
        name: data.others[name] for name in evaluators if evaluators[name].kind == "classification"
    }
    source = {"test": data.test, **classified}.get(prefix)
    if result != "accuracy" or source is None or not _is_multilabel(source, config):
        return config
    checkpoint = dataclasses.replace(
        config.checkpoint, best_metric=f"{prefix}_{MULTILABEL_RESULTS[0]}"
    )
    return dataclasses.replace(config, checkpoint=checkpoint)


def with_stated_mode(config: RunConfig, further: Sequence[ScheduledEvaluator]) -> RunConfig:
    """Return the config with the direction of `checkpoint.best_metric` that an evaluator of the caller states."""
    metric = config.checkpoint.best_metric
    for scheduled in further:
        directions = stated_directions(scheduled.evaluator, f"The evaluator {scheduled.prefix!r}")
        for name, mode in directions.items():
            if metric == f"{scheduled.prefix}_{name}":
                checkpoint = dataclasses.replace(config.checkpoint, best_mode=mode)
                return dataclasses.replace(config, checkpoint=checkpoint)
    return config


def _is_multilabel(source: Source, config: RunConfig) -> bool:
    """Return whether metrics of several labels apply; predicted patches have no labels."""
    return source.is_multilabel and config.objective.kind == "classification"


def run_all(evaluators: Sequence[ScheduledEvaluator], state: TrainState) -> dict[str, float]:
    """Return the results of several evaluators."""
    return {name: value for evaluator in evaluators for name, value in evaluator.run(state).items()}
