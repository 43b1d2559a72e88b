"""Compiles a run's train step for TPUs and NVIDIA GPUs without having any.

The compilers come with the extras `tpu` and `plan-gpu`. Nothing is executed.

XLA's cycle counts for TPUs are in the HLO, except those of Pallas kernels, which it takes as they
are. What one execution of a kernel costs is in the schedule that the compiler writes to a folder on
request: bundles of instructions, one a cycle. For GPUs it counts nothing: `gpu_kernels.py` does.
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
from vit_jax.storage.files import clean_up_at_once
from vit_jax.tools.plan.gpu_targets import target_config
from vit_jax.tools.plan.topology import Topology
from vit_jax.train.assembly import Assembly

# Without these libtpu queries the network and prints warnings; a compiler needs none of it.
_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    # Several plans at once: the lock that this lifts guards a chip
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",  # of CUDA's libraries, which a compiler does without
}
# Without a GPU nothing can be timed to choose tiles, and XLA's own kernels for products fail:
# cuBLAS does all of them.
_GPU_OPTIONS: dict[str, str | bool] = {
    "xla_gpu_autotune_level": "0",
    "xla_gpu_enable_triton_gemm": False,
}
_SCHEDULE = re.compile(
    r"\d+-(.+)-\d+-schedule-analysis_final_bundles\.txt"
)  # a file, for each instruction of the HLO
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
    bundles: Mapping[str, int] = dataclasses.field(
        default_factory=dict
    )  # of a program of each kernel, by instruction


@dataclasses.dataclass(frozen=True)
class TooLarge:
    """The compiler's result for a step that does not fit."""

    needed_bytes: int | None  # on one chip; None if the message does not contain it
    available_bytes: int | None  # to a program, of the chip's memory; None likewise
    message: str  # of the compiler


def missing_compiler(topology: Topology) -> str:
    """Return why nothing can be compiled for the topology; "" where its compiler is installed."""
    if topology.is_tpu:
        return (
            ""
            if has_compiler()
            else f"libtpu is not installed; {install_command('tpu')} installs it"
        )
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


def topology_devices(topology: Topology) -> Sequence[jax.Device]:
    """Devices of the topology, to compile for.

    Raises:
      ValueError: no compiler for it is installed.
    """
    if missing := missing_compiler(topology):
        raise ValueError(f"No compiler for {topology.name}: {missing}.")
    if not topology.is_tpu:
        return _gpus(topology)
    options: dict[str, Any] = {}
    if topology.fabric.kind == "v4":
        # One device for each chip, as in jobs; the default of the other kinds
        options["chip_config_name"] = "megacore"
    if topology.chips_per_slice == 1:
        options["chips_per_host_bounds"] = [1, 1, 1]
    if topology.num_slices > 1:
        options["num_slices"] = topology.num_slices
    name = f"{topology.fabric.kind}:{'x'.join(map(str, topology.shape))}"
    with _environment():
        devices: Sequence[jax.Device] = topologies.get_topology_desc(
            name, platform="tpu", **options
        ).devices
    return devices


def _gpus(topology: Topology) -> Sequence[jax.Device]:
    # Nodes, processes of a node, GPUs of a process
    shape = f"{topology.num_slices}x1x{topology.chips_per_slice}"
    describe = functools.partial(
        topologies.get_topology_desc,
        *(topology.fabric.kind, "cuda"),
        target_config=target_config(topology),
        topology=shape,
    )
    with _environment():
        try:
            devices: Sequence[jax.Device] = describe().devices
        except NotImplementedError:  # the plugin was hidden when JAX looked for plugins
            backend.load_cuda()
            devices = describe().devices
    return devices


def compile_step(run: Assembly) -> Executable | TooLarge:
    """Compile the train step of a run that was assembled for `topology_devices`."""
    return compile_program(
        lambda: run.trace_train_step().lower(), run.batch_sharding.mesh.devices.flat[0]
    )


def compile_program(
    lower: Callable[[], jax.stages.Lowered], device: jax.Device
) -> Executable | TooLarge:
    """Compile what `lower` returns, a program for `topology_devices`, of which `device` is one."""
    began = time.perf_counter()
    for path in _schedules().iterdir():
        path.unlink()
    try:
        with _nothing_cached():
            compiled = lower().compile(
                compiler_options=_GPU_OPTIONS if device.platform == "gpu" else None
            )
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return read_too_large(str(error))
    seconds = time.perf_counter() - began
    return Executable(
        compiled.memory_analysis(), compiled.as_text() or "", seconds, _read_bundles()
    )


def _read_bundles() -> dict[str, int]:
    """Return bundles by instruction; empty if libtpu was loaded earlier, without asking for schedules."""
    bundles_by_name = {}
    for path in _schedules().iterdir():
        match = _SCHEDULE.fullmatch(path.name)
        if match and (bundles := _BUNDLES.search(path.read_text(errors="replace"))):
            bundles_by_name[match[1]] = int(bundles[1])
    return bundles_by_name


def _schedules() -> pathlib.Path:
    """Return the folder to which this process's compiler writes schedules; make it again if it was cleaned up."""
    folder = _schedule_folder()
    folder.mkdir(exist_ok=True)
    return folder


@functools.cache
def _schedule_folder() -> pathlib.Path:
    """Return a temporary folder, about 50 MB for a step, which is removed at the end."""
    folder = tempfile.mkdtemp(prefix="vit_jax_schedules_")
    remove = functools.partial(shutil.rmtree, folder, ignore_errors=True)
    atexit.register(remove)
    clean_up_at_once(remove)
    return pathlib.Path(folder)


def read_too_large(message: str) -> TooLarge:
    """Parse the compiler's message about a program that does not fit."""
    match = next((match for pattern in _TOO_LARGE if (match := pattern.search(message))), None)
    if match is None:
        return TooLarge(None, None, message)
    needed, available = (int(float(match[place]) * _UNITS[match[place + 1]]) for place in (1, 3))
    return TooLarge(needed, available, message)


@contextlib.contextmanager
def _environment() -> Iterator[None]:
    """Variables that libtpu reads when it is loaded; kept, they would make this machine look like a TPU host."""
    before = dict(os.environ)
    dump = (
        f"--xla_jf_dump_to={_schedules()} --xla_jf_dump_llo_text=true "
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
def _nothing_cached() -> Iterator[None]:
    """Keep compiled programs out of the persistent cache: those for absent TPUs cannot be loaded again."""
    name = "jax_persistent_cache_min_compile_time_secs"
    before = getattr(jax.config, name)
    jax.config.update(name, float("inf"))
    try:
        yield
    finally:
        jax.config.update(name, before)
