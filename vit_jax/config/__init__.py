"""The configuration of a run: the schema, sizes by name, recipes and overrides, resolution into steps.

Recipes import this package and nothing else of vit_jax; nothing in it imports jax.
"""

from vit_jax.config.architecture import Architecture as Architecture
from vit_jax.config.architecture import adapt_architecture as adapt_architecture
from vit_jax.config.architecture import build_architecture as build_architecture
from vit_jax.config.arguments import choose_row as choose_row
from vit_jax.config.arguments import parse_argument as parse_argument
from vit_jax.config.check import RunSteps as RunSteps
from vit_jax.config.check import resolve as resolve
from vit_jax.config.check import validate as validate
from vit_jax.config.parsing import from_dict as from_dict
from vit_jax.config.parsing import load_recipe as load_recipe
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
from vit_jax.config.variants import VIT_SIZES as VIT_SIZES
