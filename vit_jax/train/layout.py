"""The layout of a run where the config says `auto`: the least recomputation and sharding that fit.

Formulas decide, from the config, the kind of the devices and their number: all processes of a run
find the same.
"""

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import jax
from jax.sharding import AbstractMesh

from vit_jax import hosts
from vit_jax.checkpoint.reader import has_checkpoints
from vit_jax.config import Architecture, FinetuneConfig, PretrainConfig, RunConfig, ShardingConfig
from vit_jax.config.check import require_divisible
from vit_jax.config.lengths import Phase
from vit_jax.config.network_options import Policy
from vit_jax.config.parsing import flatten
from vit_jax.models.flops import FLOPS_PER_MAC, FORWARDS_PER_TRAINING_STEP, forward_macs
from vit_jax.optim.by_name import find_trained
from vit_jax.sharding import AXES, count_slices, shard_tree
from vit_jax.sharding.chips import find_chip
from vit_jax.sharding.fabrics import GIB, find_fabric_of_device
from vit_jax.storage.files import JsonObject, expand_path
from vit_jax.train.phases import apply_phase, resize_architecture, shrink_sequence
from vit_jax.train.run_files import read_config
from vit_jax.train.state import TrainState
from vit_jax.train.state_builder import StateBuilder
from vit_jax.train.step_compiler import set_shardings

if TYPE_CHECKING:
    from vit_jax.weights import Weights

C = TypeVar("C", PretrainConfig, FinetuneConfig)

RESERVE = 0.08
"""Fraction of the usable memory that stays free, for the error of the formulas."""
GPU_FRACTION = 0.75
"""Fraction of a GPU's memory that JAX allocates without XLA_PYTHON_CLIENT_MEM_FRACTION."""
UNKNOWN_BYTES = 16 * GIB
"""Assumed memory of a device of an unknown kind."""
UPDATE_SHARE = 0.04
"""Largest time of the update of the complete state, relative to a step's matrix products.

Above it parameters are split."""
LEAST_IMAGES = 16
"""Images of a micro-batch on one device: fewer do not keep it busy."""
MOST_IMAGES = {"TPU v5e": 64, "TPU v5p": 64}
"""Images of a micro-batch on one chip, by its name.

Layers of B/16 and H/14 are slower with more.
"""
LEAST_WIDTH = 768
"""Width of a transformer to which `MOST_IMAGES` applies: S/16 is faster with more images."""
_CHOSEN = (
    "model.compute_dtype",
    "model.remat",
    "optimizer.accumulation_steps",
    "sharding.parameters",
    "sharding.num_replicas",
)
POLICIES: tuple[Policy, ...] = ("none", "dots", "attention", "full")
"""Policies of rematerialisation, from the least recomputation to the most."""
EQUALLY_FAST: tuple[tuple[Policy, ...], ...] = (("none", "dots"), ("attention",), ("full",))
"""Policies by speed: outside of loops XLA makes nearly the same program of the first two."""
GROUPS = (16, 32, 64)
"""Numbers of TPUs that share parameters, besides all TPUs of a slice."""


def choose_layout(
    config: RunConfig,
    builder: StateBuilder,
    devices: Sequence[jax.Device],
    phases: Sequence[Phase],
    teacher: "Weights | None" = None,
) -> RunConfig:
    """Return the config with values in the place of `auto`: a layout for the largest phase.

    Values that are set stay. On CPUs, and for a user-defined network, of which no formula knows the
    memory, that is no sharding, and no recomputation but `dots` for transformers on CPUs. If
    nothing fits, it is the layout that needs the least memory.

    Args:
      config: a valid config.
      builder: its network and optimizer.
      devices: devices of all processes.
      phases: earlier phases of the run.
      teacher: weights of a teacher, which are beside the state.

    Raises:
      ValueError: the devices cannot share the batch of a phase equally.
    """
    config = _choose_compute(config, builder, devices[0].platform)
    largest_config, largest = _find_largest_phase(config, builder.architecture, phases)
    teacher_bytes = 0
    if teacher is not None:
        from vit_jax.train.teacher import count_bytes

        teacher_bytes = count_bytes(teacher, devices[0].platform)
    layout = _find_fitting_layout(largest_config, largest, builder, devices, teacher_bytes)
    sections = {
        "model": layout.model,
        "optimizer": layout.optimizer,
        "sharding": layout.sharding,
    }
    config = dataclasses.replace(config, **sections)  # type: ignore[arg-type]
    require_divisible(config, len(devices))  # micro-batches must divide every batch
    return config


def _choose_compute(config: RunConfig, builder: StateBuilder, platform: str) -> RunConfig:
    """Return the config with a compute dtype, and on CPUs with a policy for built-in transformers.

    On a CPU, S/16 takes 1.37 times as long in bfloat16, and without recomputation 1.07 times as
    long with twice the memory.
    """
    model: Any = config.model
    if model.compute_dtype == "auto":
        dtype = "float32" if platform == "cpu" else "bfloat16"
        model = dataclasses.replace(model, compute_dtype=dtype)
    a = builder.architecture
    is_built_in = builder.is_standard and a.is_standard and a.has_transformer
    if model.remat == "auto" and platform == "cpu" and is_built_in:
        model = dataclasses.replace(model, remat="dots")
    return dataclasses.replace(config, model=model)


def _find_largest_phase(
    config: RunConfig,
    architecture: Architecture,
    phases: Sequence[Phase],
) -> tuple[RunConfig, Architecture]:
    """Return the config and the network of the phase with the most patches in a batch."""
    sizes = [(config, architecture)]
    for phase in phases:
        sizes.append((apply_phase(config, phase), resize_architecture(architecture, phase)))

    def count_patches(size: tuple[RunConfig, Architecture]) -> int:
        return size[0].global_batch * math.prod(shrink_sequence(size[1], size[0]).grid)

    return max(sizes, key=count_patches)


def _find_fitting_layout(
    config: RunConfig,
    architecture: Architecture,
    builder: StateBuilder,
    devices: Sequence[jax.Device],
    teacher_bytes: int,
) -> RunConfig:
    """Return the config of a phase with the fastest layout that fits; see `choose_layout`."""
    default = next(_list_layouts(config, architecture, devices, 0.0))
    has_formula = builder.is_standard and architecture.is_standard
    if devices[0].platform == "cpu" or not has_formula:
        return default

    state = builder.abstract_state
    update_share = _measure_update(config, architecture, state, devices)
    available_bytes = (1 - RESERVE) * usable_bytes(devices[0]) - teacher_bytes
    smallest = default  # without a possible layout it is rejected later, with a reason
    smallest_bytes = math.inf
    for layout in _list_layouts(config, architecture, devices, update_share):
        needed_bytes = _count_bytes(layout, architecture, state, devices)
        if needed_bytes is None:
            continue
        if needed_bytes <= available_bytes:
            return layout
        if needed_bytes < smallest_bytes:
            smallest = layout
            smallest_bytes = needed_bytes
    return smallest


def keep_layout(config: C, workdir: str, num_devices: int) -> C:
    """Return the config with the layout of an earlier start in this folder in the place of `auto`.

    The compute dtype and the policy of rematerialisation stay. Micro-batches and sharding stay if
    they divide this number of devices.
    """
    stored = _read_layout(workdir)
    num_shards = max(num_devices // config.sharding.num_model_shards, 1)
    changed: dict[str, Any] = {"model": _keep_compute(config.model, stored)}
    num_micro_batches = stored.get("optimizer.accumulation_steps")
    if _can_keep_micro_batches(config, num_micro_batches, num_shards):
        changed["optimizer"] = dataclasses.replace(
            config.optimizer,
            accumulation_steps=num_micro_batches,
        )

    parameters: Any = stored.get("sharding.parameters")
    num_replicas = stored.get("sharding.num_replicas")
    if _can_keep_sharding(config.sharding, parameters, num_replicas, num_shards):
        changed["sharding"] = dataclasses.replace(
            config.sharding,
            parameters=parameters,
            num_replicas=num_replicas,
        )
    return dataclasses.replace(config, **changed)


def _keep_compute(model: Any, stored: JsonObject) -> Any:
    """Return the section `model` with the stored dtype and policy in the place of `auto`."""
    dtype = stored.get("model.compute_dtype")
    if model.compute_dtype == "auto" and dtype in ("float32", "bfloat16"):
        model = dataclasses.replace(model, compute_dtype=dtype)
    remat = stored.get("model.remat")
    if model.remat == "auto" and remat in POLICIES:
        model = dataclasses.replace(model, remat=remat)
    return model


def _read_layout(workdir: str) -> JsonObject:
    """Return the chosen values of a run that has a checkpoint, equal in all processes."""
    folder = expand_path(workdir)
    stored = {}
    if hosts.is_first() and has_checkpoints(folder):
        with contextlib.suppress(OSError, ValueError):  # `workdir.claim` reports what is wrong
            values = flatten(read_config(folder))
            stored = {name: values[name] for name in _CHOSEN if name in values}
    layout: JsonObject = hosts.gather(stored)[0]
    return layout


def _can_keep_micro_batches(config: RunConfig, number: Any, num_shards: int) -> bool:
    """Return whether the config leaves the number of micro-batches open, and this one fits."""
    if config.optimizer.accumulation_steps is not None or not _is_count(number):
        return False
    return config.global_batch % (num_shards * number) == 0


def _can_keep_sharding(
    config: ShardingConfig,
    parameters: Any,
    num_replicas: Any,
    num_shards: int,
) -> bool:
    """Return whether the config leaves the sharding open, and this one suits the devices."""
    if config.parameters != "auto" or config.num_replicas is not None:
        return False
    if parameters not in ("replicated", "fsdp"):
        return False
    if num_replicas is None:
        return True
    return _is_count(num_replicas) and num_shards % num_replicas == 0


def usable_bytes(device: jax.Device) -> int:
    """Return the memory of a device that a program may use."""
    chip = find_chip(device.device_kind)
    if chip is None:
        return UNKNOWN_BYTES
    if device.platform == "gpu":
        return int(GPU_FRACTION * chip.memory_bytes)
    fabric = find_fabric_of_device(device.device_kind)
    return chip.memory_bytes if fabric is None else fabric.usable_bytes


def _measure_update(
    config: RunConfig,
    architecture: Architecture,
    state: TrainState,
    devices: Sequence[jax.Device],
) -> float:
    """Return the time of the update of a state that is not split, relative to a step's products."""
    chip = find_chip(devices[0].device_kind)
    if chip is None:
        return 0.0
    from vit_jax.train.step_memory import list_updated_leaves

    updated = list_updated_leaves(state, find_trained(config.optimizer))
    num_bytes = 2 * sum(leaf.size * leaf.dtype.itemsize for leaf in updated)
    update_seconds = num_bytes / chip.memory_bandwidth_bytes_per_second
    macs = forward_macs(shrink_sequence(architecture, config)) * config.global_batch / len(devices)
    flops = FORWARDS_PER_TRAINING_STEP * FLOPS_PER_MAC * macs
    return update_seconds / (flops / chip.peak_bf16_flops)


def _list_layouts(
    config: RunConfig,
    architecture: Architecture,
    devices: Sequence[jax.Device],
    update_share: float,
) -> Iterator[RunConfig]:
    """Yield configs without `auto`, the fastest first."""
    groups = EQUALLY_FAST
    if config.model.remat != "auto":
        groups = ((config.model.remat,),)
    for policies in groups:
        numbers = micro_batches(config, architecture, devices)
        for number, policy in itertools.product(numbers, policies):
            model: Any = dataclasses.replace(config.model, remat=policy)
            optimizer = dataclasses.replace(config.optimizer, accumulation_steps=number)
            is_split_first = number * update_share > UPDATE_SHARE
            for sharding in _list_shardings(
                config.sharding,
                devices,
                is_split_first=is_split_first,
            ):
                yield dataclasses.replace(
                    config,
                    model=model,
                    optimizer=optimizer,
                    sharding=sharding,
                )


def micro_batches(
    config: RunConfig,
    architecture: Architecture,
    devices: Sequence[jax.Device],
) -> Iterator[int]:
    """Yield numbers of micro-batches, the fewest first.

    If none is set these are powers of two that leave `LEAST_IMAGES` on a device, and for wide
    transformers at most the `MOST_IMAGES` of its kind, if the batch can be divided so.
    """
    if config.optimizer.accumulation_steps is not None:
        yield config.optimizer.accumulation_steps
        return
    images = config.global_batch * config.sharding.num_model_shards // len(devices)
    possible = [1]
    doubled = 2
    while images % doubled == 0 and images // doubled >= LEAST_IMAGES:
        possible.append(doubled)
        doubled = 2 * doubled

    most_images = images
    chip = find_chip(devices[0].device_kind)
    is_wide = architecture.has_transformer and architecture.width >= LEAST_WIDTH
    if chip is not None and is_wide:
        most_images = MOST_IMAGES.get(chip.name, images)
    fast = [number for number in possible if images // number <= most_images]
    yield from fast or possible


def _list_shardings(
    config: ShardingConfig,
    devices: Sequence[jax.Device],
    *,
    is_split_first: bool,
) -> Iterator[ShardingConfig]:
    """Yield shardings without `auto`, from the least to the most; `is_split_first`: replicated last."""
    if config.parameters != "auto":
        yield config
        return
    replicated = dataclasses.replace(config, parameters="replicated")
    num_groups = (config.num_replicas or 1) * config.num_model_shards
    if len(devices) <= num_groups:  # there is nothing to split parameters over
        yield replicated
        return
    if is_split_first:
        yield from _list_splits(config, devices)
        yield replicated
    else:
        yield replicated
        yield from _list_splits(config, devices)


def _list_splits(config: ShardingConfig, devices: Sequence[jax.Device]) -> Iterator[ShardingConfig]:
    """Yield shardings of parameters over more and more devices."""
    split = dataclasses.replace(config, parameters="fsdp")
    if config.num_replicas is not None:
        yield split
        return
    num_slices = count_slices(devices)
    if devices[0].platform == "tpu":
        for group in GROUPS:
            num_shared = group * config.num_model_shards
            is_part_of_slice = num_shared < len(devices) // num_slices
            if is_part_of_slice and len(devices) % num_shared == 0:
                yield dataclasses.replace(split, num_replicas=len(devices) // num_shared)
    yield split
    if num_slices > 1:
        yield dataclasses.replace(split, num_replicas=1)


def _count_bytes(
    config: RunConfig,
    architecture: Architecture,
    state: TrainState,
    devices: Sequence[jax.Device],
) -> int | None:
    """Return the memory of a step on one device; None if the layout is not possible."""
    sharding = config.sharding
    num_micro_batches = config.optimizer.accumulation_steps or 1
    num_replicas = sharding.num_replicas or count_slices(devices)
    num_data, rest = divmod(len(devices), num_replicas * sharding.num_model_shards)
    if rest or config.global_batch % (num_replicas * num_data * num_micro_batches):
        return None
    mesh = AbstractMesh((num_replicas, num_data, sharding.num_model_shards), AXES)
    try:
        shardings = shard_tree(state, mesh, sharding.parameters)
    except ValueError:
        return None
    assert config.model.remat != "auto"
    from vit_jax.train.step_memory import step_memory

    memory = step_memory(
        dataclasses.replace(shrink_sequence(architecture, config), remat=config.model.remat),
        set_shardings(state, shardings),
        image_size=architecture.image_size,
        global_batch=config.global_batch,
        accumulation_steps=num_micro_batches,
        trained=find_trained(config.optimizer),
        tiled=devices[0].platform == "tpu",
    )
    return memory.total


def _is_count(value: object) -> bool:
    return type(value) is int and value > 0
