"""One mesh for every run, from the single device of a laptop to several slices of a pod.

Axes: `replica` between groups of devices that each hold all parameters (slices, nodes), `data`
within such a group, `model` for tensor parallelism. The batch is split over the first two.
"""

import dataclasses
import math
import operator
import re
from collections.abc import Callable, Sequence
from typing import TypeVar

import jax
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from vit_jax.config import ShardingConfig

F = TypeVar("F", bound=Callable[..., tuple])
Options = dict[str, str | bool]
AXES = ("replica", "data", "model")
BATCH_AXES = ("replica", "data")
_SPECS = {
    "tokens_BSD": PartitionSpec(BATCH_AXES, None, None),
    "heads_BSE": PartitionSpec(BATCH_AXES, None, "model"),
    "hidden_BSM": PartitionSpec(BATCH_AXES, None, "model"),
    "hidden_RM": PartitionSpec(BATCH_AXES, "model"),  # tokens of all images in one dimension
    "map_BHWC": PartitionSpec(BATCH_AXES, None, None, None),
    "map_BRC": PartitionSpec(BATCH_AXES, None, None),  # positions in one dimension
    "whole": PartitionSpec(),
    "bias_3E": PartitionSpec(None, "model"),
    "bias_B3E": PartitionSpec(BATCH_AXES, None, "model"),  # gradients of each image
    # One number for each query, heads in groups of G.
    "rows_BTGS": PartitionSpec(BATCH_AXES, "model", None, None),
}
TPU_OPTIONS: Options = {
    # Where a collective meets a matrix product, XLA for TPUs replaces both by a loop over parts
    # ("windowed einsum"). By its own cycle count a step of ViT-B/16 with FSDP takes four times as
    # long with these loops as with collectives (bench/PLANS.md). They are allowed from this many
    # MiB on.
    "xla_jf_spmd_threshold_for_windowed_einsum_mib": "1000000",
    # Sums of gradients run beside the products of other layers, as gathered parameters do anyway:
    # "continuation fusion" in MaxText (benchmarks/xla_flags_library.py).
    "xla_enable_async_all_reduce": "ENABLED",
    "xla_tpu_enable_async_collective_fusion_fuse_all_reduce": "true",
    # A sum of several arrays cannot run beside anything. Only arrays of less than a MiB together,
    # such as those of norms, are joined. XLA would join up to 120 MiB.
    "xla_jf_crs_combiner_threshold_in_bytes": str(2**20),
}
GPU_OPTIONS: Options = {
    # All products by cuBLAS. XLA's own kernels for them, which it tries too, make it split the sums
    # of LoRA's thin products into parts that it pads, and prevent cuBLAS from adding biases. On an
    # H100 a step takes 9 % less without them (DINOv3 B/16, LoRA), 1 % (all parameters) and 5 %
    # (B/16, 256 images), and compiles in half the time.
    "xla_gpu_enable_triton_gemm": False,
}
CPU_UNIT_OPTIONS: Options = {
    # The order that needs least memory, 0.73 instead of 0.99 GB for a step of R50x1 with 8 images,
    # which takes 4 % less CPU time. A small ViT takes 5 % more.
    "xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED",
}
KIND_OPTIONS: dict[str, Options] = {  # by `device_kind`
    "TPU v5 lite": {  # v5e
        # The same for sums of which each chip keeps a part. A product beside one needs more of the
        # chip's 128 MiB of vector memory than the 16 MiB that XLA allows: without the third option
        # it rejects H/14.
        "xla_enable_async_reduce_scatter_fusion": "ENABLED",
        "xla_tpu_enable_async_collective_fusion_fuse_reduce_scatter": "true",
        "xla_tpu_scoped_vmem_limit_kib": str(32 * 1024),
    }
}


def build_mesh(
    devices: Sequence[jax.Device],
    config: ShardingConfig = ShardingConfig(),  # noqa: B008 (frozen)
) -> Mesh:
    """Return all devices in the order of their network.

    Neighbours lie along `model`, slices along `replica`. The product of the config's `num_replicas`
    and `num_model_shards` divides the number of devices (`resolve` checks it); the data axis takes
    the remaining ones.

    Raises:
      ValueError: numbers that do not fit the slices.
    """
    num_slices = count_slices(devices)
    num_replicas = config.num_replicas
    if num_replicas is None:
        num_replicas = num_slices
    if num_replicas % num_slices and num_slices % num_replicas:
        raise ValueError(
            f"config.sharding.num_replicas={num_replicas}: must divide the {num_slices} slices, "
            f"or be a multiple. Leave it at None for {num_slices}."
        )
    devices_of_slice = len(devices) // num_slices
    num_shards = config.num_model_shards
    if devices_of_slice % num_shards:
        raise ValueError(
            f"config.sharding.num_model_shards={num_shards}: must divide the {devices_of_slice} "
            "devices of a slice, within which the network is fast."
        )

    shape = (num_replicas, len(devices) // (num_replicas * num_shards), num_shards)
    if num_slices == 1:
        grid = mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
    else:
        # Several slices lie along data where parameters are spread over slices.
        slices_of_replicas = math.gcd(num_replicas, num_slices)
        between = (slices_of_replicas, num_slices // slices_of_replicas, 1)
        within = tuple(map(operator.floordiv, shape, between))
        grid = mesh_utils.create_hybrid_device_mesh(
            within,
            between,
            devices,
            allow_split_physical_axes=True,
        )
    return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def count_slices(devices: Sequence[jax.Device]) -> int:
    """Return the number of groups with a fast network, as jax counts them.

    Groups are TPU slices or nodes of GPUs; CPUs are one.
    """
    accelerators = [device for device in devices if device.platform != "cpu"]
    slices = {getattr(device, "slice_index", None) or 0 for device in accelerators}
    return max(len(slices), 1)


def compiler_options(mesh: Mesh, has_units: bool = False) -> Options | None:
    """Return the options of `jax.jit` for a step on this mesh, or None.

    `has_units` is true for a network with residual units, a ResNet or a hybrid.
    """
    device = mesh.devices.flat[0]
    if device.platform == "gpu":
        return GPU_OPTIONS
    if device.platform == "tpu":
        return TPU_OPTIONS | KIND_OPTIONS.get(device.device_kind, {})
    if device.platform == "cpu" and has_units:
        return CPU_UNIT_OPTIONS
    return None


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Return the sharding that splits the first dimension over replicas and data."""
    return NamedSharding(mesh, PartitionSpec(BATCH_AXES))


def replicate(mesh: Mesh) -> NamedSharding:
    """Return the sharding with the complete array on each device."""
    return NamedSharding(mesh, PartitionSpec())


@dataclasses.dataclass(frozen=True)
class Placement:
    """The layout of activations on a mesh, for `devices.trace_for`.

    Without it the compiler may follow the placement of FSDP's parameters instead and gather the
    batch on every device.
    """

    mesh: Mesh

    @property
    def platform(self) -> str:
        """The platform of the mesh's devices."""
        return str(self.mesh.devices.flat[0].platform)

    @property
    def device_kind(self) -> str:
        """The kind of the mesh's devices."""
        return str(self.mesh.devices.flat[0].device_kind)

    @property
    def num_devices(self) -> int:
        """The number of devices of the mesh."""
        return self.mesh.size

    @property
    def compute_capability(self) -> tuple[int, ...] | None:
        """The compute capability, see `devices.TargetDevices`.

        AMD GPUs have names such as "gfx90a" there.
        """
        version = getattr(self.mesh.devices.flat[0], "compute_capability", None)
        if version is None:
            return None
        match = re.fullmatch(r"(\d+)\.(\d+)", str(version))
        if match is None:
            return (0, 0)
        return (int(match[1]), int(match[2]))

    def __call__(self, name: str, activation: jax.Array) -> jax.Array:
        """Return the activation with the sharding constraint of its name."""
        sharding = NamedSharding(self.mesh, _SPECS[name])
        return jax.lax.with_sharding_constraint(activation, sharding)

    def map_shards(self, function: F, names: tuple[str, ...], results: tuple[str, ...]) -> F:
        """Return a function that runs on each device's shard, see `devices.TargetDevices`."""
        in_specs = tuple(map(_SPECS.__getitem__, names))
        out_specs = tuple(map(_SPECS.__getitem__, results))
        return jax.shard_map(
            function,
            mesh=self.mesh,
            in_specs=in_specs,
            out_specs=out_specs,
            check_vma=False,
        )
