"""The number of processes of a run and the number of this one, from the variables of launchers.

`slurm` reads the variables of SLURM.

Functions raise ValueError for variables that are missing, are not valid, or contradict each other.
"""

import dataclasses
import re
import zlib
from collections.abc import Callable, Mapping
from typing import Any

Environment = Mapping[str, str]
GpuCount = Callable[[], int]
FindHost = Callable[[str], str]
COORDINATOR = "VIT_JAX_COORDINATOR"
NUM_PROCESSES = "VIT_JAX_NUM_PROCESSES"
PROCESS_ID = "VIT_JAX_PROCESS_ID"
FIRST_PORT = 61440
NUM_PORTS = 4096
"""Linux gives lower ports than these to outgoing connections."""
JOBSET_PORT = 8476
_JOBSET_VARIABLES = (
    "REPLICATED_JOB_NAME",
    "JOB_INDEX",
    "JOB_COMPLETION_INDEX",
    "PROCESSES_IN_JOB",
    "NUM_JOBS",
)


@dataclasses.dataclass(frozen=True)
class ProcessInfo:
    """A process in its run.

    Attributes:
      launcher: name of the program that started it, for messages.
      coordinator: host:port of the first process.
      num_processes: number of processes of the run.
      process_id: number of this process.
      local_device_ids: numbers of the visible GPUs that it uses; None: all.
    """

    launcher: str
    coordinator: str
    num_processes: int
    process_id: int
    local_device_ids: tuple[int, ...] | None = None


def read_explicit_process(environment: Environment) -> ProcessInfo | None:
    """Return the process by the variables of vit_jax; None if not all three are set."""
    if not {COORDINATOR, NUM_PROCESSES, PROCESS_ID} <= environment.keys():
        return None
    process_id, num_processes = read_index_and_count(environment, PROCESS_ID, NUM_PROCESSES)
    coordinator = read_coordinator(environment) or ""
    return ProcessInfo("explicit address", coordinator, num_processes, process_id)


def read_coordinator(environment: Environment) -> str | None:
    """Return `VIT_JAX_COORDINATOR` (host:port), which may replace the address of a cluster."""
    address = environment.get(COORDINATOR)
    if address is not None and not re.fullmatch(r".+:\d+", address):
        raise ValueError(
            f"{COORDINATOR}={address}: give the first process's host and a free port there, "
            "as host:port."
        )
    return address


def read_open_mpi_process(environment: Environment) -> ProcessInfo | None:
    """Return the process that mpirun started.

    JAX's own detection would need mpi4py and use one GPU a process.
    """
    size = "OMPI_COMM_WORLD_SIZE"
    rank = "OMPI_COMM_WORLD_RANK"
    if size not in environment or read_number(environment, size) == 1:
        return None
    process_id, num_processes = read_index_and_count(environment, rank, size)
    coordinator = read_coordinator(environment)
    if not coordinator:
        coordinator = _find_open_mpi_coordinator(environment, num_processes)
    return ProcessInfo("Open MPI", coordinator, num_processes, process_id)


def _find_open_mpi_coordinator(environment: Environment, size: int) -> str:
    """Return the address of mpirun, whose host is rank 0's by default."""
    uri = environment.get("OMPI_MCA_orte_hnp_uri", "")
    namespace = environment.get("PMIX_NAMESPACE", "")
    port = FIRST_PORT + zlib.crc32((uri or namespace).encode()) % NUM_PORTS
    if environment.get("OMPI_COMM_WORLD_LOCAL_SIZE") == str(size):
        return f"127.0.0.1:{port}"
    if match := re.search(r"tcp://([^,:;]+)", uri):  # up to Open MPI 4
        return f"{match[1]}:{port}"
    if match := re.search(r"tcp6://\[([^],]+)", uri):
        return f"[{match[1]}]:{port}"
    if match := re.fullmatch(r"prterun-(.+)-\d+@\d+", namespace):  # from Open MPI 5 on
        return f"{match[1]}:{port}"
    raise ValueError(
        f"Open MPI started {size} processes on several hosts, and OMPI_MCA_orte_hnp_uri and "
        "PMIX_NAMESPACE do not say where the first is: "
        f"set {COORDINATOR}=host:port for all of them (mpirun -x {COORDINATOR})."
    )


def read_jobset_process(environment: Environment) -> ProcessInfo | None:
    """Return the process of a pod of a Kubernetes JobSet.

    `launch/gke_jobset.yaml` sets the variables. JAX would query the cluster's API, which needs a
    package and a permission.
    """
    if "JOBSET_NAME" not in environment:
        return None
    missing = [name for name in _JOBSET_VARIABLES if name not in environment]
    if missing:
        raise ValueError(
            f"JOBSET_NAME is set but {', '.join(missing)} is not: "
            "set all of them in the pod's template."
        )
    job_index, num_jobs = read_index_and_count(environment, "JOB_INDEX", "NUM_JOBS")
    index, processes_in_job = read_index_and_count(
        environment, "JOB_COMPLETION_INDEX", "PROCESSES_IN_JOB"
    )
    num_processes = processes_in_job * num_jobs
    process_id = job_index * processes_in_job + index
    if num_processes == 1:
        return None
    coordinator = read_coordinator(environment)
    if not coordinator:
        jobset = environment["JOBSET_NAME"]
        job = environment["REPLICATED_JOB_NAME"]
        coordinator = f"{jobset}-{job}-0-0.{jobset}:{JOBSET_PORT}"
    return ProcessInfo("Kubernetes JobSet", coordinator, num_processes, process_id)


def find_tpu_process(environment: Environment, timeout_seconds: int) -> ProcessInfo | None:
    """Return the process of a host of a TPU pod, one slice or several; None for a TPU of one host.

    JAX's own detection queries the metadata server of Compute Engine, or reads GKE's variables.

    Raises:
      ValueError: the metadata server does not respond.
    """
    try:
        cluster = _find_tpu_cluster()
        if cluster is None or cluster.get_process_count() == 1:
            return None
        coordinator = read_coordinator(environment)
        if not coordinator:
            port = environment.get("JAX_COORDINATOR_PORT")
            coordinator = cluster.get_coordinator_address(timeout_seconds, port)
        num_processes = cluster.get_process_count()
        return ProcessInfo("TPU pod", coordinator, num_processes, cluster.get_process_id())
    except (OSError, RuntimeError) as error:  # errors of the package requests are OSErrors
        raise ValueError(
            f"This host has TPUs, but the hosts that share them are unknown: {error}. "
            f"Set {COORDINATOR}, {NUM_PROCESSES} and {PROCESS_ID}; "
            f"for a run on this host alone, {NUM_PROCESSES}=1 is enough."
        ) from error


def _find_tpu_cluster() -> Any:
    """Return JAX's class of the cluster that this host belongs to, or None."""
    from vit_jax.hosts.internals import clusters

    for kind in (clusters.GkeTpuCluster, clusters.GceTpuCluster):
        if kind.is_env_present():
            return kind
    return None


def read_number(environment: Environment, name: str) -> int:
    """Return a variable as a number from 0."""
    text = environment.get(name)
    if text is None:
        raise ValueError(f"{name} is not set: a number from 0 is expected.")
    if not text.isdecimal():
        raise ValueError(f"{name} is {text!r}: a number from 0 is expected.")
    return int(text)


def read_index_and_count(environment: Environment, index: str, count: str) -> tuple[int, int]:
    """Return two variables: an index from 0, and the count."""
    this = read_number(environment, index)
    total = read_number(environment, count)
    if this >= total:
        raise ValueError(
            f"{index}={this} and {count}={total}: the first counts from 0 and must be below the "
            "second. Were these variables exported from another job?"
        )
    return this, total
