"""Speed and memory of a recipe's training step, and of the input pipeline that has to feed it."""

import time
from collections.abc import Iterator

import jax
import numpy as np

from vit_jax.arrays import Batch
from vit_jax.config import RunConfig
from vit_jax.cost.chips import find_chip
from vit_jax.train.assemble import Assembly, Datasets, architecture_of, assemble, open_datasets, open_train_batches

WARM_UP_STEPS = 3


def bench_step(config: RunConfig, *, num_steps: int, num_classes: int = 1000) -> Iterator[tuple[str, float]]:
    """Times the run's own step on random images; no dataset is needed.

    Yields:
      Names and values: compile seconds, images per second, milliseconds a step, bytes on one device, MFU.
    """
    devices = jax.devices()
    num_examples = config.global_batch * 1_000_000  # enough for any duration of a recipe
    architecture = architecture_of(config, num_classes)
    run = assemble(config, architecture, num_examples=num_examples, devices=devices)
    began = time.perf_counter()
    step = run.compile_train_step()
    yield "compile_seconds", time.perf_counter() - began
    memory = step.memory_analysis()  # type: ignore[attr-defined]
    if memory is not None:
        yield "arguments_bytes", float(memory.argument_size_in_bytes)
        yield "temporary_bytes", float(memory.temp_size_in_bytes)
    state, batch = run.init_state(), jax.device_put(_random_batch(run), run.batch_sharding)
    for _ in range(WARM_UP_STEPS):
        state, _ = step(state, batch)
    jax.block_until_ready(state)
    began = time.perf_counter()
    for _ in range(num_steps):
        state, _ = step(state, batch)
    jax.block_until_ready(state)
    seconds = (time.perf_counter() - began) / num_steps
    images_per_second = config.global_batch / seconds
    yield "step_milliseconds", 1000 * seconds
    yield "images_per_second", images_per_second
    chip = find_chip(devices[0].device_kind)
    if chip is not None and run.architecture.is_standard:  # formulas know no other network
        flops = images_per_second * run.training_flops_per_image / len(devices)
        yield "mfu", flops / chip.peak_bf16_flops


def bench_input(config: RunConfig, *, num_steps: int) -> Iterator[tuple[str, float]]:
    """Times the input pipeline alone, from stored records to arrays on the devices.

    Yields:
      Name and value: images per second of this process.
    """
    data: Datasets = open_datasets(config)
    architecture = architecture_of(config, data.train.num_classes)
    run = assemble(config, architecture, num_examples=len(data.train), devices=jax.devices())
    with open_train_batches(run, data.train, 0) as (batches, _):
        for _ in range(WARM_UP_STEPS):
            next(batches)
        began = time.perf_counter()
        for _ in range(num_steps):
            jax.block_until_ready(next(batches))
        yield "input_images_per_second", num_steps * config.global_batch / (time.perf_counter() - began)


def _random_batch(run: Assembly) -> Batch:
    rng, size = np.random.default_rng(0), run.config.global_batch
    return Batch(
        image_BHWC=rng.integers(0, 256, (size, *run.architecture.image_size, 3), np.uint8),
        label_B=rng.integers(0, run.architecture.num_classes, size, np.int32),
        mask_B=np.ones(size, np.float32),
    )
