"""Memory of a step on one device by formula: the state, and the rest from `sharding.memory`."""

import math
import re

import jax
from flax import nnx

from vit_jax import pytree
from vit_jax.config import Architecture
from vit_jax.config.sizes import RGB_CHANNELS
from vit_jax.optim.by_name import TrainedParameters, count_trained_blocks, select_trained
from vit_jax.sharding import BATCH_AXES
from vit_jax.sharding.memory import Memory, count_padded_bytes, count_passing_bytes
from vit_jax.train.state import TrainState

_PROGRAM_BYTES = 30_000_000
_STACK = re.compile("/(?:blocks|rest)/")
"""The part of a parameter's name that says that a loop runs its layers."""


def step_memory(
    architecture: Architecture,
    state: TrainState,
    *,
    image_size: tuple[int, int],
    global_batch: int,
    accumulation_steps: int,
    trained: TrainedParameters | None,
    tiled: bool,
    teacher: nnx.Module | None = None,
) -> Memory:
    """Return the memory of one device by kind.

    Args:
      architecture: the network, with the policy of rematerialisation.
      state: shapes, dtypes and shardings.
      image_size: height and width of an image before patches are dropped.
      global_batch: images of a step on all devices.
      accumulation_steps: micro-batches of a step.
      trained: the parameters that have a gradient; None: all have.
      tiled: True on TPUs, whose memory consists of tiles.
      teacher: abstract parameters of a teacher.

    Raises:
      ValueError: a part is the user's own code.
    """
    sharding = state.step.sharding
    assert isinstance(sharding, jax.sharding.NamedSharding)
    axes = sharding.mesh.shape
    images = global_batch
    for axis in BATCH_AXES:
        images = images // axes[axis]

    gradients = select_trained(state.model, trained)
    passing = count_passing_bytes(
        architecture,
        images=images // accumulation_steps,
        image_size=image_size,
        gradient_bytes=sum_bytes(gradients, tiled=tiled),
        layer_parameters=_count_layer_parameters(state.model),
        gathered_parameters=_count_gathered_parameters(state.model, axes["model"]),
        trained_blocks=count_trained_blocks(state.model, trained),
        recomputes_activation=_recomputes_activation(state.model),
        is_accumulated=accumulation_steps > 1,
        model_shards=axes["model"],
        tiled=tiled,
    )

    image_dimensions = (images * architecture.channels, *image_size)
    image_itemsize = 1 if architecture.channels == RGB_CHANNELS else 4
    return Memory(
        parameters=sum_bytes((state.model, teacher), tiled=tiled),
        optimizer=sum_bytes(state.optimizer, tiled=tiled),
        average=sum_bytes(state.polyak, tiled=tiled),
        batch=count_padded_bytes(image_dimensions, image_itemsize, tiled=tiled),
        **passing,
        program=_PROGRAM_BYTES,
    )


def _recomputes_activation(model: nnx.Module) -> bool:
    """Return whether LoRA has factors of the second layer of MLPs (`Mlp.recomputes_activation`)."""
    names = pytree.name_leaves(model)
    return any(name.endswith("mlp/contract/lora_a") for name in names)


def list_updated_leaves(
    state: TrainState,
    trained: TrainedParameters | None,
) -> list[jax.ShapeDtypeStruct]:
    """Return the arrays that an update reads and writes: gradients, and the state that is trained."""
    leaves = select_trained(state.model, trained)
    return jax.tree.leaves((state.step, leaves, state.optimizer, state.polyak, leaves))


def sum_bytes(tree: object, *, tiled: bool) -> int:
    """Return the bytes on one device of all arrays of a tree."""
    return sum(shard_bytes(leaf, tiled=tiled) for leaf in jax.tree.leaves(tree))


def shard_bytes(leaf: jax.ShapeDtypeStruct, *, tiled: bool) -> int:
    """Return the bytes on one device of an abstract array with a sharding."""
    return count_padded_bytes(
        leaf.sharding.shard_shape(leaf.shape), leaf.dtype.itemsize, tiled=tiled
    )


def values_of(leaf: jax.ShapeDtypeStruct, model_shards: int) -> int:
    """Return the number of values of an array on one of the groups that share a model."""
    num_values = math.prod(leaf.shape)
    if "model" in leaf.sharding.spec:
        return num_values // model_shards
    return num_values


def _find_stack(name: str) -> str | None:
    """Return the stack of layers that a parameter belongs to; None outside of loops."""
    stack, *layer = _STACK.split(f"/{name}", maxsplit=1)
    return stack if layer else None


def _count_layer_parameters(model: nnx.Module) -> int:
    """Return the number of parameters of layers in loops on one device."""
    count = 0
    for name, leaf in pytree.name_leaves(model).items():
        if _find_stack(name) is not None:
            count += math.prod(leaf.sharding.shard_shape(leaf.shape))
    return count


def _count_gathered_parameters(model: nnx.Module, model_shards: int) -> int:
    """Return the number of parameters gathered at one time: the largest layer and all outside loops."""
    layer_sizes: dict[str, int] = {}
    outside = 0
    for name, leaf in pytree.name_leaves(model).items():
        if "data" not in leaf.sharding.spec:
            continue
        num_values = values_of(leaf, model_shards)
        stack = _find_stack(name)
        if stack is None:
            outside += num_values
        else:
            num_layers = leaf.shape[0]
            layer_sizes[stack] = layer_sizes.get(stack, 0) + num_values // num_layers
    return outside + max(layer_sizes.values(), default=0)
