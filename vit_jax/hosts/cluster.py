"""Which processes make up a run, and which of them this one is: read from what launchers leave in the environment.

Nothing is started here. SLURM has a file of its own.
"""

import dataclasses
import re
import zlib
from collections.abc import Callable, Mapping

Environment = Mapping[str, str]
COORDINATOR, NUM_PROCESSES, PROCESS_ID = "VIT_JAX_COORDINATOR", "VIT_JAX_NUM_PROCESSES", "VIT_JAX_PROCESS_ID"
FIRST_PORT, NUM_PORTS = 61440, 4096  # above those that Linux gives to outgoing connections
JOBSET_PORT = 8476


@dataclasses.dataclass(frozen=True, kw_only=True)
class Place:
    """Where a process stands in its run."""

    launcher: str  # for people
    coordinator: str  # host:port of the first process
    num_processes: int
    process_id: int
    local_device_ids: tuple[int, ...] | None = None  # of the GPUs that it sees, those it takes; None: all


def explicit_place(environment: Environment) -> Place | None:
    """What the three variables of our own say; None if not all of them are set.

    Raises:
      ValueError: a value makes no sense.
    """
    names = (COORDINATOR, NUM_PROCESSES, PROCESS_ID)
    if any(name not in environment for name in names):
        return None
    place = Place(
        launcher="explicit address",
        coordinator=given_coordinator(environment) or "",
        num_processes=whole(environment, NUM_PROCESSES),
        process_id=whole(environment, PROCESS_ID),
    )
    return sensible(place, environment, PROCESS_ID, NUM_PROCESSES)


def given_coordinator(environment: Environment) -> str | None:
    """`VIT_JAX_COORDINATOR`, which may also replace the address that a cluster gives.

    Raises:
      ValueError: it is not host:port.
    """
    address = environment.get(COORDINATOR)
    if address is not None and not re.fullmatch(r".+:\d+", address):
        raise ValueError(f"{COORDINATOR}={address}: give the first process's host and a free port there, as host:port.")
    return address


def open_mpi_place(environment: Environment) -> Place | None:
    """Processes started by Open MPI's mpirun.

    JAX asks for mpi4py from Open MPI 5 on, and gives each process one GPU whatever their number; the variables that
    mpirun sets are enough.

    Raises:
      ValueError: variables are missing, contradict each other, or do not tell where the first process is.
    """
    size, rank = "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"
    if size not in environment or whole(environment, size) == 1:
        return None
    place = Place(
        launcher="Open MPI",
        coordinator=given_coordinator(environment) or _open_mpi_coordinator(environment, whole(environment, size)),
        num_processes=whole(environment, size),
        process_id=whole(environment, rank),
    )
    return sensible(place, environment, rank, size)


def _open_mpi_coordinator(environment: Environment, size: int) -> str:
    """The host of mpirun, where Open MPI puts rank 0 unless it is told otherwise."""
    uri, namespace = environment.get("OMPI_MCA_orte_hnp_uri", ""), environment.get("PMIX_NAMESPACE", "")
    port = FIRST_PORT + zlib.crc32((uri or namespace).encode()) % NUM_PORTS
    if environment.get("OMPI_COMM_WORLD_LOCAL_SIZE") == str(size):
        return f"127.0.0.1:{port}"
    if found := re.search(r"tcp://([^,:;]+)|tcp6://\[([^],]+)", uri):  # up to Open MPI 4
        return f"{found[1] or f'[{found[2]}]'}:{port}"
    if found := re.fullmatch(r"prterun-(.+)-\d+@\d+", namespace):  # from Open MPI 5 on
        return f"{found[1]}:{port}"
    raise ValueError(
        f"Open MPI started {size} processes on several hosts, and OMPI_MCA_orte_hnp_uri and PMIX_NAMESPACE do not say "
        f"where the first is: set {COORDINATOR}=host:port for all of them (mpirun -x {COORDINATOR})."
    )


def jobset_place(environment: Environment) -> Place | None:
    """Pods of a Kubernetes JobSet, from the variables that `launch/gke_jobset.yaml` gives them.

    JAX asks the cluster's API for these, which takes a package and a permission; the pod knows them anyway.

    Raises:
      ValueError: variables are missing or contradict each other.
    """
    names = ("REPLICATED_JOB_NAME", "JOB_INDEX", "JOB_COMPLETION_INDEX", "PROCESSES_IN_JOB", "NUM_JOBS")
    if "JOBSET_NAME" not in environment:
        return None
    if missing := [name for name in names if name not in environment]:
        raise ValueError(f"JOBSET_NAME is set but {', '.join(missing)} is not: set all of them in the pod's template.")
    numbers = {name: whole(environment, name) for name in names[1:]}
    for index, count in (("JOB_INDEX", "NUM_JOBS"), ("JOB_COMPLETION_INDEX", "PROCESSES_IN_JOB")):
        if numbers[index] >= numbers[count]:
            raise ValueError(f"{index}={numbers[index]} and {count}={numbers[count]}: the index must be below.")
    if numbers["PROCESSES_IN_JOB"] * numbers["NUM_JOBS"] == 1:
        return None
    jobset, job = environment["JOBSET_NAME"], environment["REPLICATED_JOB_NAME"]
    return Place(
        launcher="Kubernetes JobSet",
        coordinator=given_coordinator(environment) or f"{jobset}-{job}-0-0.{jobset}:{JOBSET_PORT}",
        num_processes=numbers["PROCESSES_IN_JOB"] * numbers["NUM_JOBS"],
        process_id=numbers["JOB_INDEX"] * numbers["PROCESSES_IN_JOB"] + numbers["JOB_COMPLETION_INDEX"],
    )


def tpu_place(environment: Environment, timeout_seconds: int) -> Place | None:
    """Hosts of a TPU pod, one slice or several, on Compute Engine or GKE; None for a TPU of one host.

    JAX's own detection is right here: it asks the metadata server, or reads what GKE sets.

    Raises:
      ValueError: the metadata server does not answer.
    """
    from jax._src.clusters import GceTpuCluster, GkeTpuCluster

    try:
        cluster = next((kind for kind in (GkeTpuCluster, GceTpuCluster) if kind.is_env_present()), None)
        if cluster is None or cluster.get_process_count() == 1:
            return None
        port = environment.get("JAX_COORDINATOR_PORT")
        address = given_coordinator(environment) or cluster.get_coordinator_address(timeout_seconds, port)
        return Place(
            launcher="TPU pod",
            coordinator=address,
            num_processes=cluster.get_process_count(),
            process_id=cluster.get_process_id(),
        )
    except (OSError, RuntimeError) as error:  # those of requests are OSErrors
        raise ValueError(
            f"This host has TPUs, but which hosts share them cannot be found out: {error}. Set {COORDINATOR}, "
            f"{NUM_PROCESSES} and {PROCESS_ID}; for a run on this host alone, {NUM_PROCESSES}=1 is enough."
        ) from error


def whole(environment: Environment, name: str) -> int:
    """A variable as a number from 0.

    Raises:
      ValueError: it is not set, or something else.
    """
    text = environment.get(name)
    if text is None or not text.isdecimal():
        raise ValueError(f"{name} is {'not set' if text is None else repr(text)}: a whole number is expected there.")
    return int(text)


def sensible(place: Place, environment: Environment, index: str, count: str) -> Place:
    """The place, if its number is one of the run's.

    Raises:
      ValueError: it is not; names the two variables.
    """
    if place.process_id >= place.num_processes:
        raise ValueError(
            f"{index}={environment[index]} and {count}={environment[count]}: give a number of processes, and for each "
            "process a number below it, from 0."
        )
    return place


GpuCount = Callable[[], int]
