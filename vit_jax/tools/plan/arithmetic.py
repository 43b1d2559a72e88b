"""A plan without a compiler: exact sizes of the state, formulas for temporary memory and for the time of a step.

Used where the compiler is missing, and to order the candidates of a search.
"""

import dataclasses
import math
from collections.abc import Iterator

import jax

from vit_jax.optim.by_name import make_is_trained
from vit_jax.sharding.memory import ROWS, Memory, kept_bytes
from vit_jax.tools.plan.hlo import mesh_members
from vit_jax.tools.plan.topology import Topology, make_collective_seconds
from vit_jax.train.assembly import Assembly
from vit_jax.train.step_memory import list_updated_leaves, shard_bytes, step_memory, values_of

ATTAINABLE = 0.6
"""Fraction of its peak at which a chip multiplies matrices: an assumption."""
PASSES = 4
"""Transfers over the memory bus of what a step without rematerialisation keeps: an assumption."""
RECOMPUTED = {"none": 1.0, "dots": 1.05, "attention": 1.2, "full": 4 / 3}
"""FLOPs of a step by policy: `dots` recomputes scores, `attention` projections and hidden units, `full` everything."""


def arithmetic_memory(run: Assembly, topology: Topology) -> Memory:
    """Return the memory of one chip by kind."""
    config = run.config
    return step_memory(
        run.architecture,
        run.abstract_state,
        global_batch=config.global_batch,
        accumulation_steps=config.optimizer.accumulation_steps or 1,
        is_trained=make_is_trained(config.optimizer),
        tiled=topology.is_tpu,
    )


def _images(run: Assembly) -> int:
    """Images of a step on one device, or one group of model shards."""
    axes = run.batch_sharding.mesh.shape
    return run.config.global_batch // (axes["replica"] * axes["data"])


@dataclasses.dataclass(frozen=True)
class Roofline:
    """The time of a step as a sum in which nothing overlaps."""

    compute_seconds: float  # matrix products, recomputation included, at `ATTAINABLE` of the peak
    elementwise_seconds: (
        float  # norms, softmax, GELU and their gradients: `PASSES` over activations
    )
    collective_seconds: (
        float  # parameters gathered and gradients summed, sums of tensor parallelism
    )
    update_seconds: float  # the optimiser's passes over the state, at the memory's bandwidth

    @property
    def seconds(self) -> float:
        return sum(dataclasses.astuple(self))


def roofline(run: Assembly, topology: Topology) -> Roofline:
    """Time of a step by arithmetic."""
    a = run.architecture
    chip = topology.chip
    mesh = run.batch_sharding.mesh
    flops = (
        run.training_flops_per_image
        * RECOMPUTED[a.remat]
        * run.config.global_batch
        / topology.num_chips
    )
    # XLA for TPUs multiplies float32 in one pass of bfloat16 unless asked for more; on GPUs it
    # takes about four times.
    peak = chip.peak_bf16_flops / (1 if a.compute_dtype == "bfloat16" or topology.is_tpu else 4)
    all_kept = dataclasses.replace(a, remat="none", scan_unroll=a.scan_unroll_on_accelerators)
    activations = kept_bytes(
        all_kept, _images(run), model_shards=mesh.shape["model"], tiled=topology.is_tpu
    )
    return Roofline(
        compute_seconds=flops / (ATTAINABLE * peak),
        elementwise_seconds=PASSES * activations / chip.memory_bandwidth_bytes_per_second,
        collective_seconds=sum(_collectives(run, topology)),
        update_seconds=_updated_bytes(run) / chip.memory_bandwidth_bytes_per_second,
    )


def limit_seconds(run: Assembly, topology: Topology) -> float | None:
    """Return the least time of a step of a transformer on one device; None for other networks.

    Each matrix product takes the time of its FLOPs at the peak or of its operands and result at the
    bandwidth of the memory, whichever is longer. Attention keeps scores on the chip. Elementwise
    work costs nothing, the update of the state its bytes.
    """
    a = run.architecture
    chip = topology.chip
    if not a.is_standard or a.has_resnet:
        return None
    shards = run.batch_sharding.mesh.shape["model"]
    size = 2 if a.compute_dtype == "bfloat16" else 4
    images = _images(run)
    bandwidth = chip.memory_bandwidth_bytes_per_second
    tokens = images * a.sequence_length
    of_heads = a.width // shards
    hidden = a.mlp_dim // shards

    def product(rows: int, contracted: int, columns: int) -> float:
        """One of the three products of a layer: outputs, gradients of inputs, gradients of weights."""
        num_bytes = size * (rows * contracted + contracted * columns + rows * columns)
        return max(2 * rows * contracted * columns / chip.peak_bf16_flops, num_bytes / bandwidth)

    layers = product(tokens, a.width, 3 * of_heads) + product(tokens, of_heads, a.width)
    layers += product(tokens, a.width, hidden) + product(tokens, hidden, a.width)
    block = 0.0
    for length in a.attention_lengths:
        flops = 3 * 4 * tokens * length * of_heads
        num_bytes = 12 * size * tokens * of_heads  # 4 arrays forward, 8 backward
        block += 3 * layers + max(flops / chip.peak_bf16_flops, num_bytes / bandwidth)
    embedding = 2 * product(
        images * math.prod(a.grid), 3 * math.prod(a.patch_size), a.width
    )  # images need no gradient
    head = 3 * product(images, a.width, a.num_classes) if a.num_classes else 0.0
    return a.depth * block + embedding + head + _updated_bytes(run) / bandwidth


def _updated_bytes(run: Assembly) -> int:
    """Return the bytes of the updated state and of gradients on one device, read and written."""
    updated = list_updated_leaves(run.abstract_state, make_is_trained(run.config.optimizer))
    return 2 * sum(shard_bytes(leaf, tiled=False) for leaf in updated)


def _collectives(run: Assembly, topology: Topology) -> Iterator[float]:
    mesh = run.batch_sharding.mesh
    micro_batches = run.config.optimizer.accumulation_steps or 1
    seconds = make_collective_seconds(mesh.devices.flat, topology)
    leaves = jax.tree.leaves(run.abstract_state.model)
    spread = [leaf for leaf in leaves if "data" in leaf.sharding.spec]
    replicated = [leaf for leaf in leaves if "data" not in leaf.sharding.spec]
    size = 2 if run.architecture.compute_dtype == "bfloat16" else 4

    def members(*axes: str) -> tuple[int, ...]:
        return tuple(mesh_members(mesh.shape, axes))

    yield seconds("all-reduce", size * _values(replicated, mesh), members("replica", "data"))
    for even, gather, scatter in (
        (True, "all-gather", "reduce-scatter"),
        (False, "all-reduce", "all-reduce"),
    ):
        num_bytes = size * _values(
            [leaf for leaf in spread if _is_even(leaf, topology) == even], mesh
        )
        if num_bytes:
            # In the forward and backward pass
            yield 2 * micro_batches * seconds(gather, num_bytes, members("data"))
            yield micro_batches * seconds(scatter, num_bytes, members("data"))
            yield seconds("all-reduce", num_bytes // mesh.shape["data"], members("replica"))
    if mesh.shape["model"] > 1 and run.architecture.has_transformer:
        a = run.architecture
        tokens = size * _images(run) * a.sequence_length * a.width
        # Two for each attention and its MLP, forward and backward
        sums = 4 * a.depth * len(a.attention_lengths)
        yield sums * seconds("all-reduce", tokens, members("model"))


def _values(
    leaves: list[jax.ShapeDtypeStruct], mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh
) -> int:
    """Parameters of one model shard."""
    return sum(values_of(leaf, mesh.shape["model"]) for leaf in leaves)


def _is_even(leaf: jax.ShapeDtypeStruct, topology: Topology) -> bool:
    """Return whether FSDP's shards are complete tiles; XLA gathers and scatters others by sums of the full array."""
    dim = tuple(leaf.sharding.spec).index("data")
    return not topology.is_tpu or leaf.sharding.shard_shape(leaf.shape)[dim] % ROWS == 0
