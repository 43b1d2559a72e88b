"""Descriptions of NVIDIA GPUs, from which XLA compiles for them without one.

Numbers come from NVIDIA's white papers of each architecture, memory and its bandwidth from
`sharding/chips.py`.
"""

from typing import NamedTuple

from vit_jax.tools.plan.topology import Topology

KIB = 2**10
MIB = 2**20


class Target(NamedTuple):
    """Properties of a GPU that XLA needs beside its memory."""

    capability: tuple[int, int]  # major and minor
    cores: int  # streaming multiprocessors
    units: int  # float32 units of a core
    threads: int  # resident in a core at most
    clock_ghz: float  # boost
    cache: int  # bytes of the second level
    shared: int  # bytes of shared memory of a core; a block can use 1 KiB less from the A100 on


# fmt: off
TARGETS = {  # by `Fabric.kind`
    "v100": Target((7, 0), 80, 64, 2048, 1.53, 6 * MIB, 96 * KIB),
    "a100-40gb": Target((8, 0), 108, 64, 2048, 1.41, 40 * MIB, 164 * KIB),
    "a100-80gb": Target((8, 0), 108, 64, 2048, 1.41, 40 * MIB, 164 * KIB),
    "rtx3090": Target((8, 6), 82, 128, 1536, 1.695, 6 * MIB, 100 * KIB),
    "rtx4090": Target((8, 9), 128, 128, 1536, 2.52, 72 * MIB, 100 * KIB),
    "l4": Target((8, 9), 58, 128, 1536, 2.04, 48 * MIB, 100 * KIB),
    "h100": Target((9, 0), 132, 128, 2048, 1.98, 50 * MIB, 228 * KIB),
    "h200": Target((9, 0), 132, 128, 2048, 1.98, 50 * MIB, 228 * KIB),
    "b200": Target((10, 0), 148, 128, 2048, 1.965, 126 * MIB, 228 * KIB),
}
# fmt: on


def describe_target(topology: Topology) -> str:
    """Return XLA's `GpuTargetConfigProto` of the topology's GPUs as text."""
    gpu = TARGETS[topology.fabric.kind]
    chip = topology.chip
    shared_of_block = gpu.shared
    if gpu.capability >= (8, 0):
        shared_of_block -= KIB
    return f"""
platform_name: "CUDA"
device_description_str: "NVIDIA {topology.fabric.device_kind}"
dnn_version_info {{ major: 9 minor: 8 }}
runtime_version {{ major: 12 minor: 9 }}
gpu_device_info {{
  cuda_compute_capability {{ major: {gpu.capability[0]} minor: {gpu.capability[1]} }}
  core_count: {gpu.cores}
  fpus_per_core: {gpu.units}
  clock_rate_ghz: {gpu.clock_ghz}
  threads_per_core_limit: {gpu.threads}
  threads_per_block_limit: 1024
  threads_per_warp: 32
  block_dim_limit_x: {2**31 - 1}
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  shared_memory_per_core: {gpu.shared}
  shared_memory_per_block: {48 * KIB}
  shared_memory_per_block_optin: {shared_of_block}
  l2_cache_size: {gpu.cache}
  device_memory_size: {chip.memory_bytes}
  memory_bandwidth: {int(chip.memory_bandwidth_bytes_per_second)}
}}
"""
