"""What a run is told to do: the schema, sizes by name, recipes and overrides, resolution into steps.

Recipes import this package and nothing else of vit_jax; nothing in it imports jax.
"""

from vit_jax.config.arguments import choose_row, parse_argument
from vit_jax.config.load import from_dict, load_recipe, to_dict, to_text
from vit_jax.config.resolve import RunSteps, resolve
from vit_jax.config.schema import (
    CheckpointConfig,
    Duration,
    EvaluationConfig,
    InputConfig,
    LoggingConfig,
    ModelConfig,
    ObjectiveConfig,
    OptimizerConfig,
    PolyakConfig,
    PretrainConfig,
    ScheduleConfig,
    ShardingConfig,
)
from vit_jax.config.variants import VIT_SIZES, Architecture, build_architecture

__all__ = [
    "VIT_SIZES",
    "Architecture",
    "CheckpointConfig",
    "Duration",
    "EvaluationConfig",
    "InputConfig",
    "LoggingConfig",
    "ModelConfig",
    "ObjectiveConfig",
    "OptimizerConfig",
    "PolyakConfig",
    "PretrainConfig",
    "RunSteps",
    "ScheduleConfig",
    "ShardingConfig",
    "build_architecture",
    "choose_row",
    "from_dict",
    "load_recipe",
    "parse_argument",
    "resolve",
    "to_dict",
    "to_text",
]
