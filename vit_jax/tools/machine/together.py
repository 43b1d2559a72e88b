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
from vit_jax.tools.machine.bench import time_input, time_step
from vit_jax.tools.machine.checks import Finding
from vit_jax.train.assemble import architecture_of, assemble
from vit_jax.train.assembly import Assembly
from vit_jax.train.inputs import open_datasets
from vit_jax.train.lifecycle import workdir as workdirs
from vit_jax.train.profiling import use_compilation_cache
from vit_jax.train.starting_weights import adapt

FOLDER = ".doctor"  # of the workdir, while a checkpoint is tried
_LENGTH = 2**20  # float32 numbers of each device: 4 MiB
_TIMES = 5
STEPS = 20  # that are timed
Prepare = Callable[[], tuple[Assembly, Source]]
"""Gives what `prepared` does, once for several checks."""


def all_reduce() -> Finding:
    """The sum over all devices of all processes, of numbers whose sum is known."""
    rows = _rows()
    count = jax.device_count()
    everywhere = NamedSharding(Mesh(np.array(jax.devices()), ("device",)), PartitionSpec())
    total = jax.jit(lambda array: array.sum(axis=0), out_shardings=everywhere)
    seconds = []
    for _ in range(_TIMES + 1):
        began = time.perf_counter()
        result = jax.block_until_ready(total(rows))
        seconds.append(time.perf_counter() - began)
    is_right = bool((np.asarray(result.addressable_data(0)) == count * (count - 1) // 2).all())
    milliseconds = 1000 * statistics.median(seconds[1:])
    found = f"{_LENGTH * 4 // 2**20} MiB of each of {count} devices in {milliseconds:.1f} ms"
    remedy = "the sum is wrong: leave out one host after another to find the device, and have it repaired"
    return Finding(found, "" if is_right else remedy)


def checkpoint(workdir: pathlib.Path) -> Finding:
    """Write an array that is spread over all devices into the workdir, read it back, remove it.

    Raises:
      ValueError, SaveError: the folder cannot be written, or is another one in another process.
    """
    array = _rows()
    abstract: Any = jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)
    with folder_in(workdir) as folder:
        stored = store(folder, {"model": {"array": array}}, {"model": {"array": abstract}})
    return Finding(stored.found(array.nbytes), stored.remedy)


class Stored(NamedTuple):
    """The times of a checkpoint, and the names of arrays that differ after it."""

    write_seconds: float
    read_seconds: float
    changed: list[str]

    def found(self, num_bytes: int) -> str:
        return f"{num_bytes / 2**20:,.0f} MiB written in {self.write_seconds:.1f} s, read in {self.read_seconds:.1f} s"

    @property
    def remedy(self) -> str:
        if not self.changed:
            return ""
        return f"other numbers came back ({few(self.changed)}): the storage is damaged"


def store(folder: pathlib.Path, items: Any, abstract: Any) -> Stored:
    """Write a checkpoint and read it; every process calls it."""
    began = time.perf_counter()
    with contextlib.closing(CheckpointStore(folder)) as checkpoints:
        checkpoints.save(1, items, metadata={}, metrics={})
        checkpoints.wait()
    written = time.perf_counter()
    restored = CheckpointReader(folder).restore(1, abstract)
    changed = changed_arrays(items, restored)
    read = time.perf_counter()
    hosts.wait_for_all("checkpoint compared")
    return Stored(written - began, read - written, changed)


def changed_arrays(before: Any, after: Any) -> list[str]:
    """Return the names of arrays that differ in any bit, on the devices of this process."""
    later = pytree.named_leaves(after)
    return [
        name
        for name, array in pytree.named_leaves(before).items()
        if _bits(array) != _bits(later[name])
    ]


def _bits(array: jax.Array) -> list[bytes]:
    return [np.asarray(shard.data).tobytes() for shard in array.addressable_shards]


@contextlib.contextmanager
def folder_in(workdir: pathlib.Path) -> Iterator[pathlib.Path]:
    """Make a folder for a checkpoint, and remove it with the parents it needed; others may examine the same workdir."""
    folder = workdir / f"{FOLDER}.{hosts.gather(secrets.token_hex(8))[0]}"
    made = [place for place in folder.parents if not place.exists()]
    try:
        workdirs.prepare_shared(folder)
        yield folder
    finally:
        if hosts.is_first():
            shutil.rmtree(folder, ignore_errors=True)
            with contextlib.suppress(OSError):  # not empty
                for place in made:
                    place.rmdir()


def prepared(config: RunConfig) -> tuple[Assembly, Source]:
    """The recipe's run, of which nothing is compiled, and its training images.

    Raises:
      ValueError: the config, its data or its weights cannot be used.
    """
    validate(config)
    use_compilation_cache(config.logging.compilation_cache)  # the run finds its step compiled
    data = open_datasets(config)
    if isinstance(config, FinetuneConfig) and config.init_from is not None:
        architecture = adapt(config, data.train)[0]
    else:
        architecture = architecture_of(config, data.train.num_classes)
    shape = data.train.label_shape
    devices = jax.devices()
    run = assemble(
        config, architecture, num_examples=len(data.train), label_shape=shape, devices=devices
    )
    return run, data.train


def checkpoint_bytes(prepare: Prepare) -> int:
    """Return the bytes of all checkpoints that a run keeps, and of the one that is being written."""
    run, _ = prepare()
    state = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(run.abstract_state))
    return state * (run.config.checkpoint.keep_latest + run.config.checkpoint.keep_best + 1)


def speed(prepare: Prepare) -> Finding:
    """Return whether the recipe's images come as fast as its steps need them.

    Raises:
      ValueError: as `prepared`; `LostWorker`, OSError: as of the input.
    """
    run, source = prepare()
    step = time_step(run, run.compile_train_step(), STEPS).images_per_second
    inputs = time_input(run, source, STEPS).images_per_second
    return Finding(f"input {inputs:,.0f} images/s, step {step:,.0f}", slow_input(inputs, step))


def slow_input(speed: float, needed: float) -> str:
    """Return what to do about an input of `speed` images/s, "" if it is as fast as needed."""
    remedy = (
        "the devices will wait: more cores, a faster disk (a mounted bucket: its cache), input.cache_records=True "
        "for data that fit into memory, or vit-jax prepare for images that are larger than needed"
    )
    return remedy if speed < needed else ""


def _rows() -> jax.Array:
    """Return float32 (devices, _LENGTH), one row on each device of all processes, with its number everywhere."""

    def row(index: Any) -> np.ndarray:
        return np.full((1, _LENGTH), index[0].start or 0, np.float32)

    sharding = NamedSharding(Mesh(np.array(jax.devices()), ("device",)), PartitionSpec("device"))
    return jax.make_array_from_callback((jax.device_count(), _LENGTH), sharding, row)
