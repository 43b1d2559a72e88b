"""Joining the other processes of a run, with messages while it waits and an error at the time limit."""

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
from vit_jax.hosts.cluster import COORDINATOR, NUM_PROCESSES, PROCESS_ID, Place
from vit_jax.hosts.internals import running_in_cloud_tpu_vm

JOIN_SECONDS = "VIT_JAX_JOIN_SECONDS"
WORD_AFTER_SECONDS = 20
HEARTBEAT_SECONDS = 100  # of JAX, which would abort with a C++ stack: ours (`peers`) is faster
SHUTDOWN_SECONDS = 300


def find_place(
    environment: Mapping[str, str],
    *,
    has_tpu: bool,
    count_gpus: cluster.GpuCount,
    find_host: cluster.FindHost,
) -> Place | None:
    """Return the place of this process in its run; None if it is the only one.

    `has_tpu` says whether it computes on the TPUs of this host; `count_gpus` returns the number of
    GPUs it can use; `find_host` maps the name of a SLURM node to a name or address that can be
    reached.

    Raises:
      ValueError: variables are missing or contradict each other.
    """
    explicit = cluster.explicit_place(environment)
    names = (COORDINATOR, NUM_PROCESSES, PROCESS_ID)
    names_set = [name for name in names if name in environment]
    if (
        names_set == [NUM_PROCESSES] and environment[NUM_PROCESSES] == "1"
    ):  # alone, whatever else is set
        return None
    if explicit is None and names_set not in ([], [COORDINATOR]):
        missing = ", ".join(name for name in names if name not in environment)
        raise ValueError(
            f"{', '.join(names_set)} is set but {missing} is not: set all three, or none. Where SLURM, a JobSet, Open "
            f"MPI or a TPU pod gives the numbers, {COORDINATOR} alone replaces the address."
        )
    if explicit is None and has_tpu:
        return cluster.tpu_place(environment, join_seconds(environment))
    place = (
        cluster.open_mpi_place(environment)
        or slurm.slurm_place(environment, count_gpus, find_host)
        or cluster.jobset_place(environment)
    )
    if (
        explicit
        and place
        and (explicit.num_processes, explicit.process_id) != (place.num_processes, place.process_id)
    ):
        raise ValueError(
            f"{NUM_PROCESSES}={explicit.num_processes} and {PROCESS_ID}={explicit.process_id}, but {place.launcher} "
            f"says {place.num_processes} and {place.process_id}: unset {NUM_PROCESSES} and {PROCESS_ID}."
        )
    if explicit is None and place is None and names_set:
        raise ValueError(
            f"{COORDINATOR} is set, but nothing says how many processes there are and which this one is: set "
            f"{NUM_PROCESSES} and {PROCESS_ID}, or start the run by srun, mpirun or a JobSet."
        )
    return explicit or place


def find_own_place() -> Place | None:
    """`find_place` of this process; warns in a SLURM job whose tasks were not started.

    A process that uses other devices than the host's TPUs (`JAX_PLATFORMS`) is not part of their
    pod.
    """
    platforms = os.environ.get("JAX_PLATFORMS", "")
    has_tpu = running_in_cloud_tpu_vm and (not platforms or "tpu" in platforms)
    place = find_place(
        os.environ, has_tpu=has_tpu, count_gpus=slurm.count_nvidia_gpus, find_host=slurm.find_host
    )
    if place is None and (tasks := slurm.idle_tasks(os.environ)) > 1:
        print(
            f"vit-jax: job {os.environ['SLURM_JOB_ID']} has {tasks} tasks, but this is one process outside of srun: "
            "start it with srun to use them all.",
            file=sys.stderr,
        )
    return place


def join_seconds(environment: Mapping[str, str]) -> int:
    """Time limit of waiting for the others, `VIT_JAX_JOIN_SECONDS`."""
    return cluster.number({JOIN_SECONDS: "300"} | dict(environment), JOIN_SECONDS)


def join(place: Place, stay_seconds: float) -> subprocess.Popen | None:
    """Start `jax.distributed`; end the process with a message if the others do not join.

    Returns:
      In the first process, that of the coordination service; if the first is killed, it continues
      for `stay_seconds`.
    """
    timeout = join_seconds(os.environ)
    serving = threading.Event()
    with _patience(place, timeout, serving):
        service = start_service(place) if place.process_id == 0 else None
        serving.set()
        jax.distributed.initialize(
            place.coordinator,
            place.num_processes,
            place.process_id,
            place.local_device_ids,
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


def start_service(place: Place) -> subprocess.Popen | None:
    """Start the coordination service in its own process; None if this jaxlib has no such service.

    Raises:
      ValueError: its port is taken.
    """
    port = place.coordinator.rpartition(":")[2]
    address = os.environ.get("JAX_COORDINATOR_BIND_ADDRESS", f"[::]:{port}")
    program = pathlib.Path(__file__).with_name("coordinator.py")
    numbers = (place.num_processes, HEARTBEAT_SECONDS, SHUTDOWN_SECONDS)
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
    if word.startswith(
        ("ImportError", "ModuleNotFoundError", "AttributeError", "TypeError")
    ):  # an unknown jaxlib
        return None
    raise ValueError(
        f"The first process cannot listen on {address}: {word}. Choose another port in {COORDINATOR}."
    )


@contextlib.contextmanager
def _patience(place: Place, timeout: int, serving: threading.Event) -> Iterator[None]:
    """Print a message after a while of waiting, and end the process at the time limit."""
    is_done = threading.Event()

    def watch() -> None:
        who = f"vit-jax: process {place.process_id} of {place.num_processes} ({place.launcher})"
        if is_done.wait(min(WORD_AFTER_SECONDS, timeout)):
            return
        if timeout > WORD_AFTER_SECONDS:
            situation = _situation(place, serving.is_set())
            print(
                f"{who} {situation}; it waits for {timeout} s in all", file=sys.stderr, flush=True
            )
            if is_done.wait(timeout - WORD_AFTER_SECONDS):
                return
        print(
            f"{who} {_situation(place, serving.is_set())}. Not all processes came within {timeout} s: are they all "
            f"running, with the same number of processes, and can they reach {place.coordinator}? {JOIN_SECONDS} sets "
            "the limit.",
            file=sys.stderr,
            flush=True,
        )
        os._exit(exits.LOST)  # the main thread waits in C++ and cannot be interrupted

    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        is_done.set()


def _situation(place: Place, is_serving: bool) -> str:
    """Describe the other processes, as far as a waiting process knows them."""
    host, _, port = place.coordinator.rpartition(":")
    if place.process_id == 0 and is_serving:
        return "sees others missing"
    if place.process_id == 0:
        return f"waits for port {port}, which another program still holds"
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()
    except OSError as error:
        reason = error.strerror or error
        return f"found no process at {place.coordinator}, the address of process 0: {reason}"
    return f"has reached process 0 at {place.coordinator}; others are missing"
