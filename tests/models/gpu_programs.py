"""Compiles train and evaluation steps for H100s on a machine without a GPU, and counts the calls of cuDNN in them.

A program of its own, since XLA reads its flags once: `python -m tests.models.gpu_programs` takes cases as JSON,
{name: [number of GPUs, step, field of the config, ...]}, and prints {name: {call: number}}.
"""

import collections
import json
import os
import re
import sys

WHEELS = ("jax_cuda12_plugin", "nvidia.cudnn")
# Without a GPU nothing can be tuned, and products by Triton need tuned tiles.
FLAGS = "--xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false"
H100 = """
gpu_device_info {
  threads_per_block_limit: 1024  threads_per_warp: 32  shared_memory_per_block: 49152
  shared_memory_per_core: 233472  threads_per_core_limit: 2048  core_count: 132  fpus_per_core: 128
  block_dim_limit_x: 2147483647  block_dim_limit_y: 65535  block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000  l2_cache_size: 52428800  clock_rate_ghz: 1.98
  device_memory_size: 84942979072  shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 minor: 0 }
  registers_per_core_limit: 65536  registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 }
runtime_version { major: 12 minor: 9 patch: 0 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""
FIELDS = ("model.depth=2", "model.compute_dtype=bfloat16", "global_batch=16", "evaluation.global_batch=16")


def count_calls(num_gpus, step, *fields):
    from jax.experimental import topologies

    from vit_jax.arrays import abstract_batch
    from vit_jax.config import load_recipe
    from vit_jax.train.assemble import architecture_of, assemble

    topology = topologies.get_topology_desc("h100", platform="cuda", target_config=H100, topology=f"1x1x{num_gpus}")
    config = load_recipe("configs/pretrain_s16_baseline.py", [f"--config.{field}" for field in (*FIELDS, *fields)])
    run = assemble(config, architecture_of(config, 1000), num_examples=10_000, devices=topology.devices)
    if step == "train":
        lowered = run.trace_train_step().lower()
    else:
        batch = abstract_batch(run.evaluation_batch, run.architecture.image_size, run.batch_sharding)
        lowered = run.evaluation_step.lower(run.abstract_state, batch)
    return collections.Counter(re.findall(r'custom_call_target="__cudnn\$(\w+)"', lowered.compile().as_text()))


if __name__ == "__main__":
    os.environ |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": FLAGS}
    print(json.dumps({name: count_calls(*case) for name, case in json.loads(sys.argv[1]).items()}))
