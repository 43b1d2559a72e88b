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
    """A run between two steps."""

    step: jax.Array  # int32 scalar, steps done
    model: nnx.Module  # the network, its parameters the leaves; float32
    optimizer: optax.OptState
    polyak: nnx.Module | None  # running average of the parameters; None without Polyak averaging

    def evaluated_model(self) -> nnx.Module:
        """The network to evaluate: the Polyak average where there is one."""
        return self.model if self.polyak is None else self.polyak


def init_state(
    model: nnx.Module, optimizer: optax.GradientTransformation, *, with_polyak: bool
) -> TrainState:
    """The state before the first step."""
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        model=model,
        optimizer=optimizer.init(model),
        polyak=ema.init(model) if with_polyak else None,
    )


def items_of(state: TrainState) -> dict[str, Any]:
    """Return the state as the items of a checkpoint."""
    items = {"progress": {"step": state.step}, "model": state.model, "optimizer": state.optimizer}
    if state.polyak is None:
        return items
    return {**items, "polyak": state.polyak}
