"""Evaluation: splits, metrics and results.

An evaluator is built once and measures any number of states.
"""

from vit_jax.evals.runner import Evaluator, Split, sum_over
from vit_jax.evals.split_evaluators import (
    ClassificationEvaluator,
    LabelSetEvaluator,
    MultilabelEvaluator,
)

__all__ = [
    "ClassificationEvaluator",
    "Evaluator",
    "LabelSetEvaluator",
    "MultilabelEvaluator",
    "Split",
    "sum_over",
]
