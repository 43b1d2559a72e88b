"""What launchers leave in the environment of each process of a run, as if all were on this machine."""

import socket

FIRST_PORT = 61440


def free_port(first=0):
    """Any, or one of SLURM's jobs."""
    for port in range(first, 65536) if first else (0,):
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return probe.getsockname()[1]
    raise AssertionError("no port is free")


def slurm(num_processes):
    """`srun --nodes=2`, in the words of SLURM, on nodes that are both this machine."""
    job_id = free_port(FIRST_PORT) - FIRST_PORT
    return [
        {
            "SLURM_JOB_ID": str(job_id),
            "SLURM_STEP_ID": "0",
            "SLURM_STEP_NODELIST": "localhost,other[01-02]",
            "SLURM_STEP_NUM_TASKS": str(num_processes),
            "SLURM_NTASKS": str(num_processes),
            "SLURM_STEP_TASKS_PER_NODE": f"1(x{num_processes})",
            "SLURM_PROCID": str(process),
            "SLURM_LOCALID": "0",
            "SLURM_NODEID": str(process),
        }
        for process in range(num_processes)
    ]


def jobset(num_processes):
    """Jobs of one pod each. The name of the first pod means nothing outside of its cluster: the address is given."""
    return [
        {
            "JOBSET_NAME": "vit",
            "REPLICATED_JOB_NAME": "workers",
            "JOB_INDEX": str(process),
            "JOB_COMPLETION_INDEX": "0",
            "PROCESSES_IN_JOB": "1",
            "NUM_JOBS": str(num_processes),
            "VIT_JAX_COORDINATOR": f"127.0.0.1:{port}",
        }
        for port in (free_port(),)
        for process in range(num_processes)
    ]


def open_mpi(num_processes):
    """`mpirun` of Open MPI 5, all on this machine."""
    return [
        {
            "OMPI_COMM_WORLD_SIZE": str(num_processes),
            "OMPI_COMM_WORLD_LOCAL_SIZE": str(num_processes),
            "OMPI_COMM_WORLD_RANK": str(process),
            "OMPI_COMM_WORLD_LOCAL_RANK": str(process),
            "PMIX_NAMESPACE": f"prterun-here-{namespace}@1",
        }
        for namespace in (free_port(),)  # a number that no other run has now
        for process in range(num_processes)
    ]


def explicit(num_processes):
    return [
        {
            "VIT_JAX_COORDINATOR": f"127.0.0.1:{port}",
            "VIT_JAX_NUM_PROCESSES": str(num_processes),
            "VIT_JAX_PROCESS_ID": str(process),
        }
        for port in (free_port(),)
        for process in range(num_processes)
    ]
