"""Evaluation: splits, metrics and results.

An evaluator is built once and measures any number of states.
"""

from vit_jax.evals.split_evaluators import (
    ClassificationEvaluator,
    LabelSetEvaluator,
    MultilabelEvaluator,
)
from vit_jax.evals.step_results import Evaluator, Split, sum_over

__all__ = [
    "ClassificationEvaluator",
    "Evaluator",
    "LabelSetEvaluator",
    "MultilabelEvaluator",
    "Split",
    "sum_over",
]
