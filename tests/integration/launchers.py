"""Environments that launchers give to the processes of a run, as if all were on this machine."""

import socket

FIRST_PORT = 61440


def free_port(first=0):
    """Return a free port: any, or the first one from a number on."""
    candidates = range(first, 65536) if first else (0,)
    for port in candidates:
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return probe.getsockname()[1]
    raise AssertionError("no port is free")


def slurm(num_processes):
    """Return the environments of `srun --nodes=2` on nodes that are both this machine."""
    job_id = free_port(FIRST_PORT) - FIRST_PORT
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
        "VIT_JAX_COORDINATOR": f"127.0.0.1:{free_port()}",
    }
    return [jobs | {"JOB_INDEX": str(i)} for i in range(num_processes)]


def open_mpi(num_processes):
    """Return the environments of `mpirun` of Open MPI 5, all on this machine.

    The namespace has a number that no other run has now.
    """
    world = {
        "OMPI_COMM_WORLD_SIZE": str(num_processes),
        "OMPI_COMM_WORLD_LOCAL_SIZE": str(num_processes),
        "PMIX_NAMESPACE": f"prterun-here-{free_port()}@1",
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
        "VIT_JAX_COORDINATOR": f"127.0.0.1:{free_port()}",
        "VIT_JAX_NUM_PROCESSES": str(num_processes),
    }
    return [run | {"VIT_JAX_PROCESS_ID": str(i)} for i in range(num_processes)]
