"""Times the parts of a run on the machine at hand: each many times over, with the spread."""

import contextlib
import dataclasses
import io
import math
import pathlib
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from vit_jax import pytree
from vit_jax.arrays import Batch, normalise
from vit_jax.checkpoint import CheckpointReader, CheckpointStore
from vit_jax.config import PretrainConfig, RunConfig, validate
from vit_jax.data.records import Source
from vit_jax.sharding.chips import find_chip
from vit_jax.train.assemble import architecture_of, assemble
from vit_jax.train.assembly import Assembly
from vit_jax.train.inputs import Datasets, open_datasets, open_train_batches
from vit_jax.train.lifecycle import workdir as workdirs
from vit_jax.train.lifecycle.interruption import Interrupted, Interruption
from vit_jax.train.loop import train
from vit_jax.train.overview import machine
from vit_jax.train.state import TrainState, items_of
from vit_jax.train.step import Metrics
from vit_jax.train.step_compiler import Leaves

NUM_CLASSES = 1000  # of a network without a dataset
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
        return (self.batch or math.nan) / float(np.median(self.seconds))

    def figures(self) -> dict[str, float]:
        """Median, quartiles and extremes in milliseconds, and images/s at the median."""
        low, median, high = np.quantile(self.seconds, (0.25, 0.5, 0.75)).tolist()
        named = {"median": median, "lower_quartile": low, "upper_quartile": high}
        named |= {"least": min(self.seconds), "most": max(self.seconds)}
        figures = {f"{name}_milliseconds": 1000 * seconds for name, seconds in named.items()}
        return (
            figures
            if self.batch is None
            else figures | {"images_per_second": self.images_per_second}
        )


def bench(config: RunConfig, *, num_steps: int, with_data: bool = False) -> dict[str, Any]:
    """Time the parts of a recipe's run, on random images.

    Args:
      config: as loaded.
      num_steps: how often each part is timed, after a few times that do not count; checkpoints
        `NUM_SAVES` times.
      with_data: times also the parts that read the recipe's dataset: its input, and the loop.

    Returns:
      JSON values: what was timed and where, the step's memory on one device, and under "parts" the
      figures of each.
    """
    validate(config)
    if isinstance(config, PretrainConfig):
        config = dataclasses.replace(config, phases={})  # the last phase is timed
    data = open_datasets(config) if with_data else None
    if data is not None:
        num_classes = data.train.num_classes
        num_examples = len(data.train)
        shape = data.train.label_shape
    else:
        num_classes, num_examples, shape = (
            NUM_CLASSES,
            config.global_batch * 1_000_000,
            (),
        )  # enough for any duration
    network = architecture_of(config, num_classes)
    run = assemble(
        config, network, num_examples=num_examples, devices=jax.devices(), label_shape=shape
    )
    began = time.perf_counter()
    step = run.compile_train_step()
    seconds = time.perf_counter() - began
    result = {"network": run.architecture.name, "global_batch": config.global_batch, **machine()}
    result |= {"compile_seconds": seconds}
    memory = step.memory_analysis()  # type: ignore[attr-defined]
    if memory is not None:
        result |= {
            "arguments_bytes": memory.argument_size_in_bytes,
            "temporary_bytes": memory.temp_size_in_bytes,
        }
    parts = [*_device_parts(run, step, num_steps), *_checkpoint_parts(run)]
    if data is not None:
        parts += _data_parts(run, step, data, num_steps)
    result["parts"] = {part.name: part.figures() for part in parts}
    chip = find_chip(result["device_kind"])
    if chip is not None and run.architecture.is_standard:  # formulas know no other network
        flops = (
            result["parts"]["step"]["images_per_second"]
            * run.training_flops_per_image
            / result["num_devices"]
        )
        result["mfu"] = flops / chip.peak_bf16_flops
    return result


def time_input(run: Assembly, source: Source, num_steps: int) -> Part:
    """Time the input alone: placed batches of the training images."""
    total = max(run.steps.total, WARM_UP_STEPS + num_steps + 1)  # a run may be shorter
    longer = dataclasses.replace(run, steps=dataclasses.replace(run.steps, total=total))
    with open_train_batches(longer, source, 0) as (batches, _):
        return time_batches(batches, num_steps, run.config.global_batch)


def time_batches(batches: Iterator[object], num_steps: int, size: int) -> Part:
    """Time the input alone: batches of `size` images, on the host or placed."""
    return Part("input", times_of(lambda: next(batches), num_steps), size)


def time_step(run: Assembly, step: TrainStep, num_steps: int) -> Part:
    """Time the training step alone, on random images that the devices hold."""
    train = Training(run, step)
    batch = jax.device_put(random_batch(run, run.config.global_batch), run.batch_sharding)
    return Part("step", times_of(lambda: train.advance(batch), num_steps), run.config.global_batch)


def to_text(result: dict[str, Any]) -> str:
    """The table that a person reads."""
    about = [f"compiled in {result['compile_seconds']:.1f} s"]
    names = [name for name in ("arguments", "temporary") if f"{name}_bytes" in result]
    about += [f"{name} {result[f'{name}_bytes'] / 1e6:,.0f} MB" for name in names]
    about += [f"MFU {result['mfu']:.1%}"] if "mfu" in result else []
    lines = [
        f"{result['network']}, {result['global_batch']:,} images a step, {result['num_devices']} x "
        f"{result['device_kind']}, jax {result['version_jax']}",
        ", ".join(about),
        f"{'milliseconds':<20} {'median':>10} {'quartiles':>23} {'images/s':>10}",
    ]
    for name, figures in result["parts"].items():
        median, low, high = (
            figures[f"{key}_milliseconds"] for key in ("median", "lower_quartile", "upper_quartile")
        )
        images = f"{figures['images_per_second']:>10,.0f}" if "images_per_second" in figures else ""
        lines.append(
            f"{name:<20} {median:>10,.2f} {low:>10,.2f} to {high:>9,.2f} {images}".rstrip()
        )
    return "\n".join(lines) + "\n"


def _device_parts(run: Assembly, step: TrainStep, num_steps: int) -> Iterator[Part]:
    """Time the work of the devices on a batch that they hold."""
    yield time_step(run, step, num_steps)
    size = run.evaluation_batch
    batch = jax.device_put(random_batch(run, size), run.batch_sharding)
    state = run.init_state()
    yield Part("evaluation", times_of(lambda: run.evaluation_step(state, batch), num_steps), size)
    result = "logits_BK" if run.architecture.num_classes else "features_BD"
    infer = jax.jit(
        lambda model, image: getattr(
            model(normalise(image, run.architecture.compute_dtype)), result
        )
    )
    model = state.evaluated_model()
    yield Part("inference", times_of(lambda: infer(model, batch.image_BHWC), num_steps), size)


def _checkpoint_parts(run: Assembly) -> Iterator[Part]:
    """Time how long a save delays the steps, takes until all is on disk, and takes to read again."""
    state = jax.block_until_ready(run.init_state())
    stalls = []
    saves = []
    reads = []
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
            jax.block_until_ready(
                CheckpointReader(pathlib.Path(folder)).restore(number, items_of(run.abstract_state))
            )
            reads.append(time.perf_counter() - began)
    yield from (Part("save, steps wait", stalls, None), Part("save, on disk", saves, None))
    yield Part("restore", reads, None)


def _data_parts(run: Assembly, step: TrainStep, data: Datasets, num_steps: int) -> Iterator[Part]:
    """Time the parts that read the dataset: the input alone, with the step, and the complete loop."""
    size = run.config.global_batch
    train_on = Training(run, step)
    with open_train_batches(run, data.train, 0) as (batches, _):
        yield time_batches(batches, num_steps, size)
        yield Part(
            "input with step", times_of(lambda: train_on.advance(next(batches)), num_steps), size
        )
    fields = {field.name: getattr(run, field.name) for field in dataclasses.fields(run)}
    stamped = _Stamped(**fields, compiled=step, stamps=[])
    stop = _After(WARM_UP_STEPS + num_steps + 1)
    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.suppress(Interrupted),
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
        workdirs.claim(folder, run.config) as workdir,
    ):
        train(stamped, data, workdir, lambda *_: (run.init_state(), ""), stop)
    yield Part("loop", np.diff(stamped.stamps[WARM_UP_STEPS:]).tolist(), size)


def times_of(start: Callable[[], object], num_steps: int) -> list[float]:
    """Seconds between the ends of calls, each started before the one before has ended, as in the loop."""
    pending = start()
    ends = []
    for _ in range(WARM_UP_STEPS + num_steps):
        before = pending
        pending = start()
        jax.block_until_ready(before)
        ends.append(time.perf_counter())
    jax.block_until_ready(pending)
    ends.append(time.perf_counter())
    return np.diff(ends[WARM_UP_STEPS:]).tolist()


class Training:
    """A state that steps take further."""

    def __init__(self, run: Assembly, step: TrainStep):
        self._run = run
        self._leaves = pytree.named_leaves(run.init_state())
        self._step = step

    def advance(self, batch: Batch) -> Metrics:
        """Start a step; its metrics."""
        self._leaves, metrics = self._step(self._leaves, batch)
        return metrics

    @property
    def state(self) -> TrainState:
        """The state after the steps so far."""
        return self._run.state_from(self._leaves)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Stamped(Assembly):
    """A run that notes when each of its steps was started."""

    compiled: TrainStep
    stamps: list[float]

    def compile_train_step(self, start_step: int = 0) -> TrainStep:
        def step(leaves: Leaves, batch: Batch) -> tuple[Leaves, Metrics]:
            self.stamps.append(time.perf_counter())
            return self.compiled(leaves, batch)

        return step


class _After(Interruption):
    """Ends a run after so many steps, as a signal would."""

    def __init__(self, num_steps: int):
        super().__init__()
        self._steps_left = num_steps

    def is_requested(self) -> bool:
        self._steps_left -= 1
        return self._steps_left <= 0


def random_batch(run: Assembly, size: int) -> Batch:
    """Return random images and labels, the same at every call."""
    rng = np.random.default_rng(0)
    return Batch(
        image_BHWC=rng.integers(0, 256, (size, *run.architecture.image_size, 3), np.uint8),
        label_B=rng.integers(
            0, max(run.architecture.num_classes, 1), (size, *run.label_shape), np.int32
        ),
        mask_B=np.ones(size, np.float32),
    )
