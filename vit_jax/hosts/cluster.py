"""The processes of a run, and the number of this one, from the variables that launchers set.

SLURM's are in `slurm`.

Functions raise ValueError for variables that are missing, are not valid, or contradict each other.
"""

import dataclasses
import re
import zlib
from collections.abc import Callable, Mapping

Environment = Mapping[str, str]
GpuCount = Callable[[], int]
FindHost = Callable[[str], str]
COORDINATOR = "VIT_JAX_COORDINATOR"
NUM_PROCESSES = "VIT_JAX_NUM_PROCESSES"
PROCESS_ID = "VIT_JAX_PROCESS_ID"
FIRST_PORT = 61440
NUM_PORTS = 4096  # above those that Linux gives to outgoing connections
JOBSET_PORT = 8476


@dataclasses.dataclass(frozen=True)
class Place:
    """A process in its run."""

    launcher: str  # for messages
    coordinator: str  # host:port of the first process
    num_processes: int
    process_id: int
    local_device_ids: tuple[int, ...] | None = None  # of the visible GPUs, those it uses; None: all


def explicit_place(environment: Environment) -> Place | None:
    """Return the place given by our own three variables; None if not all of them are set."""
    if any(name not in environment for name in (COORDINATOR, NUM_PROCESSES, PROCESS_ID)):
        return None
    process_id, num_processes = index_and_count(environment, PROCESS_ID, NUM_PROCESSES)
    return Place(
        "explicit address", given_coordinator(environment) or "", num_processes, process_id
    )


def given_coordinator(environment: Environment) -> str | None:
    """Return `VIT_JAX_COORDINATOR` (host:port), which may also replace the address that a cluster gives."""
    address = environment.get(COORDINATOR)
    if address is not None and not re.fullmatch(r".+:\d+", address):
        raise ValueError(
            f"{COORDINATOR}={address}: give the first process's host and a free port there, as host:port."
        )
    return address


def open_mpi_place(environment: Environment) -> Place | None:
    """Return the place of a process that mpirun started; JAX would need mpi4py and use one GPU a process."""
    size = "OMPI_COMM_WORLD_SIZE"
    rank = "OMPI_COMM_WORLD_RANK"
    if size not in environment or number(environment, size) == 1:
        return None
    process_id, num_processes = index_and_count(environment, rank, size)
    coordinator = given_coordinator(environment) or _open_mpi_coordinator(
        environment, num_processes
    )
    return Place("Open MPI", coordinator, num_processes, process_id)


def _open_mpi_coordinator(environment: Environment, size: int) -> str:
    """The host of mpirun, which is rank 0's by default."""
    uri = environment.get("OMPI_MCA_orte_hnp_uri", "")
    namespace = environment.get("PMIX_NAMESPACE", "")
    port = FIRST_PORT + zlib.crc32((uri or namespace).encode()) % NUM_PORTS
    if environment.get("OMPI_COMM_WORLD_LOCAL_SIZE") == str(size):
        return f"127.0.0.1:{port}"
    if match := re.search(r"tcp://([^,:;]+)|tcp6://\[([^],]+)", uri):  # up to Open MPI 4
        return f"{match[1] or f'[{match[2]}]'}:{port}"
    if match := re.fullmatch(r"prterun-(.+)-\d+@\d+", namespace):  # from Open MPI 5 on
        return f"{match[1]}:{port}"
    raise ValueError(
        f"Open MPI started {size} processes on several hosts, and OMPI_MCA_orte_hnp_uri and PMIX_NAMESPACE do not say "
        f"where the first is: set {COORDINATOR}=host:port for all of them (mpirun -x {COORDINATOR})."
    )


def jobset_place(environment: Environment) -> Place | None:
    """Pods of a Kubernetes JobSet, from the variables that `launch/gke_jobset.yaml` sets.

    JAX would query the cluster's API, which needs a package and a permission.
    """
    names = (
        "REPLICATED_JOB_NAME",
        "JOB_INDEX",
        "JOB_COMPLETION_INDEX",
        "PROCESSES_IN_JOB",
        "NUM_JOBS",
    )
    if "JOBSET_NAME" not in environment:
        return None
    if missing := [name for name in names if name not in environment]:
        raise ValueError(
            f"JOBSET_NAME is set but {', '.join(missing)} is not: set all of them in the pod's template."
        )
    job_index, num_jobs = index_and_count(environment, "JOB_INDEX", "NUM_JOBS")
    index, processes_in_job = index_and_count(
        environment, "JOB_COMPLETION_INDEX", "PROCESSES_IN_JOB"
    )
    num_processes = processes_in_job * num_jobs
    process_id = job_index * processes_in_job + index
    if num_processes == 1:
        return None
    jobset = environment["JOBSET_NAME"]
    job = environment["REPLICATED_JOB_NAME"]
    coordinator = given_coordinator(environment) or f"{jobset}-{job}-0-0.{jobset}:{JOBSET_PORT}"
    return Place("Kubernetes JobSet", coordinator, num_processes, process_id)


def tpu_place(environment: Environment, timeout_seconds: int) -> Place | None:
    """Hosts of a TPU pod, one slice or several, on Compute Engine or GKE; None for a TPU of one host.

    JAX's own detection queries the metadata server, or reads GKE's variables.

    Raises:
      ValueError: the metadata server does not respond.
    """
    from vit_jax.hosts.internals import clusters

    try:
        kinds = (clusters.GkeTpuCluster, clusters.GceTpuCluster)
        cluster = next((kind for kind in kinds if kind.is_env_present()), None)
        if cluster is None or cluster.get_process_count() == 1:
            return None
        port = environment.get("JAX_COORDINATOR_PORT")
        coordinator = given_coordinator(environment) or cluster.get_coordinator_address(
            timeout_seconds, port
        )
        return Place("TPU pod", coordinator, cluster.get_process_count(), cluster.get_process_id())
    except (OSError, RuntimeError) as error:  # those of requests are OSErrors
        raise ValueError(
            f"This host has TPUs, but the hosts that share them are unknown: {error}. Set {COORDINATOR}, "
            f"{NUM_PROCESSES} and {PROCESS_ID}; for a run on this host alone, {NUM_PROCESSES}=1 is enough."
        ) from error


def number(environment: Environment, name: str) -> int:
    """Return a variable as a number from 0."""
    text = environment.get(name)
    if text is None or not text.isdecimal():
        raise ValueError(
            f"{name} is {'not set' if text is None else repr(text)}: a number from 0 is expected."
        )
    return int(text)


def index_and_count(environment: Environment, index: str, count: str) -> tuple[int, int]:
    """Return two variables: an index from 0, and the count."""
    this = number(environment, index)
    total = number(environment, count)
    if this >= total:
        raise ValueError(
            f"{index}={this} and {count}={total}: the first counts from 0 and must be below the second. Were "
            "these variables exported from another job?"
        )
    return this, total
