"""Environments that launchers give to the processes of a run, as if all were on this machine."""

import itertools
import socket
import zlib

FIRST_PORT = 61440
"""The port of SLURM's job 0; Linux gives lower ports to outgoing connections."""
NUM_JOB_PORTS = 1024
"""Ports of jobs of a real SLURM, which other tests start meanwhile."""
_reservations = []


def reserve_port():
    """Return a free port that no other process of tests gets before this one ends.

    A socket of UDP reserves the number, so that the port of TCP stays free.
    """
    for port in range(FIRST_PORT + NUM_JOB_PORTS, 65536):
        reservation = socket.socket(type=socket.SOCK_DGRAM)
        with socket.socket() as probe:
            try:
                reservation.bind(("", port))
                probe.bind(("", port))
            except OSError:
                reservation.close()
                continue
        _reservations.append(reservation)
        return port
    raise AssertionError("no port is free")


def slurm(num_processes):
    """Return the environments of `srun --nodes=2` on nodes that are both this machine."""
    job_id = reserve_port() - FIRST_PORT
    step = {
        "SLURM_JOB_ID": str(job_id),
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NODELIST": "localhost,other[01-02]",
        "SLURM_STEP_NUM_TASKS": str(num_processes),
        "SLURM_NTASKS": str(num_processes),
        "SLURM_STEP_TASKS_PER_NODE": f"1(x{num_processes})",
        "SLURM_LOCALID": "0",
    }
    return [step | {"SLURM_PROCID": str(i), "SLURM_NODEID": str(i)} for i in range(num_processes)]


def jobset(num_processes):
    """Return the environments of jobs of one pod each.

    The name of the first pod means nothing outside of its cluster: the address is given.
    """
    jobs = {
        "JOBSET_NAME": "vit",
        "REPLICATED_JOB_NAME": "workers",
        "NUM_JOBS": str(num_processes),
        "JOB_COMPLETION_INDEX": "0",
        "PROCESSES_IN_JOB": "1",
        "VIT_JAX_COORDINATOR": f"127.0.0.1:{reserve_port()}",
    }
    return [jobs | {"JOB_INDEX": str(i)} for i in range(num_processes)]


def find_namespace():
    """Return a namespace of Open MPI 5 from which processes derive a free port."""
    port = reserve_port()
    for number in itertools.count():
        namespace = f"prterun-here-{number}@1"
        if FIRST_PORT + zlib.crc32(namespace.encode()) % (65536 - FIRST_PORT) == port:
            return namespace


def open_mpi(num_processes):
    """Return the environments of `mpirun` of Open MPI 5, all on this machine."""
    world = {
        "OMPI_COMM_WORLD_SIZE": str(num_processes),
        "OMPI_COMM_WORLD_LOCAL_SIZE": str(num_processes),
        "PMIX_NAMESPACE": find_namespace(),
    }

    environments = []
    for rank in range(num_processes):
        ranks = {
            "OMPI_COMM_WORLD_RANK": str(rank),
            "OMPI_COMM_WORLD_LOCAL_RANK": str(rank),
        }
        environments.append(world | ranks)
    return environments


def explicit(num_processes):
    """Return the environments of processes that are numbered by the user."""
    run = {
        "VIT_JAX_COORDINATOR": f"127.0.0.1:{reserve_port()}",
        "VIT_JAX_NUM_PROCESSES": str(num_processes),
    }
    return [run | {"VIT_JAX_PROCESS_ID": str(i)} for i in range(num_processes)]
