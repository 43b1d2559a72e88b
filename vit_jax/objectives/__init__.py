"""What is minimised, and how a batch is prepared for it. An objective knows neither its model nor its loop."""

from vit_jax.objectives.classification import Classification, build_objective

__all__ = ["Classification", "build_objective"]
