"""Threads and processes that prepare batches: their numbers, and start and end of the processes.

Worker processes use no device, ignore Ctrl-C, and end when the run that started them has ended, for
any reason. If all are killed at once, the next run removes their shared memory.
"""

import concurrent.futures
import contextlib
import fcntl
import functools
import multiprocessing
import os
import pathlib
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from multiprocessing import resource_tracker, shared_memory, util
from typing import NamedTuple, TypeVar

from vit_jax.imports.backend import forbid_cuda
from vit_jax.storage.files import clean_up_at_once

T = TypeVar("T")
R = TypeVar("R")

MANY_CORES = 8
"""With more cores, one Python process is too few to keep them busy."""
CORES_PER_WORKER = 6
BATCHES_PER_WORKER = 3
"""Batches in shared memory: one is being filled, one waits, one is in use."""
PARENT_POLL_SECONDS = 0.5
SHARED_MEMORY = pathlib.Path("/dev/shm")
# Private names of grain 0.2.18 and of Python 3.11; `test_private_names` fails if they move.
_STARTER = "_prefetch_ds_iter"
"""An attribute of grain's iterator over batches of worker processes."""
_LOST_WORKER = "terminated unexpectedly"
"""Words in the message of grain's error."""
_SEGMENT_PREFIX = "_SHM_NAME_PREFIX"
"""A name of multiprocessing.shared_memory."""
_FIRST_OF_PROCESSES = "_config"
"""An attribute of a process, with the values that the processes it starts get first."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
"""Signals that the main process receives, too: it saves and closes the workers."""


class _NoCuda:
    """Forbids the CUDA plugin in the process that unpickles it: no worker uses a device."""

    def __reduce__(self) -> tuple[object, ...]:
        return forbid_cuda, ()


class Parallelism(NamedTuple):
    """Number of processes beside the main one, and of threads in each process."""

    num_workers: int
    num_threads: int


def choose_parallelism(
    num_workers: int | None = None,
    num_threads: int | None = None,
    *,
    batch_bytes: int,
    folder: pathlib.Path = SHARED_MEMORY,
) -> Parallelism:
    """Return the numbers; None is replaced by a choice for the cores of this process.

    Raises:
      ValueError: the folder of shared memory exists and is too small for the workers' batches of
        `batch_bytes`.
    """
    cores = count_cores()
    if num_workers is None:
        num_workers = 0
        if cores > MANY_CORES:
            num_workers = cores // CORES_PER_WORKER
    if num_workers:
        _require_shared_memory(num_workers * BATCHES_PER_WORKER * batch_bytes, num_workers, folder)

    # With more threads Python's lock is the limit.
    if num_threads is None and num_workers:
        num_threads = min(max(cores // num_workers, 1), CORES_PER_WORKER)
    elif num_threads is None:
        num_threads = min(cores, MANY_CORES)
    return Parallelism(num_workers, num_threads)


def count_cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def map_in_threads(
    function: Callable[[T], R],
    items: Iterable[T],
    num_threads: int | None = None,
) -> Iterator[R]:
    """Yield the results of a function in order, computed by threads, by default one for each core.

    After an error or Ctrl-C, calls that have begun are completed, and no other begins.
    """
    threads = concurrent.futures.ThreadPoolExecutor(num_threads or count_cores())
    try:
        yield from threads.map(function, items)
    finally:
        threads.shutdown(cancel_futures=True)


def start_workers(batches: object) -> None:
    """Start the workers, if any, of grain's iterator, with signals blocked until they ignore them.

    They and Python's resource tracker import nothing from the working directory, which may be
    somebody else's folder. Python's path of this process is passed on to the workers, so that they
    find its modules.
    """
    starter = getattr(batches, _STARTER, None)
    if starter is None:
        return
    _get_first_values()["no_cuda"] = _NoCuda()  # read before grain, which imports JAX
    # Multiprocessing starts `python -c`, whose path begins with the working directory.
    os.environ["PYTHONSAFEPATH"] = "1"
    _start_tracker()  # it lets the signals through again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        # Grain starts a worker in a thread of a thread; all of them and the worker inherit the
        # blocked signals.
        starter.start_prefetch()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _start_tracker() -> None:
    """Start Python's resource tracker, which then removes leaked semaphores without a warning.

    It is a process that reads its filters of warnings from the environment.
    """
    before = os.environ.get("PYTHONWARNINGS")
    os.environ["PYTHONWARNINGS"] = ",".join(filter(None, [before, "ignore:resource_tracker"]))
    try:
        resource_tracker.ensure_running()
    finally:
        if before is None:
            del os.environ["PYTHONWARNINGS"]
        else:
            os.environ["PYTHONWARNINGS"] = before


def is_lost_worker(error: Exception) -> bool:
    """Return True for grain's errors after the end of a worker process."""
    return isinstance(error, StopIteration) or _LOST_WORKER in str(error)


def initialize_worker(prefix: str | None, worker_index: int, worker_count: int) -> None:
    """Set up a worker in its new process; its segments of shared memory get this prefix."""
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    if prefix is not None:
        setattr(shared_memory, _SEGMENT_PREFIX, prefix)
    os.environ["JAX_PLATFORMS"] = "cpu"
    if "jax" in sys.modules:
        # Grain imports JAX where it is installed; the variable alone would come too late.
        sys.modules["jax"].config.update("jax_platforms", "cpu")
    threading.Thread(target=_end_with_parent, name="end_with_parent", daemon=True).start()


def _end_with_parent() -> None:
    # Not PR_SET_PDEATHSIG: it fires when the *thread* that started this process ends, and grain
    # uses one.
    parent = multiprocessing.parent_process()
    while parent is not None and os.getppid() == parent.pid:
        time.sleep(PARENT_POLL_SECONDS)
    if parent is not None:
        os._exit(1)


def build_segment_prefix() -> str | None:
    """Return the prefix of this process's segments of shared memory; None where they are not files.

    Semaphores that it creates afterwards have the same start and "-".
    """
    if not SHARED_MEMORY.is_dir():
        return None
    return f"/vj{_name_living_run()}_"


@functools.cache
def _name_living_run() -> str:
    """Return digits of this process, in the name of a file that is locked until its end."""
    digits = secrets.token_hex(3)[:5]
    path = SHARED_MEMORY / f"vit_jax-{digits}.lock"
    new = path.with_suffix(".new")
    descriptor = os.open(new, os.O_CREAT | os.O_EXCL | os.O_RDWR)  # the system closes it
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    new.rename(path)  # other processes see the file once it is locked
    # With this priority, it runs after the finalizers of the workers.
    util.Finalize(None, _end_run, (path,), exitpriority=-1)
    _get_first_values()["semprefix"] = f"/vj{digits}"
    clean_up_at_once(functools.partial(_end_run, path))
    return digits


def _get_first_values() -> dict[str, object]:
    """Return the values that every process that Python's multiprocessing starts gets first."""
    config: dict[str, object] = getattr(multiprocessing.current_process(), _FIRST_OF_PROCESSES)
    return config


def _find_segments(lock: pathlib.Path) -> list[pathlib.Path]:
    return list(lock.parent.glob(f"vj{lock.stem[-5:]}_*"))


def _end_run(lock: pathlib.Path) -> None:
    """Remove segments in grain's cycles of references; multiprocessing would warn of a leak."""
    for segment in _find_segments(lock):
        try:
            shared_memory.SharedMemory(segment.name).unlink()
        except (FileNotFoundError, ValueError):
            # A worker has removed the segment, or was killed before it had a size.
            segment.unlink(missing_ok=True)
    lock.unlink(missing_ok=True)


def reclaim(folder: pathlib.Path = SHARED_MEMORY) -> None:
    """Remove segments and semaphores of processes that were killed.

    The system has released their locks, in any container.
    """
    for path in folder.glob(f"vit_jax-{'[0-9a-f]' * 5}.lock"):
        # An error means that a living process has the lock, or that the file is another user's.
        with contextlib.suppress(OSError), path.open() as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            semaphores = folder.glob(f"sem.vj{path.stem[-5:]}-*")
            for remnant in (*_find_segments(path), *semaphores):
                remnant.unlink(missing_ok=True)
            path.unlink()


def _require_shared_memory(needed_bytes: int, workers: int, folder: pathlib.Path) -> None:
    if not folder.is_dir():
        return
    reclaim(folder)
    status = os.statvfs(folder)
    free_bytes = status.f_bavail * status.f_frsize
    if free_bytes >= needed_bytes:
        return

    advised_mebibytes = needed_bytes * 2 // 2**20 + 1
    raise ValueError(
        f"{workers} data workers need about {needed_bytes / 2**20:.0f} MiB of shared memory in "
        f"{folder}, which has {free_bytes / 2**20:.0f} MiB free. Start the container with "
        f"--shm-size={advised_mebibytes}m, or set config.input.num_workers=0 to use threads only.",
    )
