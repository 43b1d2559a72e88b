"""Launchers' variables, played to real processes of this machine, which find each other by them and train."""

import socket

import pytest

from tests.integration import commands
from tests.integration.test_two_processes import OF_THE_TRANSPORT, finish

OPTIONS = ("total=6 steps", "checkpoint.every=6 steps", "evaluation.every=6 steps", "logging.every=1 steps")
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


def start_all(command, workdir, environments, *options, devices=1, **more):
    return [command.start(workdir, *options, devices=devices, **(each | more)) for each in environments]


@pytest.mark.parametrize(("launcher", "name"), [(slurm, "SLURM"), (jobset, "Kubernetes JobSet")])
def test_two_processes_find_each_other_and_train(command, tmp_path, launcher, name):
    results = finish(start_all(command, tmp_path, launcher(2), *OPTIONS))
    assert [code for *_, code in results] == [0, 0], results
    said = [line for line in results[0][0].splitlines() if not OF_THE_TRANSPORT.search(line)]
    assert said[0].startswith(f"2 processes by {name}, the first at ")
    assert not [line for line in results[1][0].splitlines() if not OF_THE_TRANSPORT.search(line)]
    assert [err for _, err, _ in results] == ["", ""]
    assert commands.summary(tmp_path)["num_processes"] == 2


def test_a_process_whose_others_do_not_come_says_so(command, tmp_path):
    first, second = explicit(2)
    (process,) = start_all(command, tmp_path, [second], *OPTIONS, VIT_JAX_JOIN_SECONDS="2")
    _, err = process.communicate(timeout=120)
    assert process.returncode == 76
    assert f"finds nobody at {first['VIT_JAX_COORDINATOR']}, where process 0 should be" in err
    assert len(err.splitlines()) == 1
    (process,) = start_all(command, tmp_path, [first], *OPTIONS, VIT_JAX_JOIN_SECONDS="2")
    _, err = process.communicate(timeout=120)
    assert process.returncode == 76
    assert "sees others missing" in err
    assert "Not all processes came within 2 s" in err


def test_a_port_that_is_taken_is_not_waited_for_in_silence(command, tmp_path):
    environment = explicit(2)[0]
    with socket.socket() as other:
        port = environment["VIT_JAX_COORDINATOR"].rpartition(":")[2]
        other.bind(("", int(port)))
        other.listen()
        (process,) = start_all(command, tmp_path, [environment], *OPTIONS, VIT_JAX_JOIN_SECONDS="2")
        _, err = process.communicate(timeout=120)
    assert process.returncode == 76
    assert f"waits for port {port}, which another program still holds" in err
