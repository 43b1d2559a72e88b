"""Compiles a run's very train step for TPUs that are not there.

The compiler comes with `pip install 'vit_jax[tpu]'`. Nothing is executed, and no TPU is looked for.
"""

import contextlib
import dataclasses
import importlib.util
import os
import re
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from jax.experimental import topologies

from vit_jax.plan.topology import Topology
from vit_jax.train.assemble import Assembly

# What libtpu would otherwise ask the network for, and complain about; none of it matters to a compiler.
_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # several plans at once: the lock that this lifts guards a chip
}
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_TOO_LARGE = (
    re.compile(r"\(([\d.]+)([KMGT]?)\) exceeds available HBM \(([\d.]+)([KMGT]?)\)"),
    re.compile(r"Used ([\d.]+)([KMGT]?) of ([\d.]+)([KMGT]?) hbm"),
)


@dataclasses.dataclass(frozen=True)
class Executable:
    """What a compilation tells.

    Attributes:
      arguments_bytes: on one chip, what goes in: state and batch.
      temporary_bytes: what is needed beside the arguments, at most, at one time.
      new_output_bytes: what comes out and does not take the memory of an argument over.
      program_bytes: the instructions.
      text: optimised HLO.
      compile_seconds: how long the compiler took.
    """

    arguments_bytes: int
    temporary_bytes: int
    new_output_bytes: int
    program_bytes: int
    text: str
    compile_seconds: float


@dataclasses.dataclass(frozen=True)
class TooLarge:
    """The step does not fit, by the compiler's word.

    Attributes:
      needed_bytes: on one chip, as far as the compiler came; None where it does not say.
      available_bytes: what a program may use of the chip's memory.
      message: of the compiler.
    """

    needed_bytes: int | None
    available_bytes: int | None
    message: str


def has_compiler() -> bool:
    """Whether the compiler for TPUs is installed."""
    return importlib.util.find_spec("libtpu") is not None


def topology_devices(topology: Topology) -> Sequence[jax.Device]:
    """Devices of the topology, to compile for.

    Raises:
      ValueError: there is no compiler for it here.
    """
    if not topology.is_tpu or not has_compiler():
        raise ValueError(
            f"There is no compiler for {topology.name} here: one for TPUs comes with pip install 'vit_jax[tpu]'; GPUs "
            "are planned by arithmetic."
        )
    options: dict[str, Any] = {}
    if topology.fabric.kind == "v4":
        options["chip_config_name"] = "megacore"  # one device for each chip, as jobs have it; others do so by default
    if topology.chips_per_slice == 1:
        options["chips_per_host_bounds"] = [1, 1, 1]
    if topology.num_slices > 1:
        options["num_slices"] = topology.num_slices
    shape = "x".join(map(str, topology.shape))
    name = f"{topology.fabric.kind}:{shape}"
    with _environment():
        devices: Sequence[jax.Device] = topologies.get_topology_desc(name, platform="tpu", **options).devices
    return devices


def compile_step(run: Assembly) -> Executable | TooLarge:
    """Compiles the train step of a run that was assembled for `topology_devices`."""
    began = time.perf_counter()
    try:
        with _nothing_cached():
            compiled: Any = run.compile_train_step()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return read_too_large(str(error))
    memory = compiled.memory_analysis()
    return Executable(
        arguments_bytes=memory.argument_size_in_bytes,
        temporary_bytes=memory.temp_size_in_bytes,
        new_output_bytes=memory.output_size_in_bytes - memory.alias_size_in_bytes,
        program_bytes=memory.generated_code_size_in_bytes,
        text=compiled.as_text(),
        compile_seconds=time.perf_counter() - began,
    )


def read_too_large(message: str) -> TooLarge:
    """What the compiler says when a program does not fit."""
    for pattern in _TOO_LARGE:
        if match := pattern.search(message):
            needed, available = (
                int(float(number) * _UNITS[unit]) for number, unit in ((match[1], match[2]), (match[3], match[4]))
            )
            return TooLarge(needed, available, message)
    return TooLarge(None, None, message)


@contextlib.contextmanager
def _environment() -> Iterator[None]:
    """Variables that libtpu reads when it is loaded; afterwards they would only make this look like a TPU's host."""
    before = dict(os.environ)
    os.environ.update({name: value for name, value in _ENVIRONMENT.items() if name not in before})
    try:
        yield
    finally:
        for name in _ENVIRONMENT.keys() - before.keys():
            del os.environ[name]


@contextlib.contextmanager
def _nothing_cached() -> Iterator[None]:
    """Writes no compiled program to disk: one for absent TPUs cannot be read back."""
    name = "jax_persistent_cache_min_compile_time_secs"
    before = getattr(jax.config, name)
    jax.config.update(name, float("inf"))
    try:
        yield
    finally:
        jax.config.update(name, before)
