"""Compile a run's train step for TPUs and NVIDIA GPUs without having any.

The compilers come with the extras `tpu` and `plan-gpu`. Nothing is executed.

XLA's cycle counts for TPUs are in the HLO. It counts no cycles of Pallas kernels: on request the
compiler writes their schedules to a folder, as bundles of instructions, one a cycle. XLA counts no
cycles for GPUs: `gpu_kernels.py` estimates their time.
"""

import atexit
import contextlib
import dataclasses
import functools
import importlib.metadata
import importlib.util
import os
import pathlib
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.experimental import topologies

from vit_jax.imports import backend
from vit_jax.imports.extras import install_command
from vit_jax.sharding.mesh import GPU_OPTIONS
from vit_jax.storage.files import clean_up_at_once
from vit_jax.tools.plan.gpu_targets import describe_target
from vit_jax.tools.plan.topology import Topology
from vit_jax.train.assembly import Assembly

# Without these libtpu queries the network and prints warnings; a compiler needs none of it.
_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    # Allow several plans at once: the lock guards a chip, and a plan uses none
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    # Skip the versions of CUDA's libraries, which a compiler does not load
    "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
}
# Without a GPU nothing can be timed to choose tiles.
_GPU_OPTIONS = GPU_OPTIONS | {"xla_gpu_autotune_level": "0"}
# Names of files, one for each instruction of the HLO
_SCHEDULE = re.compile(r"\d+-(.+)-\d+-schedule-analysis_final_bundles\.txt")
_BUNDLES = re.compile(r"total scheduled bundles:\s*(\d+)")
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_TOO_LARGE = (
    re.compile(r"\(([\d.]+)([KMGT]?)\) exceeds available HBM \(([\d.]+)([KMGT]?)\)"),
    re.compile(r"Used ([\d.]+)([KMGT]?) of ([\d.]+)([KMGT]?) hbm"),
)


@dataclasses.dataclass(frozen=True)
class Executable:
    """A compiled step."""

    memory: Any  # XLA's `CompiledMemoryStats`, of one chip
    text: str  # optimised HLO
    compile_seconds: float
    # Bundles of one program of each kernel, by instruction
    bundles: Mapping[str, int] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class TooLarge:
    """The compiler's result for a step that does not fit."""

    needed_bytes: int | None  # on one chip; None if the message does not contain it
    available_bytes: int | None  # memory of the chip for a program; None as above
    message: str  # error of the compiler


def explain_missing_compiler(topology: Topology) -> str:
    """Return why nothing can be compiled for the topology; "" where its compiler is installed."""
    if topology.is_tpu:
        if has_compiler():
            return ""
        return f"libtpu is not installed; {install_command('tpu')} installs it"
    has_plugin = any(name.startswith("jax-cuda") for name in backend.plugins())
    if has_plugin and _has_ptxas():
        return ""
    return f"the compiler for GPUs is not installed; {install_command('plan-gpu')} installs it"


def _has_ptxas() -> bool:
    """Return whether NVIDIA's assembler is installed: as a package, or with a CUDA toolkit."""
    for name in ("nvidia-cuda-nvcc-cu12", "nvidia-cuda-nvcc"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            importlib.metadata.version(name)
            return True
    return shutil.which("ptxas") is not None


def has_compiler() -> bool:
    """Return whether the compiler for TPUs is installed."""
    return importlib.util.find_spec("libtpu") is not None


def list_devices(topology: Topology) -> Sequence[jax.Device]:
    """Return the devices of the topology, to compile for.

    Raises:
      ValueError: no compiler for it is installed.
    """
    missing = explain_missing_compiler(topology)
    if missing:
        raise ValueError(f"No compiler for {topology.name}: {missing}.")
    if topology.is_tpu:
        return _describe_tpus(topology)
    return _describe_gpus(topology)


def _describe_tpus(topology: Topology) -> Sequence[jax.Device]:
    options: dict[str, Any] = {}
    if topology.fabric.kind == "v4":
        # One device for each chip, as in jobs; this is the default of the other kinds
        options["chip_config_name"] = "megacore"
    if topology.chips_per_slice == 1:
        options["chips_per_host_bounds"] = [1, 1, 1]
    if topology.num_slices > 1:
        options["num_slices"] = topology.num_slices
    name = f"{topology.fabric.kind}:{'x'.join(map(str, topology.shape))}"
    with _compiler_environment():
        description = topologies.get_topology_desc(name, platform="tpu", **options)
    devices: Sequence[jax.Device] = description.devices
    return devices


def _describe_gpus(topology: Topology) -> Sequence[jax.Device]:
    describe = functools.partial(
        topologies.get_topology_desc,
        topology.fabric.kind,
        "cuda",
        target_config=describe_target(topology),
        # Nodes, processes of a node, GPUs of a process
        topology=f"{topology.num_slices}x1x{topology.chips_per_slice}",
    )
    with _compiler_environment():
        try:
            description = describe()
        except NotImplementedError:  # the plugin was hidden when JAX looked for plugins
            backend.load_cuda()
            description = describe()
    devices: Sequence[jax.Device] = description.devices
    return devices


def compile_step(run: Assembly) -> Executable | TooLarge:
    """Compile the train step of a run that was assembled for `list_devices`."""
    device = run.batch_sharding.mesh.devices.flat[0]
    return compile_program(lambda: run.trace_train_step().lower(), device)


def compile_program(
    lower: Callable[[], jax.stages.Lowered], device: jax.Device
) -> Executable | TooLarge:
    """Compile the lowered program that `lower` returns, for `device` of `list_devices`."""
    began = time.perf_counter()
    for path in _open_schedules().iterdir():
        path.unlink()
    options = _GPU_OPTIONS if device.platform == "gpu" else None
    try:
        with _without_cache():
            compiled = lower().compile(compiler_options=options)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return read_too_large(str(error))
    seconds = time.perf_counter() - began
    return Executable(
        memory=compiled.memory_analysis(),
        text=compiled.as_text() or "",
        compile_seconds=seconds,
        bundles=_read_bundles(),
    )


def _read_bundles() -> dict[str, int]:
    """Return bundles by instruction.

    There are none if libtpu was loaded earlier, without asking for schedules.
    """
    bundles = {}
    for path in _open_schedules().iterdir():
        file_name = _SCHEDULE.fullmatch(path.name)
        if file_name is None:
            continue
        count = _BUNDLES.search(path.read_text(errors="replace"))
        if count is not None:
            bundles[file_name[1]] = int(count[1])
    return bundles


def _open_schedules() -> pathlib.Path:
    """Return the folder to which this process's compiler writes schedules.

    It is made again if it was cleaned up.
    """
    folder = _make_schedule_folder()
    folder.mkdir(exist_ok=True)
    return folder


@functools.cache
def _make_schedule_folder() -> pathlib.Path:
    """Return a temporary folder, about 50 MB for a step, which is removed at the end."""
    folder = tempfile.mkdtemp(prefix="vit_jax_schedules_")
    remove = functools.partial(shutil.rmtree, folder, ignore_errors=True)
    atexit.register(remove)
    clean_up_at_once(remove)
    return pathlib.Path(folder)


def read_too_large(message: str) -> TooLarge:
    """Parse the compiler's message about a program that does not fit."""
    for pattern in _TOO_LARGE:
        match = pattern.search(message)
        if match is not None:
            needed, needed_unit, available, available_unit = match.groups()
            needed_bytes = int(float(needed) * _UNITS[needed_unit])
            available_bytes = int(float(available) * _UNITS[available_unit])
            return TooLarge(needed_bytes, available_bytes, message)
    return TooLarge(None, None, message)


@contextlib.contextmanager
def _compiler_environment() -> Iterator[None]:
    """Set variables that libtpu reads when it is loaded.

    Later they would make this machine look like a TPU host.
    """
    before = dict(os.environ)
    dump = (
        f"--xla_jf_dump_to={_open_schedules()} --xla_jf_dump_llo_text=true "
        "--xla_jf_dump_llo_pass_label_regex=final_bundles"
    )
    os.environ.update(_ENVIRONMENT | before)
    os.environ["LIBTPU_INIT_ARGS"] = f"{before.get('LIBTPU_INIT_ARGS', '')} {dump}".strip()
    try:
        yield
    finally:
        for name in (*_ENVIRONMENT, "LIBTPU_INIT_ARGS"):
            os.environ.pop(name)
        os.environ.update(before)


@contextlib.contextmanager
def _without_cache() -> Iterator[None]:
    """Keep compiled programs out of the persistent cache.

    Programs for absent TPUs cannot be loaded again.
    """
    name = "jax_persistent_cache_min_compile_time_secs"
    before = getattr(jax.config, name)
    jax.config.update(name, float("inf"))
    try:
        yield
    finally:
        jax.config.update(name, before)
