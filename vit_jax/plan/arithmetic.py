"""A plan without a compiler: exact sizes of the state, formulas for what passes, and the time of a step at best.

Used where libtpu is missing, for GPUs, and to leave out candidates of a search that cannot win.
"""

import dataclasses
import math
import re
from collections.abc import Iterator
from typing import Any

import jax

from vit_jax import pytree
from vit_jax.cost.chips import Chip
from vit_jax.cost.flops import training_flops_per_image
from vit_jax.cost.memory import ROWS, kept_bytes, padded_bytes, passing_bytes
from vit_jax.plan.memory import Memory
from vit_jax.plan.network import make_collective_seconds
from vit_jax.plan.topology import Topology
from vit_jax.train.assemble import Assembly

ATTAINABLE = 0.6
"""Fraction of its peak at which a chip multiplies matrices: an assumption."""
PASSES = 4
"""How often what a step without rematerialisation keeps goes over the memory bus: an assumption."""
RECOMPUTED = {"none": 1.0, "dots": 1.05, "full": 4 / 3}
"""Arithmetic of a step by rematerialisation policy; dots computes attention weights again, full the forward pass."""
_PROGRAM_BYTES = 30_000_000
_STACKED = ("blocks", "rest")  # layers that a loop runs


def arithmetic_memory(run: Assembly, topology: Topology) -> Memory:
    """Memory of one chip by kind."""
    tiled, config, a = topology.is_tpu, run.config, run.architecture
    sizes = {
        kind: sum(shard_bytes(leaf, tiled=tiled) for leaf in jax.tree.leaves(getattr(run.abstract_state, kind)))
        for kind in ("model", "optimizer", "polyak")
    }
    axes = run.batch_sharding.mesh.shape
    images = config.global_batch // (axes["replica"] * axes["data"])
    height, width = a.image_size
    passing = passing_bytes(
        a,
        images=images // config.optimizer.accumulation_steps,
        gradient_bytes=sizes["model"],
        layer_parameters=_layer_parameters(run),
        gathered_parameters=_gathered_parameters(run),
        is_accumulated=config.optimizer.accumulation_steps > 1,
        model_shards=axes["model"],
        tiled=tiled,
    )
    return Memory(
        parameters=sizes["model"],
        optimizer=sizes["optimizer"],
        average=sizes["polyak"],
        batch=padded_bytes((images * 3, height, width), 1, tiled=tiled),
        **dataclasses.asdict(passing),
        program=_PROGRAM_BYTES,
    )


def _layer_parameters(run: Assembly) -> int:
    """Parameters on one device of layers that loops run."""
    model = pytree.named_leaves(run.abstract_state.model)
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) for name, leaf in model.items() if _is_stacked(name))


def _gathered_parameters(run: Assembly) -> int:
    """Parameters that FSDP brings together at one time: of the largest stack one layer, and of what is no stack all."""
    stacks, alone = {"": 0}, 0
    for name, leaf in pytree.named_leaves(run.abstract_state.model).items():
        if "data" not in leaf.sharding.spec:
            continue
        size = math.prod(leaf.shape) // (run.batch_sharding.mesh.shape["model"] if "model" in leaf.sharding.spec else 1)
        if _is_stacked(name):
            stack = re.split("|".join(f"/{part}/" for part in _STACKED), f"/{name}")[0]
            stacks[stack] = stacks.get(stack, 0) + size // leaf.shape[0]
        else:
            alone += size
    return max(stacks.values()) + alone


def _is_stacked(name: str) -> bool:
    return any(part in _STACKED for part in name.split("/"))


def shard_bytes(leaf: Any, *, tiled: bool) -> int:
    """Bytes on one device of an array that is abstract and placed."""
    return padded_bytes(leaf.sharding.shard_shape(leaf.shape), leaf.dtype.itemsize, tiled=tiled)


@dataclasses.dataclass(frozen=True)
class Roofline:
    """The time of a step as a sum that hides nothing behind anything.

    Attributes:
      compute_seconds: matrix products, what is computed again included, at `ATTAINABLE` of the peak.
      elementwise_seconds: norms, softmax, GELU and their gradients: `PASSES` over activations.
      collective_seconds: parameters gathered and gradients summed, sums of tensor parallelism.
      update_seconds: the optimiser's passes over the state, at the memory's bandwidth.
    """

    compute_seconds: float
    elementwise_seconds: float
    collective_seconds: float
    update_seconds: float

    @property
    def seconds(self) -> float:
        return sum(dataclasses.astuple(self))


def roofline(run: Assembly, topology: Topology) -> Roofline:
    """Time of a step by arithmetic."""
    a, chip = run.architecture, topology.chip
    flops = training_flops_per_image(a) * RECOMPUTED[a.remat] * run.config.global_batch / topology.num_chips
    return Roofline(
        compute_seconds=flops / (ATTAINABLE * _peak(chip, a.compute_dtype)),
        elementwise_seconds=PASSES * _activation_bytes(run, topology) / chip.memory_bandwidth_bytes_per_second,
        collective_seconds=sum(_collectives(run, topology)),
        update_seconds=_update_bytes(run) / chip.memory_bandwidth_bytes_per_second,
    )


def _activation_bytes(run: Assembly, topology: Topology) -> int:
    """What one device would keep of its images if nothing were computed again."""
    axes, a = run.batch_sharding.mesh.shape, dataclasses.replace(run.architecture, remat="none")
    images = run.config.global_batch // (axes["replica"] * axes["data"])
    return kept_bytes(a, images, model_shards=axes["model"], tiled=topology.is_tpu)


def _peak(chip: Chip, compute_dtype: str) -> float:
    passes = 1 if compute_dtype == "bfloat16" else 4  # float32 takes several passes, or fewer units
    return chip.peak_bf16_flops / passes


def _update_bytes(run: Assembly) -> float:
    """Gradient, parameter and both moments read, all but the gradient written, as far as they lie on one device."""
    state = sum(shard_bytes(leaf, tiled=False) for leaf in jax.tree.leaves(run.abstract_state))
    gradients = sum(shard_bytes(leaf, tiled=False) for leaf in jax.tree.leaves(run.abstract_state.model))
    return 2 * state + 2 * gradients


def _collectives(run: Assembly, topology: Topology) -> Iterator[float]:
    mesh, config = run.batch_sharding.mesh, run.config
    seconds = make_collective_seconds(list(mesh.devices.flat), topology)
    leaves = jax.tree.leaves(run.abstract_state.model)
    spread = [leaf for leaf in leaves if "data" in leaf.sharding.spec]
    whole = [leaf for leaf in leaves if "data" not in leaf.sharding.spec]
    size = 2 if run.architecture.compute_dtype == "bfloat16" else 4
    parts = config.optimizer.accumulation_steps
    yield seconds("all-reduce", size * _values(whole, mesh), _members(mesh, "replica", "data"))
    for even, gather, scatter in ((True, "all-gather", "reduce-scatter"), (False, "all-reduce", "all-reduce")):
        num_bytes = size * _values([leaf for leaf in spread if _is_even(leaf, topology) == even], mesh)
        if num_bytes:
            yield 2 * parts * seconds(gather, num_bytes, _members(mesh, "data"))  # in the forward and backward pass
            yield parts * seconds(scatter, num_bytes, _members(mesh, "data"))
            yield seconds("all-reduce", num_bytes // mesh.shape["data"], _members(mesh, "replica"))
    if mesh.shape["model"] > 1 and run.architecture.has_transformer:
        a = run.architecture
        images = config.global_batch // (mesh.shape["replica"] * mesh.shape["data"])
        tokens = size * images * a.sequence_length * a.width
        yield 4 * a.depth * seconds("all-reduce", tokens, _members(mesh, "model"))  # two a block, forward and backward


def _values(leaves: list[Any], mesh: Any) -> int:
    """Of one model shard."""
    shards = mesh.shape["model"]
    return sum(math.prod(leaf.shape) // (shards if "model" in leaf.sharding.spec else 1) for leaf in leaves)


def _is_even(leaf: Any, topology: Topology) -> bool:
    """Whether FSDP's parts are whole tiles; XLA gathers others, and scatters their gradients, by sums of all of it."""
    dim = tuple(leaf.sharding.spec).index("data")
    return not topology.is_tpu or leaf.sharding.shard_shape(leaf.shape)[dim] % ROWS == 0


def _members(mesh: Any, *axes: str) -> tuple[int, ...]:
    """Positions in the mesh of one group along these axes."""
    found, stride = [0], 1
    for name, length in reversed(mesh.shape.items()):
        if name in axes:
            found = [start + stride * index for index in range(length) for start in found]
        stride *= length
    return tuple(found)
