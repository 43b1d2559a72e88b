"""The state of training, which a checkpoint holds for exact resuming."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from vit_jax.optim import ema


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """A run between two steps.

    Attributes:
      step: steps done, an int32 scalar.
      model: the network, its parameters the leaves; float32.
      optimizer: state of the optimizer.
      polyak: running average of the parameters; None without Polyak averaging.
    """

    step: jax.Array
    model: nnx.Module
    optimizer: optax.OptState
    polyak: nnx.Module | None

    def evaluated_model(self) -> nnx.Module:
        """The network to evaluate: the Polyak average where there is one."""
        if self.polyak is None:
            return self.model
        return self.polyak


def init_state(
    model: nnx.Module,
    optimizer: optax.GradientTransformation,
    *,
    with_polyak: bool,
) -> TrainState:
    """The state before the first step."""
    step = jnp.zeros((), jnp.int32)
    optimizer_state = optimizer.init(model)
    polyak = None
    if with_polyak:
        polyak = ema.init(model)
    return TrainState(step, model, optimizer_state, polyak)


def items_of(state: TrainState) -> dict[str, Any]:
    """Return the state as the items of a checkpoint."""
    items = {"progress": {"step": state.step}, "model": state.model, "optimizer": state.optimizer}
    if state.polyak is not None:
        items["polyak"] = state.polyak
    return items
