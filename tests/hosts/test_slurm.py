"""SLURM's variables, for the usual ways of starting a run."""

import pytest

from tests.hosts.test_cluster import SLURM, find, numbers, without
from vit_jax.hosts.slurm import first_host, idle_tasks, tasks_of_nodes

OF_A_JOB = {"SLURM_JOB_ID": "77", "SLURM_NTASKS": "4", "SLURM_JOB_NODELIST": "node[01-02]", "SLURM_PROCID": "0"}


def gpus(environment, visible=None, driver=0):
    seen = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    return find(environment | seen, gpus=driver).local_device_ids


def one_node(num_tasks, task, **more):
    return SLURM | {
        "SLURM_STEP_NUM_TASKS": str(num_tasks),
        "SLURM_STEP_TASKS_PER_NODE": str(num_tasks),
        "SLURM_PROCID": str(task),
        "SLURM_LOCALID": str(task),
        "SLURM_NODEID": "0",
        **more,
    }


def test_a_step():
    coordinator, num_processes, process_id = numbers(find(SLURM))
    assert (num_processes, process_id) == (4, 3)
    assert coordinator == f"node01:{61440 + 77}"
    assert find(SLURM | {"SLURM_STEP_ID": "1"}).coordinator != coordinator


@pytest.mark.parametrize(
    "shell",
    [
        OF_A_JOB,  # sbatch's script without srun
        without(OF_A_JOB, "SLURM_PROCID"),  # salloc
        SLURM | OF_A_JOB | {"SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "1"},  # salloc with interactive step
        SLURM | {"SLURM_STEP_ID": "4294967291"},  # sbatch's own step
    ],
)
def test_a_shell_in_a_job_runs_alone(shell):
    assert find(shell) is None


def test_tasks_that_were_not_started_are_counted():
    assert idle_tasks(OF_A_JOB) == 4
    assert idle_tasks(SLURM | OF_A_JOB) == 0
    assert idle_tasks({"SLURM_NTASKS": "4"}) == 0


def test_a_step_of_one_task_in_a_job_of_many():
    assert find(SLURM | {"SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}) is None
    assert find(without(SLURM, "SLURM_STEP_NUM_TASKS") | {"SLURM_NTASKS": "1", "SLURM_PROCID": "0"}) is None


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"SLURM_PROCID": "4"}, "SLURM_PROCID=4 and SLURM_STEP_NUM_TASKS=4"),
        ({"SLURM_PROCID": "x"}, "SLURM_PROCID"),
        ({"SLURM_NODEID": "2"}, r"SLURM_NODEID=2, but SLURM_STEP_TASKS_PER_NODE=2\(x2\)"),
        ({"SLURM_STEP_TASKS_PER_NODE": "two"}, "not a list like"),
        ({"SLURM_LOCALID": "2", "CUDA_VISIBLE_DEVICES": "0,1"}, "SLURM_LOCALID=2"),
    ],
)
def test_contradictions_name_the_variables(change, named):
    with pytest.raises(ValueError, match=named):
        find(SLURM | change)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node01", "node01"),
        ("node01,node02", "node01"),
        ("node[01-03,07]", "node01"),
        ("node[07,09-12],x", "node07"),
        ("a,node[01-03]", "a"),
        ("rack[1-2]n[01-04]", "rack1n01"),
        ("node[001-015]-ib", "node001-ib"),
    ],
)
def test_first_host(nodes, first):
    assert first_host(nodes) == first


def test_tasks_of_nodes():
    assert tasks_of_nodes("2(x3),1") == [2, 2, 2, 1]
    assert tasks_of_nodes("8") == [8]


def test_gpus_are_shared_by_the_tasks_of_a_node():
    nodes = SLURM | {"SLURM_STEP_TASKS_PER_NODE": "1(x4)", "SLURM_LOCALID": "0", "SLURM_NODEID": "3"}
    assert gpus(nodes, "0,1,2,3,4,5,6,7") is None  # one task uses all
    assert [gpus(one_node(4, task), "0,1,2,3") for task in (0, 3)] == [(0,), (3,)]
    assert gpus(one_node(4, 3), driver=4) == (3,)
    assert gpus(one_node(4, 2), "0,1,2,3,4,5,6,7") == (4, 5)


def test_gpus_that_slurm_has_shared_out_already():
    assert gpus(one_node(4, 2, SLURM_GPUS_PER_TASK="1"), "0") is None
    assert gpus(one_node(2, 1, SLURM_GPUS_PER_TASK="4"), "4,5,6,7") is None
    assert gpus(one_node(2, 1, SLURM_TRES_PER_TASK="cpu:8,gres/gpu:4"), "4,5,6,7") is None
    assert gpus(one_node(2, 1, SLURM_STEP_GPUS="0,1,2,3,4,5,6,7"), "4,5,6,7") is None
    assert gpus(one_node(2, 1, SLURM_STEP_GPUS="4,5,6,7"), "0,1,2,3") == (2, 3)
    assert gpus(one_node(4, 2), "0") is None  # bound, as only the visible GPU shows


def test_nodes_that_differ():
    last = SLURM | {"SLURM_STEP_TASKS_PER_NODE": "2(x3),1", "SLURM_NODEID": "3", "SLURM_LOCALID": "0"}
    assert gpus(last, "0,1,2,3") is None
    assert gpus(last | {"SLURM_NODEID": "2", "SLURM_LOCALID": "1"}, "0,1,2,3") == (2, 3)


def test_gpus_that_cannot_be_shared_and_the_users_own_choice():
    with pytest.raises(ValueError, match="3 GPUs cannot be shared evenly by the 2 tasks"):
        gpus(one_node(2, 0), "0,1,2")
    assert gpus(one_node(4, 2), driver=0) is None
    assert gpus(one_node(4, 2), "NoDevFiles", driver=4) is None
    assert gpus(one_node(4, 2, JAX_LOCAL_DEVICE_IDS="1,2"), "0,1,2,3") is None
