"""Evaluators on frozen features within a run: their measures, layers and checks."""

import logging
from collections.abc import Mapping
from typing import cast

import jax
import numpy as np

from vit_jax import hosts
from vit_jax.config import Architecture, EvaluatorConfig
from vit_jax.config.evaluators import FrozenKind
from vit_jax.evals import Split
from vit_jax.evals.features import (
    Features,
    FrozenEvaluator,
    MeasureFeatures,
    collect,
    list_notes,
    make_feature_step,
)
from vit_jax.imports.references import explain_call, resolve
from vit_jax.kernels.devices import trace_for
from vit_jax.sharding import Placement, replicate
from vit_jax.train.state import TrainState

FROZEN_MEASURES: Mapping[FrozenKind, str] = {
    "fewshot": "vit_jax.evals.fewshot:make_few_shot_measure",
    "knn": "vit_jax.evals.neighbours:make_neighbour_measure",
}
"""Functions that build measures by kind, imported when a config names the kind.

Their arguments are the number of classes and the options of the evaluator."""

LabelledSplit = tuple[Split, np.ndarray]


def build_frozen_evaluator(
    name: str,
    config: EvaluatorConfig,
    architecture: Architecture,
    mesh: jax.sharding.Mesh,
    train: LabelledSplit,
    test: LabelledSplit,
) -> FrozenEvaluator[TrainState]:
    """Build an evaluator that learns from features of one split and is measured on another."""
    layer = get_layer(config)
    step = trace_for(Placement(mesh))(make_feature_step(layer, architecture))
    jitted = jax.jit(
        lambda state, batch: step(state.evaluated_model(), batch), out_shardings=replicate(mesh)
    )
    logged: set[str] = set()

    def extract(state: TrainState) -> tuple[Features, Features]:
        features = []
        for split, labels in (train, test):
            features.append(collect(split.open_batches, jitted, state, labels))
        train_features, test_features = features
        _log_new_notes(train[0], train_features, test_features, logged)
        return train_features, test_features

    num_classes = len(test[0].class_names)
    return FrozenEvaluator(extract, build_measure(name, config, num_classes))


def _log_new_notes(split: Split, train: Features, test: Features, logged: set[str]) -> None:
    """Log notes on the features, each once in a run and in the first process."""
    if not hosts.is_first():
        return
    for note in list_notes(split.name, split.class_names, train, test):
        if note not in logged:
            logging.getLogger(__name__).warning("%s", note)
            logged.add(note)


def require_possible(
    name: str,
    config: EvaluatorConfig,
    architecture: Architecture,
    num_images: int | None,
) -> None:
    """Check the arguments of an evaluator on frozen features; no image is read.

    Args:
      name: name of the evaluator.
      config: section of the evaluator.
      architecture: network of the run.
      num_images: images that it learns from; None: not known.

    Raises:
      ValueError: an argument has a wrong value, the network has no such layer, or there are too few
        images.
    """
    field = f"config.evaluation.evaluators.{name}"
    build_measure(name, config, architecture.num_classes)
    try:
        make_feature_step(get_layer(config), architecture)
    except ValueError as error:
        raise ValueError(f"{field}.arguments: {error}") from error
    if config.kind != "knn" or num_images is None:
        return
    largest = max(config.numbers)
    if largest > num_images:
        raise ValueError(
            f"{field}: {largest} neighbours of {num_images} training images. Use fewer neighbours."
        )


def get_layer(config: EvaluatorConfig) -> str:
    """Return the layer of the network whose output an evaluator on frozen features takes."""
    return str(config.arguments.get("layer", "pre_logits"))


def build_measure(name: str, config: EvaluatorConfig, num_classes: int) -> MeasureFeatures:
    """Build the measure of an evaluator on frozen features.

    Raises:
      ValueError: an argument is wrong; the evaluator is named.
    """
    assert config.frozen is not None
    field = f"config.evaluation.evaluators.{name}"
    options = {key: value for key, value in config.arguments.items() if key != "layer"}
    options[config.frozen.number_argument] = config.numbers

    make_measure = resolve(FROZEN_MEASURES[cast(FrozenKind, config.kind)], f"{field}.kind")
    with explain_call(field, f"arguments={dict(config.arguments)}"):
        try:
            measure: MeasureFeatures = make_measure(num_classes, **options)
        except ValueError as error:
            raise ValueError(f"{field}.arguments: {error}") from error
    return measure
