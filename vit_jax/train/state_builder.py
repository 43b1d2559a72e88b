"""The network, the optimizer and the first state of a run, built from its config."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import optax
from flax import nnx

from vit_jax.config.adaptation import adapt_architecture
from vit_jax.config.architecture import Architecture
from vit_jax.config.lengths import RunSteps
from vit_jax.config.networks import build_architecture, build_named_architecture
from vit_jax.config.rules import count_last_blocks
from vit_jax.config.schema import AdaptConfig, ModelConfig, ObjectiveConfig, RunConfig
from vit_jax.config.variants import parse_name
from vit_jax.models import build_model, lora
from vit_jax.objectives import Objective, build_objective
from vit_jax.optim.by_name import find_trained
from vit_jax.optim.optimizers import adapt_optimizer, build_optimizer
from vit_jax.optim.schedules import Schedule, build_schedule
from vit_jax.train.state import TrainState, init_state

BuildNetwork = Callable[[Architecture, jax.Array], nnx.Module]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Overrides:
    """Parts of the caller in the place of the parts that the config describes. None: the config's.

    Attributes:
      network: (architecture, key) -> module.
      objective: has the methods `prepare` and `sums`.
      schedule: step -> learning rate.
      optimizer: updates of the parameters, which include the learning rate.
    """

    network: BuildNetwork | None = None
    objective: Objective | None = None
    schedule: Schedule | None = None
    optimizer: optax.GradientTransformation | None = None

    def resolve_objective(self, config: ObjectiveConfig, architecture: Architecture) -> Objective:
        """Return the loss of a network."""
        if self.objective is not None:
            return self.objective
        return build_objective(config, architecture)

    def resolve_schedule(self, config: RunConfig, steps: RunSteps) -> Schedule:
        """Return the learning rate by steps done, which the run reports."""
        if self.schedule is not None:
            return self.schedule
        return build_schedule(config.schedule, steps)

    def resolve_optimizer(
        self, config: RunConfig, schedule: Schedule
    ) -> optax.GradientTransformation:
        """Return the optimizer of the trained parameters; `schedule` is for the config's."""
        if self.optimizer is not None:
            return adapt_optimizer(self.optimizer, find_trained(config.optimizer))
        return build_optimizer(config.optimizer, schedule, config.schedule.learning_rate)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class StateBuilder:
    """The network and the optimizer of a run, which build its first state.

    Attributes:
      seed: seed of the random parameters.
      architecture: the network, or what the config says of a network of the caller.
      network: the caller's (architecture, key) -> module; None: the network that `architecture`
        describes.
      lora_factors: place and size of LoRA's factors; None without it.
      optimizer: updates of the parameters.
      schedule: learning rate by steps done.
      has_average: True if the state has a Polyak average.
    """

    seed: int
    architecture: Architecture
    network: BuildNetwork | None
    lora_factors: lora.Lora | None
    optimizer: optax.GradientTransformation
    schedule: Schedule
    has_average: bool

    def init(self) -> TrainState:
        """Return the state before the first step, with random parameters."""
        build_network = self.network if self.network is not None else build_model
        key = jax.random.key(self.seed)
        model = build_network(self.architecture, key)
        if self.lora_factors is not None:
            # The same key, but another stream of random numbers: `lora.build_initial_factors`.
            model = lora.add_factors(model, self.lora_factors, key)
            model = lora.store_frozen_kernels(model, self.architecture.compute_dtype)
        return self.start_from(model)

    def start_from(self, model: nnx.Module) -> TrainState:
        """Return the state before the first step, with the parameters of a model."""
        return init_state(model, self.optimizer, with_polyak=self.has_average)

    @functools.cached_property
    def abstract_state(self) -> TrainState:
        """The shapes and dtypes of the state."""
        return jax.eval_shape(self.init)

    @property
    def is_standard(self) -> bool:
        """True if the architecture describes the network, False for a network of the caller."""
        return self.network is None

    @property
    def custom_network(self) -> nnx.Module | None:
        """The shapes of a network of the caller; None if the architecture describes it."""
        if self.is_standard:
            return None
        return self.abstract_state.model

    def replace_architecture(self, **fields: Any) -> "StateBuilder":
        """Return the builder of the same state for a network with these fields."""
        architecture = dataclasses.replace(self.architecture, **fields)
        if architecture == self.architecture:
            return self
        return dataclasses.replace(self, architecture=architecture)


def make_state_builder(
    config: RunConfig,
    architecture: Architecture,
    steps: RunSteps,
    overrides: Overrides,
) -> StateBuilder:
    """Choose the network and the optimizer.

    Raises:
      ValueError: the network cannot have the factors of LoRA, or no last blocks, that the config
        wants.
    """
    schedule = overrides.resolve_schedule(config, steps)
    is_standard = overrides.network is None
    trained = config.optimizer.trained
    if count_last_blocks(trained) is not None:
        require_encoder(architecture, trained, is_standard=is_standard)
    factors = lora.build_lora(config.optimizer)
    if factors is not None:
        lora.require_adaptable(architecture, is_standard=is_standard)

    return StateBuilder(
        seed=config.seed,
        architecture=architecture,
        network=overrides.network,
        lora_factors=factors,
        optimizer=overrides.resolve_optimizer(config, schedule),
        schedule=schedule,
        has_average=config.polyak.factor is not None,
    )


def require_encoder(a: Architecture, trained: str, *, is_standard: bool) -> None:
    """Raise ValueError unless a network has the built-in encoder, whose last blocks can be trained.

    Without `is_standard` the network is the caller's, and `a` does not describe it.
    """
    if is_standard and a.has_transformer and a.network is None:
        return
    rule = f"must be 'all' or 'head' for {a.name}, which has no built-in encoder of blocks"
    raise ValueError(
        f"config.optimizer.trained={trained!r}: {rule}. Use optimizer.frozen to choose what is trained."
    )


def architecture_of(config: RunConfig, num_classes: int) -> Architecture:
    """Return the network that a run trains, or that a fine-tuning run names before weights are read.

    Raises:
      ValueError: a fine-tuning recipe names none, or no image size.
    """
    if isinstance(config.model, ModelConfig):
        return build_pretraining_network(config, config.model, num_classes)
    return build_finetuning_network(config, config.model, num_classes)


def build_pretraining_network(
    config: RunConfig, model: ModelConfig, num_classes: int
) -> Architecture:
    """Return the network of a pre-training run, which predicts classes or masked patches."""
    num_patch_outputs = 0
    if config.objective.kind == "masked_patch":
        from vit_jax.objectives.masked_patch import count_patch_outputs

        num_classes = 0  # its output is for patches
        patch_size = parse_name(model.name).patch
        num_patch_outputs = count_patch_outputs(config.objective, patch_size, config.input.channels)
    return build_architecture(
        model,
        image_size=config.input.pixels,
        num_classes=num_classes,
        patch_outputs=num_patch_outputs,
        channels=config.input.channels,
    )


def build_finetuning_network(
    config: RunConfig, model: AdaptConfig, num_classes: int
) -> Architecture:
    """Return the network that a fine-tuning run names, without its weights.

    Raises:
      ValueError: it names none, or no image size.
    """
    if model.name is None:
        raise ValueError(
            "config.model.name=None: must name the network, which is not known without weights. "
            "Use --config.init_from=WEIGHTS, --config.model.name=ViT-B/16, or "
            "--config=configs/finetune.py:ViT-B/16,..."
        )
    if config.input.image_size is None:
        raise ValueError(
            "config.input.image_size=None: must be set where no weights are read. "
            "Use --config.input.image_size=224."
        )
    named = build_named_architecture(model.name)
    return adapt_architecture(
        named,
        model,
        image_size=config.input.image_size,
        num_classes=num_classes,
        channels=config.input.channels,
    )
