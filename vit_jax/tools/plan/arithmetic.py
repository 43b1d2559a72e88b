"""A plan without a compiler: exact sizes of the state, formulas for the rest.

The time of a step is a sum of work at rates, which are fitted to compiled steps
(`tests/tools/plan/calibration.py`, table in `bench/PLANS.md`).

Used where the compiler is missing, and to order the candidates of a search.
"""

import dataclasses
import math

import jax

from vit_jax.config import Architecture
from vit_jax.optim.by_name import count_trained_blocks, find_trained, select_trained
from vit_jax.pytree import name_leaves
from vit_jax.sharding.memory import ROWS, Memory, count_kept_bytes, is_unrolled
from vit_jax.tools.plan.gpu_kernels import (
    ATTENTION_TILE,
    LAUNCH_SECONDS,
    OPERATIONS_PER_FLOP,
)
from vit_jax.tools.plan.hlo import list_mesh_members
from vit_jax.tools.plan.topology import Topology, make_collective_seconds
from vit_jax.train.assembly import Assembly
from vit_jax.train.step_memory import list_updated_leaves, shard_bytes, step_memory, values_of

ERROR = 0.15
"""Largest error of time and memory beside the compiled rows of transformers, as a fraction."""
RECOMPUTED = {"none": 1.0, "dots": 1.05, "attention": 1.2, "full": 4 / 3}
"""FLOPs of a step by policy.

`dots` recomputes scores, `attention` projections and hidden units, `full` everything.
"""
REFERENCE_WIDTH = 1024
BYTES_OF_OPERATION = 2
"""Bytes of a value for each counted elementwise operation: float32 counts twice."""


@dataclasses.dataclass(frozen=True)
class Rates:
    """Factors of a platform: how often each part of the work takes its time at full speed.

    Attributes:
      products: matrix products at the peak.
      results: the same by `REFERENCE_WIDTH` / width: TPUs write results of short products slowly.
      attention: products of attention in complete tiles at the peak, besides `products`.
      operations: elementwise operations on each bfloat16 value that a block keeps.
      maps: activations of networks with residual units over the memory bus.
      updates: the updated state over the memory bus.
      copies: the same in a step with loops, which copy the gradients of their layers.
      stacks: kept activations of a loop without rematerialisation, with their copies in bfloat16,
        over the memory bus.
      launches: starts of kernels.
      overlapped: share of FSDP's collectives for which a step without loops waits.
      exposed: the same for other collectives and with loops.
    """

    products: float
    results: float = 0.0
    attention: float = 0.0
    operations: float = 0.0
    maps: float = 0.9
    updates: float = 1.0
    copies: float = 1.0
    stacks: float = 2.0
    launches: float = 0.0
    overlapped: float = 0.25
    exposed: float = 1.1


_GPU = Rates(
    products=1.27,
    attention=4.66,
    operations=44.6,
    maps=3.0,
    updates=1.62,
    copies=1.62,
    stacks=2.88,
    launches=1.1,
    exposed=0.25,
)
_V5E = Rates(products=0.87, results=0.57, copies=3.45, stacks=1.92)
_V5P = Rates(products=0.94, results=0.62)
_V6E = Rates(products=0.0, results=3.3)
RATES: dict[str, Rates] = {"TPU v4": _V5P, "TPU v5e": _V5E, "TPU v5p": _V5P, "TPU v6e": _V6E}
"""Rates by chip; all GPUs have `_GPU`. v4 has no compiled rows and takes those of v5p."""
GPU_KEPT = 0.75
"""Activations that XLA for GPUs keeps outside of loops, of those that the formula counts."""
GPU_KEPT_IN_LOOPS = 0.48
"""The same for loops without rematerialisation."""
GPU_RECOMPUTED = 11 / 9
"""FLOPs of a step on GPUs that recomputes everything: XLA removes the last product of a block."""
KERNELS_OF_STEP = 250
KERNELS_OF_LAYER = 55
"""Kernels of a step on a GPU: 500 with 4 layers, 760 to 1,000 with 12."""

UNIT_TEMPORARY = 0.4
"""Temporary memory of networks with residual units on TPUs, whose kernels keep maps on the chip, of
that by formula."""


def get_rates(topology: Topology) -> Rates:
    """Return the rates of the chips of a machine."""
    return RATES.get(topology.chip.name, _GPU)


def estimate_memory(run: Assembly, topology: Topology) -> Memory:
    """Return the memory of one chip by kind."""
    config = run.config
    memory = step_memory(
        run.training_architecture,
        run.abstract_state,
        image_size=run.architecture.image_size,
        global_batch=config.global_batch,
        accumulation_steps=config.optimizer.accumulation_steps or 1,
        trained=find_trained(config.optimizer),
        tiled=topology.is_tpu,
        teacher=run.teacher.abstract.network if run.teacher is not None else None,
    )
    if topology.is_tpu:
        if not run.architecture.has_resnet:
            return memory
        return dataclasses.replace(memory, temporary=int(UNIT_TEMPORARY * memory.temporary))
    activations = int(_get_kept_share(run) * memory.activations)
    temporary = memory.temporary
    if run.architecture.remat == "dots" and not is_unrolled(run.architecture, tiled=False):
        # XLA for GPUs, unlike that for TPUs, copies no gradients of a loop
        temporary = max(0, temporary - memory.gradients)
    if config.optimizer.lora_rank is not None:
        # The kernels are stored in the compute dtype and read without a copy.
        temporary = max(0, temporary - memory.parameters)
    return dataclasses.replace(memory, activations=activations, temporary=temporary)


def _get_kept_share(run: Assembly) -> float:
    """Return the share of the activations by formula that XLA for GPUs keeps."""
    a = run.training_architecture
    if not a.has_transformer:
        return 1.0
    if is_unrolled(a, tiled=False):
        return GPU_KEPT
    if a.remat == "none":
        return GPU_KEPT_IN_LOOPS
    return 1.0


def _count_images(run: Assembly) -> int:
    """Return the number of images of a step on one device, or one group of model shards."""
    axes = run.batch_sharding.mesh.shape
    return run.config.global_batch // (axes["replica"] * axes["data"])


@dataclasses.dataclass(frozen=True)
class Work:
    """The work of a step on one device, in seconds at full speed unless stated.

    Attributes:
      products: matrix products at the peak, recomputation included.
      results: the same by `REFERENCE_WIDTH` / width; 0 with residual units.
      attention: products of attention in complete tiles at the peak, of bfloat16.
      operations: one elementwise operation on each bfloat16 value that the blocks keep.
      maps: one pass over those of a network with residual units.
      stacks: one pass over the kept activations of a loop without rematerialisation.
      update: one pass over the updated state.
      collectives: collectives that have the links to themselves.
      launches: starts of kernels on a GPU.
      is_looped: a loop runs the layers.
      is_overlapped: products run beside FSDP's collectives.
    """

    products: float
    results: float
    attention: float
    operations: float
    maps: float
    stacks: float
    update: float
    collectives: float
    launches: float
    is_looped: bool
    is_overlapped: bool


def measure_work(run: Assembly, topology: Topology) -> Work:
    """Return the work of a step on one device."""
    a = run.training_architecture
    micro_batches = run.config.optimizer.accumulation_steps or 1
    bandwidth = topology.chip.memory_bandwidth_bytes_per_second
    recomputed = RECOMPUTED[a.remat]
    if a.remat == "full" and not topology.is_tpu:
        recomputed = GPU_RECOMPUTED
    flops_per_image = run.training_flops_per_image * recomputed * _count_passes(run)
    flops = flops_per_image * run.config.global_batch / topology.num_chips
    products = flops / _get_peak_flops(run, topology)

    unrolled = is_unrolled(a, tiled=topology.is_tpu)
    all_kept = dataclasses.replace(a, remat="none", scan_unroll=a.scan_unroll_on_accelerators)
    backward_share = _get_backward_share(run)
    kept_bytes = (1 + 2 * backward_share) / 3 * _count_kept(run, all_kept, topology)
    one_pass = kept_bytes / bandwidth
    operations_per_second = OPERATIONS_PER_FLOP * topology.chip.peak_bf16_flops
    operations = kept_bytes / BYTES_OF_OPERATION / operations_per_second
    stacks = 0.0
    if a.remat == "none" and a.compute_dtype == "bfloat16" and not (unrolled or a.has_resnet):
        stacks = backward_share * _count_kept(run, a, topology) / bandwidth
    num_kernels = KERNELS_OF_STEP + KERNELS_OF_LAYER * micro_batches * (a.depth + sum(a.units))
    results = 0.0
    maps = 0.0
    if a.has_resnet:
        operations = 0.0
        maps = one_pass
    else:
        results = products * REFERENCE_WIDTH / a.width
    return Work(
        products=products,
        results=results,
        attention=_estimate_attention(run, topology),
        operations=operations,
        maps=maps,
        stacks=stacks,
        update=_count_updated_bytes(run) / bandwidth,
        collectives=_estimate_collectives(run, topology),
        launches=LAUNCH_SECONDS * num_kernels,
        is_looped=not unrolled and not a.has_resnet,
        is_overlapped=unrolled and run.config.sharding.parameters == "fsdp",
    )


def _estimate_attention(run: Assembly, topology: Topology) -> float:
    """Return seconds at the peak of attention by kernels, which multiply complete tiles."""
    a = run.training_architecture
    if a.compute_dtype != "bfloat16":
        return 0.0
    flops = 0.0
    for length in a.attention_lengths:
        tiled = ATTENTION_TILE * math.ceil(length / ATTENTION_TILE)
        flops += 4 * a.sequence_length / length * tiled**2 * a.width
    num_passes = 1 + 2 * _get_backward_share(run)
    if a.remat == "full":
        num_passes += 1
    num_images = run.config.global_batch / topology.num_chips
    return num_passes * num_images * a.depth * flops / topology.chip.peak_bf16_flops


def _count_kept(
    run: Assembly,
    architecture: Architecture,
    topology: Topology,
) -> int:
    """Return the bytes that the forward pass of all images keeps on one device."""
    return count_kept_bytes(
        architecture,
        _count_images(run),
        model_shards=run.batch_sharding.mesh.shape["model"],
        tiled=topology.is_tpu,
    )


def _get_backward_share(run: Assembly) -> float:
    """Return the share of the layers that have a backward pass."""
    trained = find_trained(run.config.optimizer)
    num_blocks = count_trained_blocks(run.abstract_state.model, trained)
    if num_blocks is None:
        return 1.0
    return num_blocks / max(1, run.architecture.depth)


def _count_passes(run: Assembly) -> float:
    """Return the FLOPs of the passes that training needs, as a fraction of all three.

    Frozen parameters need no gradients, and layers before the first trained one no backward pass.
    LoRA's thin products read activations, which takes about the time of the gradients of kernels.
    """
    trained = find_trained(run.config.optimizer)
    if trained is None or run.config.optimizer.lora_rank is not None:
        return 1.0
    backward_share = _get_backward_share(run)
    if backward_share < 1:
        return (1 + 2 * backward_share) / 3
    leaves = select_trained(run.abstract_state.model, trained)
    num_trained = sum(leaf.size for leaf in leaves.values())
    parameters = name_leaves(run.abstract_state.model)
    num_parameters = sum(leaf.size for leaf in parameters.values())
    return (2 + num_trained / num_parameters) / 3


@dataclasses.dataclass(frozen=True)
class Roofline:
    """The time of a step as a sum of work at the rates of the machine."""

    # Matrix products, recomputation included
    compute_seconds: float
    # Norms, softmax, GELU and their gradients, copies of loops
    elementwise_seconds: float
    # Waiting for gathered parameters, sums of gradients and of tensor parallelism
    collective_seconds: float
    # The optimiser's passes over the state
    update_seconds: float
    # Starts of kernels
    launch_seconds: float = 0.0

    @property
    def seconds(self) -> float:
        return sum(dataclasses.astuple(self))


def estimate_roofline(run: Assembly, topology: Topology) -> Roofline:
    """Estimate the time of a step by arithmetic."""
    work = measure_work(run, topology)
    rates = get_rates(topology)
    elementwise = rates.operations * work.operations
    elementwise += rates.maps * work.maps + rates.stacks * work.stacks
    products = rates.products * work.products + rates.results * work.results
    collectives = rates.overlapped if work.is_overlapped else rates.exposed
    updates = rates.copies if work.is_looped else rates.updates
    return Roofline(
        compute_seconds=products + rates.attention * work.attention,
        elementwise_seconds=elementwise,
        collective_seconds=collectives * work.collectives,
        update_seconds=updates * work.update,
        launch_seconds=rates.launches * work.launches,
    )


def _get_peak_flops(run: Assembly, topology: Topology) -> float:
    """Return FLOP/s of one chip in the compute dtype.

    XLA for TPUs multiplies float32 in one pass of bfloat16 unless asked for more; GPUs take TF32,
    at half of the speed, which the fit to `pretrain_s16_baseline` confirms.
    """
    peak = topology.chip.peak_bf16_flops
    if run.architecture.compute_dtype == "bfloat16" or topology.is_tpu:
        return peak
    return peak / 2


def _get_value_bytes(run: Assembly) -> int:
    """Return the bytes of one value in the compute dtype."""
    if run.architecture.compute_dtype == "bfloat16":
        return 2
    return 4


def estimate_limit(run: Assembly, topology: Topology) -> float | None:
    """Return the least time of a step of a transformer on one device; None for other networks.

    Each matrix product takes the time of its FLOPs at the peak or of its operands and result at the
    bandwidth of the memory, whichever is longer. Attention keeps scores on the chip. Elementwise
    work costs nothing, the update of the state its bytes.
    """
    a = run.training_architecture
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
    patch_values = a.channels * math.prod(a.patch_size)
    # Images need no gradient
    embedding = 2 * estimate_product(num_patches, patch_values, a.width)
    head = 0.0
    if a.num_classes:
        head = 3 * estimate_product(num_images, a.width, a.num_classes)
    return a.depth * block + embedding + head + _count_updated_bytes(run) / bandwidth


def _count_updated_bytes(run: Assembly) -> int:
    """Return the bytes of the updated state and of gradients on one device, read and written."""
    updated = list_updated_leaves(run.abstract_state, find_trained(run.config.optimizer))
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

    a = run.training_architecture
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
