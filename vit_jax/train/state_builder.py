"""The first state of a run: its network and its optimizer, built from the config."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import optax
from flax import nnx

from vit_jax.config.architecture import Architecture
from vit_jax.config.lengths import RunSteps
from vit_jax.config.rules import count_last_blocks
from vit_jax.config.schema import RunConfig
from vit_jax.models import build_model, lora
from vit_jax.models.encoder import require_encoder
from vit_jax.optim.by_name import make_is_trained
from vit_jax.optim.optimizers import adapt_optimizer, build_optimizer
from vit_jax.optim.schedules import Schedule, build_schedule
from vit_jax.train.state import TrainState, init_state

BuildNetwork = Callable[[Architecture, jax.Array], nnx.Module]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class StateBuilder:
    """The network and the optimizer of a run, which build its first state.

    Attributes:
      seed: seed of the random parameters.
      architecture: the network, or what the config says of a network of the caller.
      network: the caller's (architecture, key) -> module; None: the network that `architecture`
        describes.
      factors: factors of LoRA; None without it.
      optimizer: updates of the parameters.
      schedule: learning rate by steps done.
      has_average: True if the state has a Polyak average.
    """

    seed: int
    architecture: Architecture
    network: BuildNetwork | None
    factors: lora.Lora | None
    optimizer: optax.GradientTransformation
    schedule: Schedule
    has_average: bool

    def init(self) -> TrainState:
        """Return the state before the first step, with random parameters."""
        build_network = self.network if self.network is not None else build_model
        key = jax.random.key(self.seed)
        model = build_network(self.architecture, key)
        if self.factors is not None:
            # The same key, but another stream of random numbers: `lora.build_initial_factors`.
            model = lora.add_factors(model, self.factors, key)
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
        """The shapes of a network of the caller; None for others, whose cost has formulas."""
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
    network: BuildNetwork | None,
    schedule: Schedule | None,
    optimizer: optax.GradientTransformation | None,
) -> StateBuilder:
    """Choose the network and the optimizer; the last arguments are parts of the caller, or None.

    Raises:
      ValueError: the network cannot have the factors of LoRA, or no last blocks, that the config
        wants.
    """
    learning_rate = schedule or build_schedule(config.schedule, steps)
    if optimizer is None:
        peak = config.schedule.learning_rate
        optimizer = build_optimizer(config.optimizer, learning_rate, peak)
    else:
        optimizer = adapt_optimizer(optimizer, make_is_trained(config.optimizer))

    trained = config.optimizer.trained
    if count_last_blocks(trained) is not None:
        require_encoder(architecture, trained, is_standard=network is None)
    factors = lora.build_lora(config.optimizer)
    if factors is not None:
        lora.require_adaptable(architecture, is_standard=network is None)

    return StateBuilder(
        seed=config.seed,
        architecture=architecture,
        network=network,
        factors=factors,
        optimizer=optimizer,
        schedule=learning_rate,
        has_average=config.polyak.factor is not None,
    )
