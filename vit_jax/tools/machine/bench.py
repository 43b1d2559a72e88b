"""Times of the parts of a run on this machine, each measured many times, with the spread."""

import contextlib
import dataclasses
import io
import math
import pathlib
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from vit_jax import pytree
from vit_jax.arrays import Batch, normalise
from vit_jax.checkpoint import CheckpointReader, CheckpointStore
from vit_jax.config import PretrainConfig, RunConfig, validate
from vit_jax.data.records import Source
from vit_jax.sharding.chips import find_chip
from vit_jax.storage.files import JsonObject
from vit_jax.train.assemble import assemble
from vit_jax.train.assembly import Assembly, CompiledStep
from vit_jax.train.inputs import Datasets, open_datasets, open_train_batches
from vit_jax.train.lifecycle import workdir as workdirs
from vit_jax.train.lifecycle.interruption import Interrupted, Interruption
from vit_jax.train.loop import train
from vit_jax.train.overview import machine
from vit_jax.train.session import Session
from vit_jax.train.state import TrainState, items_of
from vit_jax.train.state_builder import architecture_of
from vit_jax.train.step import Metrics
from vit_jax.train.step_compiler import Leaves

NUM_CLASSES = 1000  # without a dataset
STEPS_WITHOUT_DATA = 1_000_000  # without a dataset; enough for any duration
WARM_UP_STEPS = 3
NUM_SAVES = 5
TrainStep = Callable[[Leaves, Batch], tuple[Leaves, Metrics]]


@dataclasses.dataclass(frozen=True)
class Part:
    """The times of one part; `batch` is its number of images, or None."""

    name: str
    seconds: Sequence[float]
    batch: int | None

    @property
    def images_per_second(self) -> float:
        """Speed at the median; NaN without images."""
        if self.batch is None:
            return math.nan
        return self.batch / float(np.median(self.seconds))

    def figures(self) -> dict[str, float]:
        """Median, quartiles and extremes in milliseconds, and images/s at the median."""
        low, median, high = np.quantile(self.seconds, (0.25, 0.5, 0.75)).tolist()
        figures = {
            "median_milliseconds": 1000 * median,
            "lower_quartile_milliseconds": 1000 * low,
            "upper_quartile_milliseconds": 1000 * high,
            "least_milliseconds": 1000 * min(self.seconds),
            "most_milliseconds": 1000 * max(self.seconds),
        }
        if self.batch is not None:
            figures["images_per_second"] = self.images_per_second
        return figures


def bench(
    config: RunConfig,
    *,
    num_steps: int,
    with_data: bool = False,
) -> JsonObject:
    """Time the parts of a recipe's run, on random images.

    Args:
      config: the loaded config.
      num_steps: number of measurements of each part, after a few that do not count; checkpoints
        are measured `NUM_SAVES` times.
      with_data: also time the parts that read the recipe's dataset: its input, and the loop.

    Returns:
      JSON values: network and machine, the step's memory on one device, and under "parts" the
      figures of each part.
    """
    validate(config)
    config = dataclasses.replace(config, init_from=None)
    if isinstance(config, PretrainConfig):
        config = dataclasses.replace(config, phases={}, resume_from=None)  # the last phase is timed
    data = open_datasets(config) if with_data else None
    run = _assemble(config, data)

    began = time.perf_counter()
    step = run.compile_train_step()
    compile_seconds = time.perf_counter() - began
    result: JsonObject = {
        "network": run.architecture.name,
        "global_batch": config.global_batch,
        **machine(),
        "compile_seconds": compile_seconds,
    }
    memory = step.memory_analysis()
    if memory is not None:
        result["arguments_bytes"] = memory.argument_size_in_bytes
        result["temporary_bytes"] = memory.temp_size_in_bytes

    parts = list(_time_devices(run, step, num_steps))
    parts += _time_checkpoints(run)
    if data is not None:
        parts += _time_data(run, step, data, num_steps)
    result["parts"] = {part.name: part.figures() for part in parts}

    chip = find_chip(result["device_kind"])
    if chip is not None and run.architecture.is_standard:  # formulas know no other network
        speed = result["parts"]["step"]["images_per_second"]
        flops_per_second = speed * run.training_flops_per_image
        flops_of_device = flops_per_second / result["num_devices"]
        result["mfu"] = flops_of_device / chip.peak_bf16_flops
    return result


def _assemble(config: RunConfig, data: Datasets | None) -> Assembly:
    """Assemble the run for its dataset, or for random images without one."""
    num_classes = NUM_CLASSES
    num_examples = config.global_batch * STEPS_WITHOUT_DATA
    label_shape: tuple[int, ...] = ()
    if data is not None:
        num_classes = data.train.num_classes
        num_examples = len(data.train)
        label_shape = data.train.label_shape
    return assemble(
        config,
        architecture_of(config, num_classes),
        num_examples=num_examples,
        devices=jax.devices(),
        label_shape=label_shape,
    )


def time_input(run: Assembly, source: Source, num_steps: int) -> Part:
    """Time the input alone: placed batches of the training images."""
    num_calls = WARM_UP_STEPS + num_steps + 1
    total = max(run.steps.total, num_calls)  # a run may be shorter
    steps = dataclasses.replace(run.steps, total=total)
    longer_run = dataclasses.replace(run, steps=steps)
    with open_train_batches(longer_run, source, 0) as (batches, _):
        return time_batches(batches, num_steps, run.config.global_batch)


def time_batches(
    batches: Iterator[object],
    num_steps: int,
    batch_size: int,
) -> Part:
    """Time the input alone: batches of `batch_size` images, on the host or placed."""
    seconds = time_calls(lambda: next(batches), num_steps)
    return Part("input", seconds, batch_size)


def time_step(run: Assembly, step: TrainStep, num_steps: int) -> Part:
    """Time the training step alone, on random images that the devices hold."""
    training = Training(run, step)
    batch_size = run.config.global_batch
    batch = jax.device_put(random_batch(run, batch_size), run.batch_sharding)
    seconds = time_calls(lambda: training.advance(batch), num_steps)
    return Part("step", seconds, batch_size)


def to_text(result: JsonObject) -> str:
    """Return the result of `bench` as a table for a terminal."""
    about = [f"compiled in {result['compile_seconds']:.1f} s"]
    for name in ("arguments", "temporary"):
        num_bytes = result.get(f"{name}_bytes")
        if num_bytes is not None:
            about.append(f"{name} {num_bytes / 1e6:,.0f} MB")
    if "mfu" in result:
        about.append(f"MFU {result['mfu']:.1%}")

    lines = [
        f"{result['network']}, {result['global_batch']:,} images a step, {result['num_devices']} x "
        f"{result['device_kind']}, jax {result['version_jax']}",
        ", ".join(about),
        f"{'milliseconds':<20} {'median':>10} {'quartiles':>23} {'images/s':>10}",
    ]
    for name, figures in result["parts"].items():
        lines.append(_format_part(name, figures))
    return "\n".join(lines) + "\n"


def _format_part(name: str, figures: Mapping[str, float]) -> str:
    """Return the line of a part, with its speed if it has one."""
    median = figures["median_milliseconds"]
    low = figures["lower_quartile_milliseconds"]
    high = figures["upper_quartile_milliseconds"]
    line = f"{name:<20} {median:>10,.2f} {low:>10,.2f} to {high:>9,.2f}"
    speed = figures.get("images_per_second")
    if speed is None:
        return line
    return f"{line} {speed:>10,.0f}"


def _time_devices(
    run: Assembly,
    step: TrainStep,
    num_steps: int,
) -> Iterator[Part]:
    """Time the work of the devices on a batch that they hold."""
    yield time_step(run, step, num_steps)

    batch_size = run.evaluation_batch
    batch = jax.device_put(random_batch(run, batch_size), run.batch_sharding)
    state = run.init_state()
    seconds = time_calls(lambda: run.evaluation_step(state, batch), num_steps)
    yield Part("evaluation", seconds, batch_size)

    output = "logits_BK" if run.architecture.num_classes else "features_BD"

    @jax.jit
    def infer(model: Any, image_BHWC: jax.Array) -> jax.Array:
        images = normalise(image_BHWC, run.architecture.compute_dtype)
        return getattr(model(images), output)

    model = state.evaluated_model()
    seconds = time_calls(lambda: infer(model, batch.image_BHWC), num_steps)
    yield Part("inference", seconds, batch_size)


def _time_checkpoints(run: Assembly) -> Iterator[Part]:
    """Time the delay of steps by a save, the complete save, and the restore."""
    state = jax.block_until_ready(run.init_state())
    abstract_items = items_of(run.abstract_state)
    stalls = []
    saves = []
    restores = []
    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.closing(CheckpointStore(folder)) as store,
    ):
        for number in range(1, NUM_SAVES + 1):
            began = time.perf_counter()
            store.save(number, items_of(state), metadata={}, metrics={})
            stalls.append(time.perf_counter() - began)
            store.wait()
            saves.append(time.perf_counter() - began)

            began = time.perf_counter()
            reader = CheckpointReader(pathlib.Path(folder))
            restored = reader.restore(number, abstract_items)
            jax.block_until_ready(restored)
            restores.append(time.perf_counter() - began)

    yield Part("save, steps wait", stalls, None)
    yield Part("save, on disk", saves, None)
    yield Part("restore", restores, None)


def _time_data(
    run: Assembly,
    step: TrainStep,
    data: Datasets,
    num_steps: int,
) -> Iterator[Part]:
    """Time the parts that read the dataset: the input, the input with the step, and the loop."""
    batch_size = run.config.global_batch
    training = Training(run, step)
    with open_train_batches(run, data.train, 0) as (batches, _):
        yield time_batches(batches, num_steps, batch_size)
        seconds = time_calls(lambda: training.advance(next(batches)), num_steps)
        yield Part("input with step", seconds, batch_size)

    fields = {field.name: getattr(run, field.name) for field in dataclasses.fields(run)}
    timed_run = _TimedRun(**fields, compiled=step, start_times=[])
    stop = _StopAfter(WARM_UP_STEPS + num_steps + 1)
    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.suppress(Interrupted),
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
        workdirs.claim(folder, run.config) as workdir,
    ):
        train(Session(run=timed_run, data=data, workdir=workdir, interruption=stop))
    seconds = np.diff(timed_run.start_times[WARM_UP_STEPS:]).tolist()
    yield Part("loop", seconds, batch_size)


def time_calls(start: Callable[[], object], num_steps: int) -> list[float]:
    """Return the seconds between the ends of calls.

    Each call starts before the previous one has ended, as in the loop.
    """
    pending = start()
    ends = []
    for _ in range(WARM_UP_STEPS + num_steps):
        previous = pending
        pending = start()
        jax.block_until_ready(previous)
        ends.append(time.perf_counter())
    jax.block_until_ready(pending)
    ends.append(time.perf_counter())
    return np.diff(ends[WARM_UP_STEPS:]).tolist()


class Training:
    """A state that advances by training steps."""

    def __init__(self, run: Assembly, step: TrainStep):
        self._run = run
        self._leaves = pytree.name_leaves(run.init_state())
        self._step = step

    def advance(self, batch: Batch) -> Metrics:
        """Start a step; return its metrics."""
        self._leaves, metrics = self._step(self._leaves, batch)
        return metrics

    @property
    def state(self) -> TrainState:
        """The state after the steps so far."""
        return self._run.state_from(self._leaves)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _TimedRun(Assembly):
    """A run that records the start time of each step."""

    compiled: TrainStep
    start_times: list[float]

    def compile_train_step(self, start_step: int = 0) -> CompiledStep:
        def step(leaves: Leaves, batch: Batch) -> tuple[Leaves, Metrics]:
            self.start_times.append(time.perf_counter())
            return self.compiled(leaves, batch)

        return CompiledStep(((self.steps.total, step),))


class _StopAfter(Interruption):
    """Ends a run after this number of steps, as a signal would."""

    def __init__(self, num_steps: int):
        super().__init__()
        self._steps_left = num_steps

    def is_requested(self) -> bool:
        self._steps_left -= 1
        return self._steps_left <= 0


def _sample_pixels(
    rng: np.random.Generator,
    shape: tuple[int, ...],
    dtype: str,
) -> np.ndarray:
    """Return random images as a source has them: uint8, or normalised bands."""
    if dtype == "uint8":
        return rng.integers(0, 256, shape, np.uint8)
    return rng.uniform(-1, 1, shape).astype(dtype)


def random_batch(run: Assembly, batch_size: int) -> Batch:
    """Return random images and labels, the same at every call."""
    rng = np.random.default_rng(0)
    image_shape = (batch_size, *run.architecture.image_shape)
    label_shape = (batch_size, *run.label_shape)
    num_classes = max(run.architecture.num_classes, 1)
    return Batch(
        image_BHWC=_sample_pixels(rng, image_shape, run.config.input.pixel_dtype),
        label_B=rng.integers(0, num_classes, label_shape, np.int32),
        mask_B=np.ones(batch_size, np.float32),
    )
