"""SLURM's variables, for the usual ways of starting a run."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.hosts.test_cluster import SLURM, find, numbers, without
from vit_jax.hosts.slurm import find_host, idle_tasks

OF_A_JOB = {"SLURM_JOB_ID": "77", "SLURM_NTASKS": "4", "SLURM_JOB_NODELIST": "node[01-02]", "SLURM_PROCID": "0"}


def one_node(num_tasks, task, **more):
    of_all = dict.fromkeys(("SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE"), str(num_tasks))
    return SLURM | of_all | {"SLURM_PROCID": str(task), "SLURM_LOCALID": str(task), "SLURM_NODEID": "0"} | more


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
    assert idle_tasks(OF_A_JOB) == 4
    assert idle_tasks(SLURM | OF_A_JOB) == 0
    assert idle_tasks({"SLURM_NTASKS": "4"}) == 0


def test_a_step_of_one_task_in_a_job_of_many():
    assert find(SLURM | {"SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}) is None
    assert find(without(SLURM, "SLURM_STEP_NUM_TASKS") | {"SLURM_NTASKS": "1", "SLURM_PROCID": "0"}) is None


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
    assert find(SLURM | {"SLURM_STEP_NODELIST": nodes}).coordinator.partition(":")[0] == first


@settings(derandomize=True, deadline=None)
@given(st.text("a1[],-. é\n", min_size=1))
def test_a_malformed_list_of_nodes_is_an_error_that_shows_it(nodes):
    try:
        found = find(SLURM | {"SLURM_STEP_NODELIST": nodes}).coordinator.rpartition(":")[0]
    except ValueError as error:
        found = str(error)
    assert re.fullmatch(r"[a1.-]+", found) or found.startswith(f"SLURM_STEP_NODELIST={nodes!r} is not a list like ")


NODES = "SLURM_STEP_TASKS_PER_NODE"
UNEVEN = SLURM | {NODES: "2(x3),1", "SLURM_NODEID": "3", "SLURM_LOCALID": "0"}


@pytest.mark.parametrize(
    ("environment", "visible", "share"),
    [
        (SLURM | {NODES: "1(x4)", "SLURM_LOCALID": "0", "SLURM_NODEID": "3"}, "0,1,2,3,4,5,6,7", None),  # one uses all
        (one_node(4, 0), "0,1,2,3", (0,)),
        (one_node(4, 3), "0,1,2,3", (3,)),
        (one_node(4, 2), "0,1,2,3,4,5,6,7", (4, 5)),
        (one_node(4, 3), None, (3,)),  # as the driver counts them
        (UNEVEN, "0,1,2,3", None),
        (UNEVEN | {"SLURM_NODEID": "2", "SLURM_LOCALID": "1"}, "0,1,2,3", (2, 3)),
        # SLURM shows each task its own already
        (one_node(4, 2, SLURM_GPUS_PER_TASK="1"), "0", None),
        (one_node(2, 1, SLURM_GPUS_PER_TASK="4"), "4,5,6,7", None),
        (one_node(2, 1, SLURM_TRES_PER_TASK="cpu:8,gres/gpu:4"), "4,5,6,7", None),
        (one_node(2, 1, SLURM_STEP_GPUS="0,1,2,3,4,5,6,7"), "4,5,6,7", None),
        (one_node(2, 1, SLURM_STEP_GPUS="4,5,6,7"), "0,1,2,3", (2, 3)),
        (one_node(4, 2), "0", None),  # bound, as only the visible GPU shows
        (one_node(4, 2), "NoDevFiles", None),
        (one_node(4, 2, JAX_LOCAL_DEVICE_IDS="1,2"), "0,1,2,3", None),  # the user's own choice
    ],
)
def test_gpus_are_shared_by_the_tasks_of_a_node(environment, visible, share):
    seen = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert find(environment | seen, gpus=4).local_device_ids == share


def test_gpus_that_are_absent_or_cannot_be_shared():
    assert find(one_node(4, 2), gpus=0).local_device_ids is None
    with pytest.raises(ValueError, match="3 GPUs cannot be shared evenly by the 2 tasks"):
        find(one_node(2, 0), gpus=3)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("NodeName=no-node NodeAddr=127.0.0.1 NodeHostName=x", "127.0.0.1"),
        ("NodeName=no-node NodeAddr=no-node NodeHostName=x", "SLURM's address, no-node, does not either"),
        ("", "scontrol shows no address of it here"),
    ],
)
def test_a_node_whose_name_does_not_resolve(answer, expected, monkeypatch, tmp_path):
    (tmp_path / "scontrol").write_text(f"""#!/bin/bash
[[ "$*" == "show node no-node --oneliner" ]] && echo "{answer}"
""")
    (tmp_path / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    assert find_host("localhost") == "localhost"
    if expected == "127.0.0.1":
        assert find_host("no-node") == expected
    else:
        with pytest.raises(ValueError, match=f"SLURM node no-node: its name must resolve .*{expected}"):
            find_host("no-node")
