"""Checks of all processes together: an all-reduce, a checkpoint, and the input against the step."""

import contextlib
import pathlib
import secrets
import shutil
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from vit_jax import hosts, pytree
from vit_jax.checkpoint import CheckpointReader, CheckpointStore
from vit_jax.config import FinetuneConfig, RunConfig
from vit_jax.config.check import validate
from vit_jax.data.records import Source, few
from vit_jax.storage.files import use_compilation_cache
from vit_jax.tools.machine.bench import time_input, time_step
from vit_jax.tools.machine.checks import Finding
from vit_jax.train.assemble import assemble
from vit_jax.train.assembly import Assembly
from vit_jax.train.inputs import open_datasets
from vit_jax.train.lifecycle import workdir as workdirs
from vit_jax.train.starting_weights import adapt
from vit_jax.train.state_builder import architecture_of

FOLDER = ".doctor"  # a folder in the workdir, for the checkpoint of the check
_LENGTH = 2**20  # float32 numbers of each device: 4 MiB
_NUM_REDUCTIONS = 5
STEPS = 20  # timed steps
Prepare = Callable[[], tuple[Assembly, Source]]
"""Returns the result of `prepare_run`, computed once for several checks."""


def check_all_reduce() -> Finding:
    """Sum known numbers over all devices of all processes."""
    rows = _build_rows()
    num_devices = jax.device_count()
    everywhere = NamedSharding(_build_mesh(), PartitionSpec())
    reduce = jax.jit(lambda array: array.sum(axis=0), out_shardings=everywhere)
    seconds = []
    for _ in range(_NUM_REDUCTIONS + 1):
        began = time.perf_counter()
        result = jax.block_until_ready(reduce(rows))
        seconds.append(time.perf_counter() - began)

    milliseconds = 1000 * statistics.median(seconds[1:])  # the first call compiles
    mebibytes = _LENGTH * 4 // 2**20
    found = f"{mebibytes} MiB of each of {num_devices} devices in {milliseconds:.1f} ms"
    expected = num_devices * (num_devices - 1) // 2
    sums = np.asarray(result.addressable_data(0))
    if (sums == expected).all():
        return Finding(found)
    return Finding(
        found,
        "the sum is wrong: exclude one host after another to find the device, and have it repaired",
    )


def check_checkpoint(workdir: pathlib.Path) -> Finding:
    """Write an array that is split over all devices into the workdir, read it back, remove it.

    Raises:
      ValueError, SaveError: the folder cannot be written, or is another one in another process.
    """
    array = _build_rows()
    abstract: Any = jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)
    with make_temporary_folder(workdir) as folder:
        stored = write_and_read(
            folder,
            {"model": {"array": array}},
            {"model": {"array": abstract}},
        )
    return Finding(stored.describe(array.nbytes), stored.remedy)


class Stored(NamedTuple):
    """The times of writing and reading a checkpoint, and the names of arrays that changed."""

    write_seconds: float
    read_seconds: float
    changed: list[str]

    def describe(self, num_bytes: int) -> str:
        """Return the times of a checkpoint of this size as a text."""
        return (
            f"{num_bytes / 2**20:,.0f} MiB written in {self.write_seconds:.1f} s, "
            f"read in {self.read_seconds:.1f} s"
        )

    @property
    def remedy(self) -> str:
        """The advice for changed arrays, "" without any."""
        if not self.changed:
            return ""
        return f"other numbers came back ({few(self.changed)}): the storage is damaged"


def write_and_read(
    folder: pathlib.Path,
    items: Any,
    abstract: Any,
) -> Stored:
    """Write a checkpoint and read it; every process calls it."""
    began = time.perf_counter()
    with contextlib.closing(CheckpointStore(folder)) as checkpoints:
        checkpoints.save(1, items, metadata={}, metrics={})
        checkpoints.wait()
    written = time.perf_counter()
    restored = CheckpointReader(folder).restore(1, abstract)
    changed = find_changed_arrays(items, restored)
    read = time.perf_counter()
    hosts.wait_for_all("checkpoint compared")
    return Stored(written - began, read - written, changed)


def find_changed_arrays(before: object, after: object) -> list[str]:
    """Return the names of arrays that differ in any bit, on the devices of this process."""
    arrays_after = pytree.name_leaves(after)
    changed = []
    for name, array in pytree.name_leaves(before).items():
        if _read_bits(array) != _read_bits(arrays_after[name]):
            changed.append(name)
    return changed


def _read_bits(array: jax.Array) -> list[bytes]:
    return [np.asarray(shard.data).tobytes() for shard in array.addressable_shards]


@contextlib.contextmanager
def make_temporary_folder(workdir: pathlib.Path) -> Iterator[pathlib.Path]:
    """Make a folder for a checkpoint; remove it at the end, with the parents that it created.

    Its name is unique, because others may examine the same workdir.
    """
    suffix, *_ = hosts.gather(secrets.token_hex(8))
    folder = workdir / f"{FOLDER}.{suffix}"
    missing_parents = [parent for parent in folder.parents if not parent.exists()]
    try:
        workdirs.prepare_shared(folder)
        yield folder
    finally:
        if hosts.is_first():
            shutil.rmtree(folder, ignore_errors=True)
            with contextlib.suppress(OSError):  # not empty
                for parent in missing_parents:
                    parent.rmdir()


def prepare_run(config: RunConfig) -> tuple[Assembly, Source]:
    """Return the recipe's run, with nothing compiled, and its training images.

    Raises:
      ValueError: the config, its data or its weights cannot be used.
    """
    validate(config)
    use_compilation_cache(config.logging.compilation_cache)  # the run reuses the compiled step
    source = open_datasets(config).train
    if isinstance(config, FinetuneConfig) and config.init_from is not None:
        start = adapt(config, source)
        architecture = start.architecture
        config = start.config
    else:
        architecture = architecture_of(config, source.num_classes)
    run = assemble(
        config,
        architecture,
        num_examples=len(source),
        label_shape=source.label_shape,
        devices=jax.devices(),
    )
    return run, source


def count_checkpoint_bytes(prepare: Prepare) -> int:
    """Return the bytes of all checkpoints of a run, including one that is being written."""
    run, _ = prepare()
    state_bytes = 0
    for leaf in jax.tree.leaves(run.abstract_state):
        state_bytes += leaf.size * leaf.dtype.itemsize
    kept = run.config.checkpoint
    return state_bytes * (kept.keep_latest + kept.keep_best + 1)


def check_speed(prepare: Prepare) -> Finding:
    """Compare the speed of the recipe's input with the speed of its step.

    Raises:
      ValueError: see `prepare_run`; `LostWorker`, OSError: see the input.
    """
    run, source = prepare()
    step_part = time_step(run, run.compile_train_step(), STEPS)
    step_speed = step_part.images_per_second
    input_part = time_input(run, source, STEPS)
    input_speed = input_part.images_per_second
    found = f"input {input_speed:,.0f} images/s, step {step_speed:,.0f}"
    return Finding(found, advise_on_input(input_speed, step_speed))


def advise_on_input(speed: float, needed: float) -> str:
    """Return a remedy for an input that is slower than needed, in images/s; "" if it is not."""
    if speed < needed:
        return (
            "the devices will wait: more cores, a faster disk (a mounted bucket: its cache), "
            "input.cache_records=True for data that fit into memory, or vit-jax prepare "
            "for images that are larger than needed"
        )
    return ""


def _build_rows() -> jax.Array:
    """Return float32 (devices, _LENGTH): row i is filled with i and lies on device i."""

    def build_row(index: Any) -> np.ndarray:
        return np.full((1, _LENGTH), index[0].start or 0, np.float32)

    shape = (jax.device_count(), _LENGTH)
    sharding = NamedSharding(_build_mesh(), PartitionSpec("device"))
    return jax.make_array_from_callback(shape, sharding, build_row)


def _build_mesh() -> Mesh:
    return Mesh(np.array(jax.devices()), ("device",))
