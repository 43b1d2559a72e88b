"""Memory of a run's step on one device by formula: the state from its shardings, the rest from `sharding.memory`."""

import math
import re
from collections.abc import Callable

import jax
from flax import nnx

from vit_jax import pytree
from vit_jax.config import Architecture
from vit_jax.optim.by_name import trained_leaves
from vit_jax.sharding import BATCH_AXES
from vit_jax.sharding.memory import Memory, padded_bytes, passing_bytes
from vit_jax.train.state import TrainState

_PROGRAM_BYTES = 30_000_000
_STACK = re.compile("/(?:blocks|rest)/")  # of layers that a loop runs


def step_memory(
    architecture: Architecture,
    state: TrainState,
    *,
    global_batch: int,
    accumulation_steps: int,
    is_trained: Callable[[str], bool] | None,
    tiled: bool,
) -> Memory:
    """Return the memory of one device by kind.

    Args:
      architecture: the network, with the policy of rematerialisation.
      state: shapes, dtypes and shardings.
      global_batch: images of a step on all devices.
      accumulation_steps: micro-batches of a step.
      is_trained: whether the parameter of a name has a gradient; None: all have.
      tiled: True on TPUs, whose memory consists of tiles.

    Raises:
      ValueError: a part is the user's own code.
    """
    sizes = {
        kind: sum(shard_bytes(leaf, tiled=tiled) for leaf in jax.tree.leaves(getattr(state, kind)))
        for kind in ("model", "optimizer", "polyak")
    }
    sharding = state.step.sharding
    assert isinstance(sharding, jax.sharding.NamedSharding)
    axes = sharding.mesh.shape
    images = global_batch // math.prod(axes[axis] for axis in BATCH_AXES)
    passing = passing_bytes(
        architecture,
        images=images // accumulation_steps,
        gradient_bytes=sum(
            shard_bytes(x, tiled=tiled) for x in trained_leaves(state.model, is_trained).values()
        ),
        **_parameters(state.model, axes["model"]),
        is_accumulated=accumulation_steps > 1,
        model_shards=axes["model"],
        tiled=tiled,
    )
    return Memory(
        parameters=sizes["model"],
        optimizer=sizes["optimizer"],
        average=sizes["polyak"],
        batch=padded_bytes((images * 3, *architecture.image_size), 1, tiled=tiled),
        **passing,
        program=_PROGRAM_BYTES,
    )


def updated_leaves(
    state: TrainState, is_trained: Callable[[str], bool] | None
) -> list[jax.ShapeDtypeStruct]:
    """Return what the update of a step reads and writes: all of the state but frozen parameters, and gradients."""
    trained = trained_leaves(state.model, is_trained)
    return jax.tree.leaves((state.step, trained, state.optimizer, state.polyak, trained))


def shard_bytes(leaf: jax.ShapeDtypeStruct, *, tiled: bool) -> int:
    """Return the bytes on one device of an abstract array with a sharding."""
    return padded_bytes(leaf.sharding.shard_shape(leaf.shape), leaf.dtype.itemsize, tiled=tiled)


def values_of(leaf: jax.ShapeDtypeStruct, model_shards: int) -> int:
    """Return the number of values of an array on one of the groups that share a model."""
    return math.prod(leaf.shape) // (model_shards if "model" in leaf.sharding.spec else 1)


def _parameters(model: nnx.Module, model_shards: int) -> dict[str, int]:
    """Count the parameters of layers in loops on one device, and those that FSDP gathers at one time.

    The latter are the largest layer and everything outside of loops.
    """
    in_loops = 0
    stacks = {"": 0}
    alone = 0
    for name, leaf in pytree.named_leaves(model).items():
        stack, *layer = _STACK.split(f"/{name}", maxsplit=1)
        in_loops += math.prod(leaf.sharding.shard_shape(leaf.shape)) if layer else 0
        if "data" not in leaf.sharding.spec:
            continue
        size = values_of(leaf, model_shards)
        if layer:
            stacks[stack] = stacks.get(stack, 0) + size // leaf.shape[0]
        else:
            alone += size
    return {"layer_parameters": in_loops, "gathered_parameters": max(stacks.values()) + alone}
