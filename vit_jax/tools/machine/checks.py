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
from vit_jax.imports.requirements import find_other_distribution, list_unmet_requirements
from vit_jax.train.overview import PACKAGES

GIB = 2**30
LEAST_MEMORY_BYTES = 2 * GIB  # Python, JAX and a few batches of images
# Containers get 64 MiB, too little for NCCL and for workers that decode images
LEAST_SHARED_BYTES = GIB / 2
# A checkpoint of ViT-B/16 with Adam's moments, for a run without a known recipe
LEAST_DISK_BYTES = GIB
LEAST_DRIVERS = {"12": 525, "13": 580}  # by CUDA release; JAX's installation page
_ROOT = pathlib.Path("/")
_QUERY = ("nvidia-smi", "--query-gpu=driver_version,name", "--format=csv,noheader")
_SIDE = 256  # side of the matrices of the test program


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


def check_versions() -> Finding:
    """Python and packages, which must meet the requirements and fit together."""
    versions = [f"vit_jax {vit_jax.__version__}", f"Python {platform.python_version()}"]
    for name in PACKAGES:
        versions.append(f"{name} {importlib.metadata.version(name)}")
    found = ", ".join(versions)

    remedies = list_unmet_requirements()
    other_distribution = find_other_distribution()
    if other_distribution:
        remedies.append(other_distribution)
    plugins_remedy = _compare_plugins()
    if plugins_remedy:
        remedies.append(plugins_remedy)
    return Finding(found, "; ".join(remedies))


def _compare_plugins() -> str:
    """Return a remedy for plugins of JAX that are of another version than jaxlib, or ""."""
    jaxlib_version = jax.lib.__version__
    wrong = []
    for name, version in plugins().items():
        if name != "libtpu" and version != jaxlib_version:
            wrong.append(f"{name} {version}")
    if not wrong:
        return ""
    names = ", ".join(wrong)
    return f"{names} is not of jaxlib {jaxlib_version}: pip install --upgrade 'jax[cuda]'"


def check_driver(root: pathlib.Path = _ROOT) -> Finding:
    """The accelerators of the system, their driver, and whether JAX uses them.

    `root` is the root of the file system.
    """
    installed = plugins()
    gpus = _list_gpus()
    backend = f"JAX computes on: {jax.default_backend()}"
    if not gpus and not has_tpu(root):
        return Finding(f"neither GPU nor TPU; {backend}")

    if gpus:
        platform_name = "gpu"
        extra = "cuda"
        version, gpu_name = gpus[0]
        found = f"NVIDIA {version}, {len(gpus)} x {gpu_name}"
    else:
        platform_name = "tpu"
        extra = "tpu"
        version = ""
        found = "TPU"
    used_plugins = [f"{name} {version}" for name, version in installed.items() if extra in name]
    found = ", ".join([found, *used_plugins])

    remedy = _advise_on_driver(version, installed)
    if remedy:
        return Finding(found, remedy)
    selected = os.environ.get("JAX_PLATFORMS", "")
    if selected:
        return Finding(f"{found}; {backend} (JAX_PLATFORMS={selected})")
    if jax.default_backend() == platform_name:
        return Finding(f"{found}; {backend}")
    if not used_plugins:
        return Finding(f"{found}; {backend}", f"{install_command(extra)}; then repeat the command")
    return Finding(
        f"{found}; {backend}",
        "another program may hold it, or the container cannot see it: "
        "end that, or give it the devices",
    )


def check_devices() -> Finding:
    """The devices as JAX counts them."""
    kinds = sorted({device.device_kind for device in jax.devices()})
    found = (
        f"{jax.device_count()} x {' and '.join(kinds)} in {jax.process_count()} process(es), "
        f"{jax.local_device_count()} of each"
    )
    if len(kinds) == 1:
        return Finding(found)
    return Finding(found, "use machines of one kind: a step is as slow as its slowest device")


def check_memory(root: pathlib.Path = _ROOT) -> Finding:
    """Free memory of the host, and memory of a device.

    `root` is the root of the file system.
    """
    total, free = _read_host_memory(root)
    found = f"{free / GIB:.1f} of {total / GIB:.1f} GiB free, {count_cores()} core(s)"
    statistics = jax.local_devices()[0].memory_stats() or {}
    if "bytes_limit" in statistics:
        found += f"; {statistics['bytes_limit'] / GIB:.1f} GiB on each device"
    if free >= LEAST_MEMORY_BYTES:
        return Finding(found)
    least = f"{LEAST_MEMORY_BYTES / GIB:.0f} GiB"
    return Finding(found, f"end other programs, or ask for more: a run needs {least} at least")


def check_shared_memory() -> Finding:
    """Check shared memory, which workers and, within a host, NCCL use."""
    if not SHARED_MEMORY.is_dir():
        return Finding(f"there is no {SHARED_MEMORY}")
    free = shutil.disk_usage(SHARED_MEMORY).free
    found = f"{free / GIB:.2f} GiB free in {SHARED_MEMORY}"
    if free >= LEAST_SHARED_BYTES:
        return Finding(found)
    return Finding(
        found,
        "docker run --shm-size=8g; in Kubernetes an emptyDir with medium: Memory, mounted there",
    )


def check_disk(workdir: pathlib.Path, count_bytes: Callable[[], int] | None = None) -> Finding:
    """Free space for checkpoints in the workdir, which need not exist.

    `count_bytes` returns the size of all checkpoints that a run keeps at once; None without a
    recipe.
    """
    needed = count_bytes() if count_bytes is not None else LEAST_DISK_BYTES
    existing = workdir
    while not existing.exists():
        existing = existing.parent
    free = shutil.disk_usage(existing).free
    found = f"{free / GIB:,.1f} GiB free in {workdir}, checkpoints take {needed / GIB:,.2g}"
    if free >= needed:
        return Finding(found)
    return Finding(found, "make room, or choose another workdir")


def check_compilation() -> Finding:
    """Compile a product of matrices and compare the result of every device of this process."""
    began = time.perf_counter()
    ones = np.ones((_SIDE, _SIDE), np.float32)
    wrong = []
    for device in jax.local_devices():
        product = _multiply_by_itself(jax.device_put(ones, device))
        if not bool((product == _SIDE).all()):
            wrong.append(str(device))
    seconds = time.perf_counter() - began
    found = f"a product of matrices on each device in {seconds:.1f} s"
    if not wrong:
        return Finding(found)
    return Finding(
        found, f"{', '.join(wrong)}: a wrong result. Leave this machine out, and have it repaired"
    )


@jax.jit
def _multiply_by_itself(matrix: jax.Array) -> jax.Array:
    return jnp.matmul(matrix, matrix)


def _list_gpus() -> list[tuple[str, str]]:
    """Return driver and name of each GPU that nvidia-smi prints."""
    try:
        process = subprocess.run(
            _QUERY,
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return []
    gpus = []
    for line in process.stdout.splitlines():
        version, comma, name = line.partition(", ")
        if comma:
            gpus.append((version, name))
    return gpus


def _advise_on_driver(version: str, installed: dict[str, str]) -> str:
    """Return a remedy if the driver is too old for the CUDA release of JAX's plugin."""
    number = version.partition(".")[0]
    if not number.isdecimal():
        return ""
    for release, least in LEAST_DRIVERS.items():
        if f"jax-cuda{release}-plugin" in installed and int(number) < least:
            return (
                f"JAX for CUDA {release} needs driver {least} or newer: "
                "update it, or ask who runs the machine to"
            )
    return ""


def _read_host_memory(root: pathlib.Path) -> tuple[int, int]:
    """Return total and free bytes, within the limit of the container."""
    text = (root / "proc/meminfo").read_text()
    total = _read_kilobytes(text, "MemTotal") * 1024
    free = _read_kilobytes(text, "MemAvailable") * 1024
    group = root / "sys/fs/cgroup"
    try:
        limit = int((group / "memory.max").read_text())
        used = int((group / "memory.current").read_text())
    except (OSError, ValueError):  # another system, or "max": there is no limit
        return total, free
    return min(total, limit), min(free, limit - used)


def _read_kilobytes(text: str, name: str) -> int:
    return int(re.findall(rf"{name}:\s+(\d+) kB", text)[0])
