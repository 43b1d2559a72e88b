"""Join the other processes of a run, with messages while waiting and an error at the time limit."""

import contextlib
import os
import pathlib
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping

import jax

from vit_jax.hosts import cluster, exits, slurm
from vit_jax.hosts.cluster import COORDINATOR, NUM_PROCESSES, PROCESS_ID, ProcessInfo
from vit_jax.hosts.internals import running_in_cloud_tpu_vm

JOIN_SECONDS = "VIT_JAX_JOIN_SECONDS"
WORD_AFTER_SECONDS = 20
HEARTBEAT_SECONDS = 100
"""Heartbeat of JAX, which would abort with a C++ stack; the peer monitor (`peers`) is faster."""
SHUTDOWN_SECONDS = 300
_VARIABLES = (COORDINATOR, NUM_PROCESSES, PROCESS_ID)
_UNKNOWN_JAXLIB = ("ImportError", "ModuleNotFoundError", "AttributeError", "TypeError")


def find_process(
    environment: Mapping[str, str],
    *,
    has_tpu: bool,
    count_gpus: cluster.GpuCount,
    find_host: cluster.FindHost,
) -> ProcessInfo | None:
    """Return the number of this process in its run, and of all; None if it is the only one.

    Args:
      environment: variables of the launcher.
      has_tpu: this process computes on the TPUs of this host.
      count_gpus: returns the number of GPUs that this process can use.
      find_host: returns a name or address of a SLURM node that can be reached.

    Raises:
      ValueError: variables are missing or contradict each other.
    """
    names_set = [name for name in _VARIABLES if name in environment]
    is_alone = names_set == [NUM_PROCESSES] and environment[NUM_PROCESSES] == "1"
    if is_alone:  # without regard to other variables
        return None
    explicit = cluster.read_explicit_process(environment)
    if explicit is None:
        _require_all_or_coordinator(names_set)
        if has_tpu:
            return cluster.find_tpu_process(environment, join_seconds(environment))

    launched = (
        cluster.read_open_mpi_process(environment)
        or slurm.read_slurm_process(environment, count_gpus, find_host)
        or cluster.read_jobset_process(environment)
    )
    if explicit is not None:
        _require_same_numbers(explicit, launched)
        return explicit
    if launched is None and names_set:
        raise ValueError(
            f"{COORDINATOR} is set, but nothing says how many processes there are and which this "
            f"one is: set {NUM_PROCESSES} and {PROCESS_ID}, "
            "or start the run by srun, mpirun or a JobSet."
        )
    return launched


def _require_all_or_coordinator(names_set: list[str]) -> None:
    """Raise ValueError if other variables than the address are set, but not all of them."""
    if names_set in ([], [COORDINATOR]):
        return
    missing = ", ".join(name for name in _VARIABLES if name not in names_set)
    raise ValueError(
        f"{', '.join(names_set)} is set but {missing} is not: set all three, or none. "
        "Where SLURM, a JobSet, Open MPI or a TPU pod gives the numbers, "
        f"{COORDINATOR} alone replaces the address."
    )


def _require_same_numbers(explicit: ProcessInfo, launched: ProcessInfo | None) -> None:
    """Raise ValueError if the launcher gives other numbers than our own variables."""
    if launched is None:
        return
    same_count = explicit.num_processes == launched.num_processes
    if same_count and explicit.process_id == launched.process_id:
        return
    raise ValueError(
        f"{NUM_PROCESSES}={explicit.num_processes} and {PROCESS_ID}={explicit.process_id}, but "
        f"{launched.launcher} says {launched.num_processes} and {launched.process_id}: "
        f"unset {NUM_PROCESSES} and {PROCESS_ID}."
    )


def find_this_process() -> ProcessInfo | None:
    """Return `find_process` of this process; warn in a SLURM job whose tasks were not started.

    A process that uses other devices than the host's TPUs (`JAX_PLATFORMS`) is not part of their
    pod.
    """
    platforms = os.environ.get("JAX_PLATFORMS", "")
    has_tpu = running_in_cloud_tpu_vm and (not platforms or "tpu" in platforms)
    process = find_process(
        os.environ,
        has_tpu=has_tpu,
        count_gpus=slurm.count_nvidia_gpus,
        find_host=slurm.find_host,
    )
    idle_tasks = slurm.count_idle_tasks(os.environ)
    if process is None and idle_tasks > 1:
        print(
            f"vit-jax: job {os.environ['SLURM_JOB_ID']} has {idle_tasks} tasks, but this is one "
            "process outside of srun: start it with srun to use them all.",
            file=sys.stderr,
        )
    return process


def join_seconds(environment: Mapping[str, str]) -> int:
    """Return the time limit of waiting for the others, `VIT_JAX_JOIN_SECONDS`."""
    return cluster.read_number({JOIN_SECONDS: "300"} | dict(environment), JOIN_SECONDS)


def join(process: ProcessInfo, stay_seconds: float) -> subprocess.Popen | None:
    """Start `jax.distributed`; end the process with a message if the others do not join.

    Returns:
      In the first process, the process of the coordination service. It continues for
      `stay_seconds` if the first process is killed.
    """
    timeout = join_seconds(os.environ)
    serving = threading.Event()
    with _limit_waiting(process, timeout, serving):
        service = None
        if process.process_id == 0:
            service = start_service(process)
        serving.set()
        jax.distributed.initialize(
            process.coordinator,
            process.num_processes,
            process.process_id,
            process.local_device_ids,
            cluster_detection_method="deactivate",  # it would use one GPU a process
            initialization_timeout=timeout + 60,  # JAX would abort; we end before
            heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
            shutdown_timeout_seconds=SHUTDOWN_SECONDS,
            # JAX insists on a service in the first process: this one is not used.
            coordinator_bind_address="127.0.0.1:0" if service else None,
        )
    if service:
        tell_service(service, stay_seconds)
    return service


def tell_service(service: subprocess.Popen, stay_seconds: float) -> None:
    """Set how long the coordination service continues after the end of the first process."""
    assert service.stdin is not None
    with contextlib.suppress(OSError):
        service.stdin.write(f"{stay_seconds}\n")
        service.stdin.flush()


def start_service(process: ProcessInfo) -> subprocess.Popen | None:
    """Start the coordination service in its own process; None if this jaxlib has no such service.

    Raises:
      ValueError: its port is taken.
    """
    port = process.coordinator.rpartition(":")[2]
    address = os.environ.get("JAX_COORDINATOR_BIND_ADDRESS", f"[::]:{port}")
    program = pathlib.Path(__file__).with_name("coordinator.py")
    numbers = (process.num_processes, HEARTBEAT_SECONDS, SHUTDOWN_SECONDS)
    service = subprocess.Popen(
        [sys.executable, "-P", str(program), address, *map(str, numbers)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    assert service.stdout is not None
    with service.stdout:
        word = service.stdout.readline().strip()
    if word == "ready":
        return service

    service.communicate()
    if word.startswith(_UNKNOWN_JAXLIB):
        return None
    raise ValueError(
        f"The first process cannot listen on {address}: {word}. "
        f"Choose another port in {COORDINATOR}."
    )


@contextlib.contextmanager
def _limit_waiting(process: ProcessInfo, timeout: int, serving: threading.Event) -> Iterator[None]:
    """Print a message after a while of waiting, and end the process at the time limit.

    `serving` is set once the coordination service of the first process runs.
    """
    is_done = threading.Event()

    def watch() -> None:
        if is_done.wait(min(WORD_AFTER_SECONDS, timeout)):
            return
        if timeout > WORD_AFTER_SECONDS:
            situation = _describe_waiting(process, serving.is_set())
            _print_now(f"{situation}; it waits for {timeout} s in all")
            if is_done.wait(timeout - WORD_AFTER_SECONDS):
                return
        _print_now(
            f"{_describe_waiting(process, serving.is_set())}. Not all processes came within "
            f"{timeout} s: are they all running, with the same number of processes, and can they "
            f"reach {process.coordinator}? {JOIN_SECONDS} sets the limit."
        )
        os._exit(exits.LOST)  # the main thread waits in C++ and cannot be interrupted

    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        is_done.set()


def _print_now(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def _describe_waiting(process: ProcessInfo, is_serving: bool) -> str:
    """Return the state of the other processes, as far as a waiting process knows it."""
    number = f"{process.process_id} of {process.num_processes}"
    return f"vit-jax: process {number} ({process.launcher}) {_probe_others(process, is_serving)}"


def _probe_others(process: ProcessInfo, is_serving: bool) -> str:
    host, _, port = process.coordinator.rpartition(":")
    if process.process_id == 0 and is_serving:
        return "sees others missing"
    if process.process_id == 0:
        return f"waits for port {port}, which another program still holds"
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()
    except OSError as error:
        reason = error.strerror or error
        return f"found no process at {process.coordinator}, the address of process 0: {reason}"
    return f"has reached process 0 at {process.coordinator}; others are missing"
