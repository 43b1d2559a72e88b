"""A plan without a compiler: exact sizes of the state, formulas for the rest.

Temporary memory and the time of a step are formulas.

Used where the compiler is missing, and to order the candidates of a search.
"""

import dataclasses
import math

import jax

from vit_jax.optim.by_name import make_is_trained
from vit_jax.sharding.memory import ROWS, Memory, count_kept_bytes
from vit_jax.tools.plan.hlo import list_mesh_members
from vit_jax.tools.plan.topology import Topology, make_collective_seconds
from vit_jax.train.assembly import Assembly
from vit_jax.train.step_memory import list_updated_leaves, shard_bytes, step_memory, values_of

ATTAINABLE = 0.6
"""Fraction of its peak at which a chip multiplies matrices: an assumption."""
PASSES = 4
"""Transfers over the memory bus of all activations without rematerialisation: an assumption."""
RECOMPUTED = {"none": 1.0, "dots": 1.05, "attention": 1.2, "full": 4 / 3}
"""FLOPs of a step by policy.

`dots` recomputes scores, `attention` projections and hidden units, `full` everything.
"""


def estimate_memory(run: Assembly, topology: Topology) -> Memory:
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


def _count_images(run: Assembly) -> int:
    """Return the number of images of a step on one device, or one group of model shards."""
    axes = run.batch_sharding.mesh.shape
    return run.config.global_batch // (axes["replica"] * axes["data"])


@dataclasses.dataclass(frozen=True)
class Roofline:
    """The time of a step as a sum in which nothing overlaps."""

    # Matrix products, recomputation included, at `ATTAINABLE` of the peak
    compute_seconds: float
    # Norms, softmax, GELU and their gradients: `PASSES` over activations
    elementwise_seconds: float
    # Gathering parameters and summing gradients, and sums of tensor parallelism
    collective_seconds: float
    # The optimiser's passes over the state, at the memory's bandwidth
    update_seconds: float

    @property
    def seconds(self) -> float:
        return sum(dataclasses.astuple(self))


def estimate_roofline(run: Assembly, topology: Topology) -> Roofline:
    """Estimate the time of a step by arithmetic."""
    a = run.architecture
    bandwidth = topology.chip.memory_bandwidth_bytes_per_second
    flops_per_image = run.training_flops_per_image * RECOMPUTED[a.remat]
    flops = flops_per_image * run.config.global_batch / topology.num_chips
    all_kept = dataclasses.replace(a, remat="none", scan_unroll=a.scan_unroll_on_accelerators)
    activation_bytes = count_kept_bytes(
        all_kept,
        _count_images(run),
        model_shards=run.batch_sharding.mesh.shape["model"],
        tiled=topology.is_tpu,
    )
    return Roofline(
        compute_seconds=flops / (ATTAINABLE * _get_peak_flops(run, topology)),
        elementwise_seconds=PASSES * activation_bytes / bandwidth,
        collective_seconds=_estimate_collectives(run, topology),
        update_seconds=_count_updated_bytes(run) / bandwidth,
    )


def _get_peak_flops(run: Assembly, topology: Topology) -> float:
    """Return FLOP/s of one chip in the compute dtype.

    XLA for TPUs multiplies float32 in one pass of bfloat16 unless asked for more; on GPUs it takes
    about four times.
    """
    peak = topology.chip.peak_bf16_flops
    if run.architecture.compute_dtype == "bfloat16" or topology.is_tpu:
        return peak
    return peak / 4


def _get_value_bytes(run: Assembly) -> int:
    """Return the bytes of one value in the compute dtype."""
    return 2 if run.architecture.compute_dtype == "bfloat16" else 4


def estimate_limit(run: Assembly, topology: Topology) -> float | None:
    """Return the least time of a step of a transformer on one device; None for other networks.

    Each matrix product takes the time of its FLOPs at the peak or of its operands and result at the
    bandwidth of the memory, whichever is longer. Attention keeps scores on the chip. Elementwise
    work costs nothing, the update of the state its bytes.
    """
    a = run.architecture
    if not a.is_standard or a.has_resnet:
        return None
    peak = topology.chip.peak_bf16_flops
    bandwidth = topology.chip.memory_bandwidth_bytes_per_second
    num_shards = run.batch_sharding.mesh.shape["model"]
    value_bytes = _get_value_bytes(run)
    num_images = _count_images(run)
    num_tokens = num_images * a.sequence_length
    heads_width = a.width // num_shards
    mlp_dim = a.mlp_dim // num_shards

    def estimate_product(rows: int, contracted: int, columns: int) -> float:
        """Return seconds of one of a layer's products: outputs, gradients of inputs, of weights."""
        num_values = rows * contracted + contracted * columns + rows * columns
        flops = 2 * rows * contracted * columns
        return max(flops / peak, value_bytes * num_values / bandwidth)

    qkv = estimate_product(num_tokens, a.width, 3 * heads_width)
    attention_output = estimate_product(num_tokens, heads_width, a.width)
    mlp_input = estimate_product(num_tokens, a.width, mlp_dim)
    mlp_output = estimate_product(num_tokens, mlp_dim, a.width)
    layers = (qkv + attention_output) + (mlp_input + mlp_output)
    block = 0.0
    for length in a.attention_lengths:
        attention_flops = 3 * 4 * num_tokens * length * heads_width
        # Four arrays forward, eight backward
        attention_bytes = 12 * value_bytes * num_tokens * heads_width
        block += 3 * layers + max(attention_flops / peak, attention_bytes / bandwidth)

    num_patches = num_images * math.prod(a.grid)
    patch_values = 3 * math.prod(a.patch_size)
    # Images need no gradient
    embedding = 2 * estimate_product(num_patches, patch_values, a.width)
    head = 0.0
    if a.num_classes:
        head = 3 * estimate_product(num_images, a.width, a.num_classes)
    return a.depth * block + embedding + head + _count_updated_bytes(run) / bandwidth


def _count_updated_bytes(run: Assembly) -> int:
    """Return the bytes of the updated state and of gradients on one device, read and written."""
    updated = list_updated_leaves(run.abstract_state, make_is_trained(run.config.optimizer))
    return 2 * sum(shard_bytes(leaf, tiled=False) for leaf in updated)


def _estimate_collectives(run: Assembly, topology: Topology) -> float:
    """Return the seconds of all collectives of a step."""
    mesh = run.batch_sharding.mesh
    estimate_seconds = make_collective_seconds(mesh.devices.flat, topology)

    def estimate(operation: str, num_bytes: int, *axes: str) -> float:
        members = tuple(list_mesh_members(mesh.shape, axes))
        return estimate_seconds(operation, num_bytes, members)

    replicated, even, uneven = _count_parameter_bytes(run, topology)
    micro_batches = run.config.optimizer.accumulation_steps or 1
    seconds = [estimate("all-reduce", replicated, "replica", "data")]
    for num_bytes, gather, scatter in (
        (even, "all-gather", "reduce-scatter"),
        (uneven, "all-reduce", "all-reduce"),
    ):
        if not num_bytes:
            continue
        # Parameters are gathered in the forward and in the backward pass
        seconds.append(2 * micro_batches * estimate(gather, num_bytes, "data"))
        seconds.append(micro_batches * estimate(scatter, num_bytes, "data"))
        bytes_of_shard = num_bytes // mesh.shape["data"]
        seconds.append(estimate("all-reduce", bytes_of_shard, "replica"))

    a = run.architecture
    if mesh.shape["model"] > 1 and a.has_transformer:
        token_bytes = _get_value_bytes(run) * _count_images(run) * a.sequence_length * a.width
        # Two for each attention and its MLP, forward and backward
        num_sums = 4 * a.depth * len(a.attention_lengths)
        seconds.append(num_sums * estimate("all-reduce", token_bytes, "model"))
    return sum(seconds)


def _count_parameter_bytes(run: Assembly, topology: Topology) -> tuple[int, int, int]:
    """Return the bytes of one model shard: replicated, in even and in uneven FSDP shards."""
    num_shards = run.batch_sharding.mesh.shape["model"]
    value_bytes = _get_value_bytes(run)
    replicated = even = uneven = 0
    for leaf in jax.tree.leaves(run.abstract_state.model):
        num_bytes = value_bytes * values_of(leaf, num_shards)
        if "data" not in leaf.sharding.spec:
            replicated += num_bytes
        elif _is_even(leaf, topology):
            even += num_bytes
        else:
            uneven += num_bytes
    return replicated, even, uneven


def _is_even(leaf: jax.ShapeDtypeStruct, topology: Topology) -> bool:
    """Return True if FSDP's shards are complete tiles.

    XLA gathers and scatters other shards by sums of the full array.
    """
    if not topology.is_tpu:
        return True
    dim = tuple(leaf.sharding.spec).index("data")
    shard_shape = leaf.sharding.shard_shape(leaf.shape)
    return shard_shape[dim] % ROWS == 0
