"""How many threads and processes prepare batches, and how the processes start and end.

Worker processes use no device, ignore Ctrl-C, and end when the run that started them has ended, for any reason.
"""

import multiprocessing
import os
import signal
import sys
import threading
import time
from typing import NamedTuple

MANY_CORES = 8  # above it, one Python process is too few to keep the cores busy
CORES_PER_WORKER = 6
BATCHES_PER_WORKER = 3  # in shared memory: one being filled, one waiting, one in use
PARENT_POLL_SECONDS = 0.5


class Parallelism(NamedTuple):
    """Attributes are counts: processes (0: none beside the main one), and threads in each process."""

    num_workers: int
    num_threads: int


def choose_parallelism(
    num_workers: int | None = None, num_threads: int | None = None, *, batch_bytes: int, shared_memory: str = "/dev/shm"
) -> Parallelism:
    """The numbers given, and in the place of None a choice by the cores of this process.

    Raises:
      ValueError: `shared_memory`, where it exists, is too small for the workers' batches, of `batch_bytes` each.
    """
    cores = available_cores()
    if num_workers is None:
        num_workers = cores // CORES_PER_WORKER if cores > MANY_CORES else 0
    if num_workers:
        _require_shared_memory(num_workers * BATCHES_PER_WORKER * batch_bytes, num_workers, shared_memory)
    # Beyond these numbers Python's lock is the limit.
    threads = min(max(cores // num_workers, 1), CORES_PER_WORKER) if num_workers else min(cores, MANY_CORES)
    return Parallelism(num_workers, num_threads or threads)


def available_cores() -> int:
    """Cores that this process may use; taskset and many schedulers grant fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def initialize_worker(worker_index: int, worker_count: int) -> None:
    """Sets up a worker; called by grain in the new process."""
    for number in (signal.SIGINT, signal.SIGTERM):  # the main process receives them too, saves, closes the workers
        signal.signal(number, signal.SIG_IGN)
    os.environ["JAX_PLATFORMS"] = "cpu"
    if "jax" in sys.modules:  # grain imports it where it is installed; the variable alone would come too late
        sys.modules["jax"].config.update("jax_platforms", "cpu")
    threading.Thread(target=_end_with_parent, name="end_with_parent", daemon=True).start()


def _end_with_parent() -> None:
    # Not PR_SET_PDEATHSIG: it fires when the *thread* that started this process ends, and grain uses one.
    parent = multiprocessing.parent_process()
    while parent is not None and os.getppid() == parent.pid:
        time.sleep(PARENT_POLL_SECONDS)
    if parent is not None:
        os._exit(1)


def _require_shared_memory(needed_bytes: int, workers: int, path: str) -> None:
    if not os.path.isdir(path):
        return
    status = os.statvfs(path)
    free_bytes = status.f_bavail * status.f_frsize
    if free_bytes < needed_bytes:
        raise ValueError(
            f"{workers} data workers need about {needed_bytes / 2**20:.0f} MiB of shared memory in {path}, which has "
            f"{free_bytes / 2**20:.0f} MiB free. Start the container with --shm-size={needed_bytes * 2 // 2**20 + 1}m, "
            "or set config.input.num_workers=0 to use threads only."
        )
