"""What a run is told to do: the schema, sizes by name, recipes and overrides, resolution into steps.

Recipes import this package and nothing else of vit_jax; nothing in it imports jax.
"""

from vit_jax.config.architecture import Architecture, adapt_architecture, build_architecture
from vit_jax.config.arguments import choose_row, parse_argument
from vit_jax.config.load import from_dict, load_recipe, to_dict, to_text
from vit_jax.config.resolve import RunSteps, resolve
from vit_jax.config.schema import (
    AdaptConfig,
    CheckpointConfig,
    Duration,
    EvaluationConfig,
    EvaluatorConfig,
    FinetuneConfig,
    InputConfig,
    LoggingConfig,
    ModelConfig,
    ObjectiveConfig,
    OptimizerConfig,
    PolyakConfig,
    PretrainConfig,
    RunConfig,
    ScheduleConfig,
    SearchConfig,
    ShardingConfig,
)
from vit_jax.config.variants import VIT_SIZES

__all__ = [
    "VIT_SIZES",
    "AdaptConfig",
    "Architecture",
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
    "PolyakConfig",
    "PretrainConfig",
    "RunConfig",
    "RunSteps",
    "ScheduleConfig",
    "SearchConfig",
    "ShardingConfig",
    "adapt_architecture",
    "build_architecture",
    "choose_row",
    "from_dict",
    "load_recipe",
    "parse_argument",
    "resolve",
    "to_dict",
    "to_text",
]
