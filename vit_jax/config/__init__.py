"""The configuration of a run: schema, sizes by name, recipes, overrides, resolution into steps.

Recipes import this package and nothing else of vit_jax; nothing in it imports jax. Public names are
imported on first use, so that a module which needs an architecture does not load the checks of a
run.
"""

from typing import TYPE_CHECKING

from vit_jax.imports.public_names import import_on_use

if TYPE_CHECKING:
    from vit_jax.config.adaptation import adapt_architecture as adapt_architecture
    from vit_jax.config.architecture import Architecture as Architecture
    from vit_jax.config.arguments import choose_row as choose_row
    from vit_jax.config.arguments import parse_argument as parse_argument
    from vit_jax.config.check import resolve as resolve
    from vit_jax.config.check import validate as validate
    from vit_jax.config.lengths import RunSteps as RunSteps
    from vit_jax.config.networks import build_architecture as build_architecture
    from vit_jax.config.parsing import from_dict as from_dict
    from vit_jax.config.parsing import to_dict as to_dict
    from vit_jax.config.parsing import to_text as to_text
    from vit_jax.config.schema import AdaptConfig as AdaptConfig
    from vit_jax.config.schema import CheckpointConfig as CheckpointConfig
    from vit_jax.config.schema import Duration as Duration
    from vit_jax.config.schema import EvaluationConfig as EvaluationConfig
    from vit_jax.config.schema import EvaluatorConfig as EvaluatorConfig
    from vit_jax.config.schema import FinetuneConfig as FinetuneConfig
    from vit_jax.config.schema import InputConfig as InputConfig
    from vit_jax.config.schema import LoggingConfig as LoggingConfig
    from vit_jax.config.schema import ModelConfig as ModelConfig
    from vit_jax.config.schema import ObjectiveConfig as ObjectiveConfig
    from vit_jax.config.schema import OptimizerConfig as OptimizerConfig
    from vit_jax.config.schema import PhaseConfig as PhaseConfig
    from vit_jax.config.schema import PolyakConfig as PolyakConfig
    from vit_jax.config.schema import PretrainConfig as PretrainConfig
    from vit_jax.config.schema import RunConfig as RunConfig
    from vit_jax.config.schema import ScheduleConfig as ScheduleConfig
    from vit_jax.config.schema import SearchConfig as SearchConfig
    from vit_jax.config.schema import ShardingConfig as ShardingConfig
    from vit_jax.config.schema import StopEarlyConfig as StopEarlyConfig
    from vit_jax.config.sizes import VIT_SIZES as VIT_SIZES
    from vit_jax.config.specification import derive as derive
    from vit_jax.config.specification import load_recipe as load_recipe

PUBLIC_NAMES = {
    "adaptation": ("adapt_architecture",),
    "architecture": ("Architecture",),
    "arguments": ("choose_row", "parse_argument"),
    "check": ("resolve", "validate"),
    "lengths": ("RunSteps",),
    "specification": ("derive", "load_recipe"),
    "networks": ("build_architecture",),
    "parsing": ("from_dict", "to_dict", "to_text"),
    "schema": (
        "AdaptConfig",
        "CheckpointConfig",
        "Duration",
        "EvaluationConfig",
        "EvaluatorConfig",
        "FinetuneConfig",
        "InputConfig",
        "LoggingConfig",
        "ModelConfig",
        "ObjectiveConfig",
        "OptimizerConfig",
        "PhaseConfig",
        "PolyakConfig",
        "PretrainConfig",
        "RunConfig",
        "ScheduleConfig",
        "SearchConfig",
        "ShardingConfig",
        "StopEarlyConfig",
    ),
    "sizes": ("VIT_SIZES",),
}
"""Public names by module, as they are imported above for type checkers."""

__getattr__ = import_on_use(__name__, PUBLIC_NAMES)
