"""Checks of the machine of this process: one function for each line of the report."""

import dataclasses
import importlib.metadata
import os
import pathlib
import platform
import re
import shutil
import subprocess
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

import vit_jax
from vit_jax.data.workers import SHARED_MEMORY, count_cores
from vit_jax.imports.backend import has_tpu, plugins
from vit_jax.imports.extras import install_command
from vit_jax.train.overview import PACKAGES

GIB = 2**30
LEAST_MEMORY_BYTES = 2 * GIB  # Python, JAX and a few batches of images
# Containers get 64 MiB, too little for NCCL and for workers that decode images
LEAST_SHARED_BYTES = GIB / 2
# A checkpoint of ViT-B/16 with Adam's moments, where the recipe is not known
LEAST_DISK_BYTES = GIB
LEAST_DRIVERS = {"12": 525, "13": 580}  # by CUDA release; JAX's installation page
_ROOT = pathlib.Path("/")
_QUERY = ("nvidia-smi", "--query-gpu=driver_version,name", "--format=csv,noheader")
_SIDE = 256  # of the matrices that are multiplied


@dataclasses.dataclass(frozen=True)
class Finding:
    """The result of a check in words, a remedy if something is wrong, and figures for programs."""

    found: str
    remedy: str = ""
    figures: dict[str, float] = dataclasses.field(default_factory=dict)

    @property
    def is_good(self) -> bool:
        return not self.remedy


Check = Callable[[], Finding]


def versions() -> Finding:
    """Python and packages; plugins of JAX are of its own version."""
    own = f"vit_jax {vit_jax.__version__}, Python {platform.python_version()}"
    found = ", ".join([own, *(f"{name} {importlib.metadata.version(name)}" for name in PACKAGES)])
    of_jax = {name: version for name, version in plugins().items() if name != "libtpu"}
    wrong = [
        f"{name} {version}" for name, version in of_jax.items() if version != jax.lib.__version__
    ]
    remedy = f"{', '.join(wrong)} is not of jaxlib {jax.lib.__version__}: pip install --upgrade 'jax[cuda]'"
    return Finding(found, remedy if wrong else "")


def driver(root: pathlib.Path = _ROOT) -> Finding:
    """The accelerators that the system shows, their driver, and whether JAX uses them.

    `root` is that of the file system.
    """
    installed = plugins()
    backend = jax.default_backend()
    chosen = os.environ.get("JAX_PLATFORMS", "")
    gpus = _gpus()
    if not gpus and not has_tpu(root):
        return Finding(f"neither GPU nor TPU; JAX computes on: {backend}")
    kind, extra = ("gpu", "cuda") if gpus else ("tpu", "tpu")
    found = f"NVIDIA {gpus[0][0]}, {len(gpus)} x {gpus[0][1]}" if gpus else "TPU"
    found += "".join(f", {name} {version}" for name, version in installed.items() if extra in name)
    if remedy := _too_old(gpus[0][0], installed) if gpus else "":
        return Finding(found, remedy)
    if backend == kind or chosen:
        return Finding(
            f"{found}; JAX computes on: {backend}{f' (JAX_PLATFORMS={chosen})' if chosen else ''}"
        )
    remedy = "another program may hold it, or the container cannot see it: end that, or give it the devices"
    if not any(extra in name for name in installed):
        remedy = f"{install_command(extra)}; then start again"
    return Finding(f"{found}; JAX computes on: {backend}", remedy)


def devices() -> Finding:
    """The devices as JAX counts them."""
    here = jax.local_devices()
    kinds = {device.device_kind for device in jax.devices()}
    found = (
        f"{jax.device_count()} x {' and '.join(sorted(kinds))} in {jax.process_count()} process(es)"
    )
    remedy = (
        ""
        if len(kinds) == 1
        else "use machines of one kind: a step is as slow as its slowest device"
    )
    return Finding(f"{found}, {len(here)} of each", remedy)


def memory(root: pathlib.Path = _ROOT) -> Finding:
    """Memory of the host that is free to this process, and that of a device.

    `root` is that of the file system.
    """
    total, free = _host_memory(root)
    found = f"{free / GIB:.1f} of {total / GIB:.1f} GiB free, {count_cores()} core(s)"
    statistics = jax.local_devices()[0].memory_stats() or {}
    if "bytes_limit" in statistics:
        found += f"; {statistics['bytes_limit'] / GIB:.1f} GiB on each device"
    remedy = f"end other programs, or ask for more: a run needs {LEAST_MEMORY_BYTES / GIB:.0f} GiB at least"
    return Finding(found, remedy if free < LEAST_MEMORY_BYTES else "")


def shared_memory() -> Finding:
    """Check shared memory, which workers and, within a host, NCCL use."""
    if not SHARED_MEMORY.is_dir():
        return Finding(f"there is no {SHARED_MEMORY}")
    free = shutil.disk_usage(SHARED_MEMORY).free
    remedy = (
        "docker run --shm-size=8g; in Kubernetes an emptyDir with medium: Memory, mounted there"
    )
    found = f"{free / GIB:.2f} GiB free in {SHARED_MEMORY}"
    return Finding(found, remedy if free < LEAST_SHARED_BYTES else "")


def disk(workdir: pathlib.Path, needed_bytes: Callable[[], int] | None = None) -> Finding:
    """Room for checkpoints, of which a run keeps `needed_bytes` at once; the folder need not exist yet."""
    needed = needed_bytes() if needed_bytes else LEAST_DISK_BYTES
    place = next(folder for folder in (workdir, *workdir.parents) if folder.exists())
    free = shutil.disk_usage(place).free
    found = f"{free / GIB:,.1f} GiB free in {workdir}, checkpoints take {needed / GIB:,.2g}"
    return Finding(found, "make room, or choose another workdir" if free < needed else "")


def compilation() -> Finding:
    """Compile a product of matrices whose result is known, and run it on every device of this process."""
    began = time.perf_counter()
    ones = np.ones((_SIDE, _SIDE), np.float32)
    wrong = [
        str(device)
        for device in jax.local_devices()
        if not bool((_product(jax.device_put(ones, device)) == _SIDE).all())
    ]
    remedy = (
        f"{', '.join(wrong)}: a wrong result. Leave this machine out, and have it repaired"
        if wrong
        else ""
    )
    found = f"a product of matrices on each device in {time.perf_counter() - began:.1f} s"
    return Finding(found, remedy)


@jax.jit
def _product(matrix: jax.Array) -> jax.Array:
    return jnp.matmul(matrix, matrix)


def _gpus() -> list[tuple[str, str]]:
    """Driver and name of each GPU that the driver shows."""
    try:
        answer = subprocess.run(
            _QUERY, capture_output=True, text=True, timeout=60, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    pairs = (line.partition(", ") for line in answer.splitlines() if ", " in line)
    return [(version, name) for version, _, name in pairs]


def _too_old(version: str, installed: dict[str, str]) -> str:
    """Return a remedy if the driver is too old for the CUDA release of JAX's plugin."""
    for release, least in LEAST_DRIVERS.items():
        number = version.partition(".")[0]
        if f"jax-cuda{release}-plugin" in installed and number.isdecimal() and int(number) < least:
            return f"JAX for CUDA {release} needs driver {least} or newer: update it, or ask who runs the machine to"
    return ""


def _host_memory(root: pathlib.Path) -> tuple[int, int]:
    """Total and free bytes, within the limit of the container."""
    text = (root / "proc/meminfo").read_text()
    total, free = (
        int(re.findall(rf"{name}:\s+(\d+) kB", text)[0]) * 1024
        for name in ("MemTotal", "MemAvailable")
    )
    group = root / "sys/fs/cgroup"
    try:
        limit, used = (int((group / f"memory.{name}").read_text()) for name in ("max", "current"))
    except (OSError, ValueError):  # another system, or "max": there is no limit
        return total, free
    return min(total, limit), min(free, limit - used)
