"""How good a model is. An evaluator is built once and yields names and values for every state it is given."""

from vit_jax.evals.classification import ClassificationEvaluator
from vit_jax.evals.multilabel import MultilabelEvaluator
from vit_jax.evals.sums import Evaluator, Split

__all__ = ["ClassificationEvaluator", "Evaluator", "MultilabelEvaluator", "Split"]
