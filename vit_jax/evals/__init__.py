"""Evaluation: splits, metrics and results. An evaluator is built once and measures any number of states."""

from vit_jax.evals.classification import ClassificationEvaluator
from vit_jax.evals.multilabel import MultilabelEvaluator
from vit_jax.evals.runner import Evaluator, Split, sum_over

__all__ = ["ClassificationEvaluator", "Evaluator", "MultilabelEvaluator", "Split", "sum_over"]
