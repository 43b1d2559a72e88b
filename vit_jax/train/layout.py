"""The layout of a run where the config says `auto`: the least recomputation and the least sharding that fit.

Formulas decide, from the config, the kind of the devices and their number: all processes of a run find the same.
"""

import contextlib
import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import jax
from jax.sharding import AbstractMesh

from vit_jax import hosts
from vit_jax.checkpoint.reader import has_checkpoints
from vit_jax.config import Architecture, FinetuneConfig, PretrainConfig, RunConfig, ShardingConfig
from vit_jax.config.network_options import Policy
from vit_jax.config.parsing import flatten
from vit_jax.models.flops import FLOPS_PER_MAC, FORWARDS_PER_TRAINING_STEP, forward_macs
from vit_jax.optim.by_name import make_is_trained
from vit_jax.sharding import AXES, count_slices, shard_tree
from vit_jax.sharding.chips import find_chip
from vit_jax.sharding.fabrics import GIB, fabric_of
from vit_jax.storage.files import expanded
from vit_jax.train.run_files import read_config
from vit_jax.train.state import TrainState
from vit_jax.train.step_memory import step_memory, updated_leaves

C = TypeVar("C", PretrainConfig, FinetuneConfig)

RESERVE = 0.08
"""Fraction of the usable memory that stays free, for the error of the formulas."""
GPU_FRACTION = 0.75
"""Fraction of a GPU's memory that JAX allocates, unless XLA_PYTHON_CLIENT_MEM_FRACTION says otherwise."""
UNKNOWN_BYTES = 16 * GIB
"""Assumed memory of a device of an unknown kind."""
UPDATE_SHARE = 0.04
"""Parameters are split where the update of the complete state would take more than this share of a step's products."""
LEAST_IMAGES = 16
"""Images of a micro-batch on one device: fewer do not keep it busy."""
MOST_IMAGES = {"TPU v5e": 64, "TPU v5p": 64}
"""Images of a micro-batch on one chip by its name. With more, layers of B/16 and H/14 are slower."""
LEAST_WIDTH = 768
"""Width of a transformer to which `MOST_IMAGES` applies: S/16 is faster with more images."""
_CHOSEN = (
    "model.remat",
    "optimizer.accumulation_steps",
    "sharding.parameters",
    "sharding.num_replicas",
)
POLICIES: tuple[Policy, ...] = (
    "none",
    "dots",
    "attention",
    "full",
)  # from the least recomputation to the most
EQUALLY_FAST: tuple[tuple[Policy, ...], ...] = (("none", "dots"), ("attention",), ("full",))
"""Policies by speed: outside of loops XLA makes nearly the same program of the first two."""
GROUPS = (16, 32, 64)  # TPUs that share parameters, besides all of a slice


def resolve_layout(
    config: RunConfig,
    architecture: Architecture,
    state: TrainState,
    devices: Sequence[jax.Device],
    *,
    is_standard: bool,
) -> RunConfig:
    """Return the config with values in the place of `auto`; values that are set stay.

    On CPUs, and for a user-defined network, of which no formula knows the memory, that is no recomputation and no
    sharding. If nothing fits, it is the layout that needs the least memory.

    Args:
      config: a valid config.
      architecture: its network.
      state: shapes and dtypes of the training state.
      devices: of all processes.
      is_standard: False for a network that `architecture` does not describe.
    """
    default = next(_layouts(config, architecture, devices, 0.0))
    if devices[0].platform == "cpu" or not (is_standard and architecture.is_standard):
        return default
    too_large: list[tuple[int, RunConfig]] = []
    for layout in _layouts(
        config, architecture, devices, _update_share(config, architecture, state, devices)
    ):
        needed = _needed_bytes(layout, architecture, state, devices)
        if needed is not None and needed <= (1 - RESERVE) * usable_bytes(devices[0]):
            return layout
        if needed is not None:
            too_large.append((needed, layout))
    # Without a possible layout the default is rejected later, with a reason.
    return min(too_large, key=lambda pair: pair[0])[1] if too_large else default


def keep_layout(config: C, workdir: str, num_devices: int) -> C:
    """Return the config with the layout that a run in this folder has begun with in the place of `auto`.

    A policy of rematerialisation stays. Micro-batches and sharding stay if they divide this number of devices.
    """
    folder = expanded(workdir)
    stored = {}
    if hosts.is_first() and has_checkpoints(folder):
        with contextlib.suppress(OSError, ValueError):  # `workdir.claim` reports what is wrong
            stored = {
                name: value
                for name, value in flatten(read_config(folder)).items()
                if name in _CHOSEN
            }
    stored = hosts.gather(stored)[0]
    remat, parts, parameters, replicas = (stored.get(name) for name in _CHOSEN)
    changed: dict[str, Any] = {}
    if config.model.remat == "auto" and remat in POLICIES:
        changed["model"] = dataclasses.replace(config.model, remat=remat)
    shares = max(num_devices // config.sharding.num_model_shards, 1)
    if (
        config.optimizer.accumulation_steps is None
        and _is_count(parts)
        and config.global_batch % (shares * parts) == 0
    ):
        changed["optimizer"] = dataclasses.replace(config.optimizer, accumulation_steps=parts)
    is_open = config.sharding.parameters == "auto" and config.sharding.num_replicas is None
    is_possible = replicas is None or (_is_count(replicas) and shares % replicas == 0)
    if is_open and parameters in ("replicated", "fsdp") and is_possible:
        changed["sharding"] = dataclasses.replace(
            config.sharding, parameters=parameters, num_replicas=replicas
        )
    return dataclasses.replace(config, **changed)


def usable_bytes(device: jax.Device) -> int:
    """Return the memory of a device that a program may use."""
    chip = find_chip(device.device_kind)
    if chip is None:
        return UNKNOWN_BYTES
    if device.platform == "gpu":
        return int(GPU_FRACTION * chip.memory_bytes)
    fabric = fabric_of(device.device_kind)
    return chip.memory_bytes if fabric is None else fabric.usable_bytes


def _update_share(
    config: RunConfig, architecture: Architecture, state: TrainState, devices: Sequence[jax.Device]
) -> float:
    """Return the time of the update of a state that is not split, relative to the matrix products of a step."""
    chip = find_chip(devices[0].device_kind)
    if chip is None:
        return 0.0
    updated = updated_leaves(state, make_is_trained(config.optimizer))
    num_bytes = 2 * sum(leaf.size * leaf.dtype.itemsize for leaf in updated)
    macs = forward_macs(architecture) * config.global_batch / len(devices)
    seconds = FORWARDS_PER_TRAINING_STEP * FLOPS_PER_MAC * macs / chip.peak_bf16_flops
    return num_bytes / chip.memory_bandwidth_bytes_per_second / seconds


def _layouts(
    config: RunConfig,
    architecture: Architecture,
    devices: Sequence[jax.Device],
    update_share: float,
) -> Iterator[RunConfig]:
    """Yield configs without `auto`, the fastest first."""
    remat = config.model.remat
    for policies in EQUALLY_FAST if remat == "auto" else ((remat,),):
        for parts, policy in itertools.product(
            micro_batches(config, architecture, devices), policies
        ):
            for sharding in _shardings(
                config.sharding, devices, is_split_first=parts * update_share > UPDATE_SHARE
            ):
                model: Any = dataclasses.replace(config.model, remat=policy)
                optimizer = dataclasses.replace(config.optimizer, accumulation_steps=parts)
                yield dataclasses.replace(
                    config, model=model, optimizer=optimizer, sharding=sharding
                )


def micro_batches(
    config: RunConfig, architecture: Architecture, devices: Sequence[jax.Device]
) -> Iterator[int]:
    """Yield numbers of micro-batches, the fewest first.

    If none is set these are powers of two that leave `LEAST_IMAGES` on a device, and for wide transformers at most the
    `MOST_IMAGES` of its kind, if the batch can be divided so.
    """
    if config.optimizer.accumulation_steps is not None:
        yield config.optimizer.accumulation_steps
        return
    images = config.global_batch * config.sharding.num_model_shards // len(devices)
    possible = [1]
    while images % (2 * possible[-1]) == 0 and images // (2 * possible[-1]) >= LEAST_IMAGES:
        possible.append(2 * possible[-1])
    chip = find_chip(devices[0].device_kind)
    is_wide = architecture.has_transformer and architecture.width >= LEAST_WIDTH
    most = MOST_IMAGES.get(chip.name, images) if chip is not None and is_wide else images
    yield from [parts for parts in possible if images // parts <= most] or possible


def _shardings(
    config: ShardingConfig, devices: Sequence[jax.Device], *, is_split_first: bool
) -> Iterator[ShardingConfig]:
    """Yield shardings without `auto`: from the least to the most, except that replicated parameters may come last."""
    if config.parameters != "auto":
        yield config
        return
    replicated = dataclasses.replace(config, parameters="replicated")
    is_alone = len(devices) <= (config.num_replicas or 1) * config.num_model_shards
    if is_alone or not is_split_first:
        yield replicated
    if is_alone:  # there is nothing to split parameters over
        return
    split = dataclasses.replace(config, parameters="fsdp")
    num_slices = count_slices(devices)
    shards = config.num_model_shards
    if config.num_replicas is None and devices[0].platform == "tpu":
        for group in GROUPS:
            if group * shards < len(devices) // num_slices and len(devices) % (group * shards) == 0:
                yield dataclasses.replace(split, num_replicas=len(devices) // (group * shards))
    yield split
    if config.num_replicas is None and num_slices > 1:
        yield dataclasses.replace(split, num_replicas=1)
    if is_split_first:
        yield replicated


def _needed_bytes(
    config: RunConfig, architecture: Architecture, state: TrainState, devices: Sequence[jax.Device]
) -> int | None:
    """Return the memory of a step on one device; None if the layout is not possible."""
    sharding = config.sharding
    parts = config.optimizer.accumulation_steps or 1
    policy = config.model.remat
    assert policy != "auto"
    shards = sharding.num_model_shards
    replicas = sharding.num_replicas or count_slices(devices)
    data, rest = divmod(len(devices), replicas * shards)
    if rest or config.global_batch % (replicas * data * parts):
        return None
    mesh = AbstractMesh((replicas, data, shards), AXES)
    try:
        placed = shard_tree(state, mesh, sharding.parameters)
    except ValueError:
        return None
    shapes = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), state, placed
    )
    return step_memory(
        dataclasses.replace(architecture, remat=policy),
        shapes,
        global_batch=config.global_batch,
        accumulation_steps=parts,
        is_trained=make_is_trained(config.optimizer),
        tiled=devices[0].platform == "tpu",
    ).total


def _is_count(value: object) -> bool:
    return type(value) is int and value > 0
