"""Variables that launchers leave in the environment, read without starting anything."""

import re

import jax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vit_jax.hosts import cluster
from vit_jax.hosts.join import find_process
from vit_jax.hosts.slurm import count_idle_tasks, find_host

EXPLICIT = {
    "VIT_JAX_COORDINATOR": "a:1234",
    "VIT_JAX_NUM_PROCESSES": "4",
    "VIT_JAX_PROCESS_ID": "3",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
}
OPEN_MPI |= {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
OPEN_MPI |= {"OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911"}
JOBSET = {
    "JOBSET_NAME": "vit",
    "REPLICATED_JOB_NAME": "slice",
    "NUM_JOBS": "2",
    "JOB_INDEX": "1",
}
JOBSET |= {"JOB_COMPLETION_INDEX": "2", "PROCESSES_IN_JOB": "4"}
SLURM = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "node[01-02]",
}
SLURM |= {"SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_TASKS_PER_NODE": "2(x2)"}
SLURM |= {
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
}


def find(environment, *, gpus=0):
    return find_process(
        environment,
        has_tpu=False,
        count_gpus=lambda: gpus,
        find_host=lambda node: node,
    )


def numbers(process):
    return process.coordinator, process.num_processes, process.process_id


def without(environment, *names):
    return {name: value for name, value in environment.items() if name not in names}


def test_nothing_is_one_process_and_explicit_numbers_are_used():
    assert find({}) is None
    assert find({"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "3"}) is None
    assert numbers(find(EXPLICIT)) == ("a:1234", 4, 3)


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        *((without(EXPLICIT, name), f"but {name} is not") for name in EXPLICIT),
        (EXPLICIT | {"VIT_JAX_PROCESS_ID": "4"}, "VIT_JAX_PROCESS_ID"),
        (EXPLICIT | {"VIT_JAX_PROCESS_ID": "-1"}, "VIT_JAX_PROCESS_ID"),
        (EXPLICIT | {"VIT_JAX_NUM_PROCESSES": "many"}, "VIT_JAX_NUM_PROCESSES"),
        (EXPLICIT | {"VIT_JAX_COORDINATOR": "a"}, "VIT_JAX_COORDINATOR"),
        ({"VIT_JAX_COORDINATOR": "a:1"}, "nothing says how many processes"),
        (
            SLURM | EXPLICIT | {"VIT_JAX_PROCESS_ID": "0"},
            "VIT_JAX_PROCESS_ID=0, but SLURM says 4 and 3: unset",
        ),
        (
            OPEN_MPI | {"OMPI_COMM_WORLD_RANK": "9"},
            "OMPI_COMM_WORLD_RANK=9 and OMPI_COMM_WORLD_SIZE=4",
        ),
        (without(OPEN_MPI, "OMPI_MCA_orte_hnp_uri"), "set VIT_JAX_COORDINATOR"),
        *((without(JOBSET, name), name) for name in JOBSET if name != "JOBSET_NAME"),
        (JOBSET | {"JOB_INDEX": "2"}, "JOB_INDEX"),
        (JOBSET | {"JOB_COMPLETION_INDEX": "4"}, "JOB_COMPLETION_INDEX"),
        (JOBSET | {"NUM_JOBS": "x"}, "NUM_JOBS"),
        (SLURM | {"SLURM_PROCID": "4"}, "SLURM_PROCID=4 and SLURM_STEP_NUM_TASKS=4"),
        (SLURM | {"SLURM_PROCID": "x"}, "SLURM_PROCID"),
        (SLURM | {"SLURM_NODEID": "2"}, "SLURM_NODEID=2, but SLURM_STEP_TASKS_PER_NODE=2(x2)"),
        (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "two"}, "not a list like"),
        (SLURM | {"SLURM_LOCALID": "2", "CUDA_VISIBLE_DEVICES": "0,1"}, "SLURM_LOCALID=2"),
    ],
)
def test_variables_that_are_missing_or_contradict_each_other_are_named(environment, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        find(environment)


@pytest.mark.parametrize(
    "environment",
    [OPEN_MPI, JOBSET, SLURM],
    ids=["Open MPI", "JobSet", "SLURM"],
)
def test_given_values_replace_those_of_the_cluster(environment):
    expected = (4, 3)
    if environment is JOBSET:
        expected = (8, 6)
    assert numbers(find(environment))[1:] == expected
    assert find(environment | {"VIT_JAX_COORDINATOR": "a:1"}).coordinator == "a:1"
    assert find(environment | {"VIT_JAX_NUM_PROCESSES": "1"}) is None  # alone on purpose
    assert numbers(find(SLURM | EXPLICIT)) == ("a:1234", 4, 3)


def test_open_mpi():
    host, port = find(OPEN_MPI).coordinator.split(":")

    assert host == "10.96.0.1"
    assert 61440 <= int(port) < 65536
    assert find(OPEN_MPI | {"OMPI_COMM_WORLD_RANK": "0"}).coordinator == f"{host}:{port}"
    assert find(OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "1"}) is None

    uri = {"OMPI_MCA_orte_hnp_uri": "1314521088.0;tcp6://[fe80::b9b,2620:10d]:43370"}

    assert find(OPEN_MPI | uri).coordinator.startswith("[fe80::b9b]:")

    version_5 = without(OPEN_MPI, "OMPI_MCA_orte_hnp_uri")

    assert find(version_5 | {"PMIX_NAMESPACE": "prterun-login-1-4711@1"}).coordinator.startswith(
        "login-1:"
    )
    assert find(version_5 | {"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}).coordinator.startswith(
        "127.0.0.1:"
    )
    assert find(version_5 | {"VIT_JAX_COORDINATOR": "a:1"}).process_id == 3
    assert find(OPEN_MPI | SLURM).launcher == "Open MPI"


def test_jobset():
    assert find(JOBSET).coordinator == "vit-slice-0-0.vit:8476"

    alone = {
        "PROCESSES_IN_JOB": "1",
        "NUM_JOBS": "1",
        "JOB_INDEX": "0",
        "JOB_COMPLETION_INDEX": "0",
    }

    assert find(JOBSET | alone) is None


class Pod:
    """Stands for JAX's detection of a TPU pod."""

    hosts = 2
    is_there = True

    def is_env_present(self):
        return self.is_there

    def get_process_count(self):
        return self.hosts

    def get_process_id(self):
        return 1

    def get_coordinator_address(
        self,
        timeout_secs,
        override_coordinator_port,
    ):
        return f"10.0.0.2:{override_coordinator_port or 8482}"


@pytest.fixture
def pod(monkeypatch):
    from vit_jax.hosts.internals import clusters

    pod = Pod()
    absent = Pod()
    absent.is_there = False
    monkeypatch.setattr(clusters, "GceTpuCluster", pod)
    monkeypatch.setattr(clusters, "GkeTpuCluster", absent)

    return pod


def on_tpu(environment):
    return find_process(
        environment,
        has_tpu=True,
        count_gpus=lambda: 0,
        find_host=lambda node: node,
    )


def test_a_tpu_pod_as_jax_sees_it(pod):
    assert numbers(on_tpu({})) == ("10.0.0.2:8482", 2, 1)
    assert numbers(on_tpu({"JAX_COORDINATOR_PORT": "99"})) == ("10.0.0.2:99", 2, 1)
    assert on_tpu({"VIT_JAX_COORDINATOR": "a:1"}).coordinator == "a:1"
    assert on_tpu(SLURM).launcher == "TPU pod"
    assert on_tpu(EXPLICIT).launcher == "explicit address"
    assert on_tpu({"VIT_JAX_NUM_PROCESSES": "1"}) is None


def test_a_tpu_of_one_host_joins_nobody_and_one_without_metadata_is_refused(pod):
    pod.hosts = 1

    assert on_tpu({}) is None

    pod.is_there = False

    assert on_tpu({}) is None

    def refused():
        raise ConnectionError("refused")

    pod.is_there = True
    pod.get_process_count = refused

    with pytest.raises(ValueError, match="VIT_JAX_NUM_PROCESSES=1 is enough"):
        on_tpu({})


def test_jaxs_private_detection_has_the_names_that_are_used():
    from vit_jax.hosts.internals import clusters, global_state, running_in_cloud_tpu_vm

    moved = f"JAX {jax.__version__} has changed private names: adapt vit_jax/hosts/internals.py"

    assert running_in_cloud_tpu_vm is False, moved
    assert {"client", "process_id", "num_processes"} <= vars(global_state).keys() | vars(
        type(global_state)
    ).keys(), moved

    for kind in (clusters.GceTpuCluster, clusters.GkeTpuCluster):
        assert kind.is_env_present() is False, moved
        for name in ("get_process_count", "get_process_id", "get_coordinator_address"):
            assert callable(getattr(kind, name)), moved

    assert cluster.find_tpu_process({}, 1) is None


OF_A_JOB = {
    "SLURM_JOB_ID": "77",
    "SLURM_NTASKS": "4",
    "SLURM_JOB_NODELIST": "node[01-02]",
    "SLURM_PROCID": "0",
}


def one_node(num_tasks, task, **more):
    of_all = dict.fromkeys(("SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE"), str(num_tasks))
    return (
        SLURM
        | of_all
        | {
            "SLURM_PROCID": str(task),
            "SLURM_LOCALID": str(task),
            "SLURM_NODEID": "0",
        }
        | more
    )


def test_a_step():
    coordinator, num_processes, process_id = numbers(find(SLURM))

    assert num_processes == 4
    assert process_id == 3
    assert coordinator == f"node01:{61440 + 77}"
    assert find(SLURM | {"SLURM_STEP_ID": "1"}).coordinator != coordinator


@pytest.mark.parametrize(
    "shell",
    [
        OF_A_JOB,  # sbatch's script without srun
        without(OF_A_JOB, "SLURM_PROCID"),  # salloc
        SLURM
        | OF_A_JOB
        | {
            "SLURM_STEP_ID": "4294967290",
            "SLURM_STEP_NUM_TASKS": "1",
        },  # salloc with interactive step
        SLURM | {"SLURM_STEP_ID": "4294967291"},  # the step of sbatch
    ],
)
def test_a_shell_in_a_job_runs_alone(shell):
    assert find(shell) is None
    assert count_idle_tasks(OF_A_JOB) == 4
    assert count_idle_tasks(SLURM | OF_A_JOB) == 0
    assert count_idle_tasks({"SLURM_NTASKS": "4"}) == 0


def test_a_step_of_one_task_in_a_job_of_many():
    assert (
        find(
            SLURM
            | {
                "SLURM_NTASKS": "4",
                "SLURM_STEP_NUM_TASKS": "1",
                "SLURM_PROCID": "0",
            }
        )
        is None
    )
    assert (
        find(without(SLURM, "SLURM_STEP_NUM_TASKS") | {"SLURM_NTASKS": "1", "SLURM_PROCID": "0"})
        is None
    )


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

    assert re.fullmatch(r"[a1.-]+", found) or found.startswith(
        f"SLURM_STEP_NODELIST={nodes!r} is not a list like "
    )


NODES = "SLURM_STEP_TASKS_PER_NODE"
UNEVEN = SLURM | {
    NODES: "2(x3),1",
    "SLURM_NODEID": "3",
    "SLURM_LOCALID": "0",
}


@pytest.mark.parametrize(
    ("environment", "visible", "share"),
    [
        (
            SLURM
            | {
                NODES: "1(x4)",
                "SLURM_LOCALID": "0",
                "SLURM_NODEID": "3",
            },
            "0,1,2,3,4,5,6,7",
            None,
        ),  # one uses all
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
        (one_node(4, 2, JAX_LOCAL_DEVICE_IDS="1,2"), "0,1,2,3", None),  # the user's choice
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
        (
            "NodeName=no-node NodeAddr=no-node NodeHostName=x",
            "SLURM's address, no-node, does not either",
        ),
        ("", "scontrol shows no address of it here"),
    ],
)
def test_a_node_whose_name_does_not_resolve(
    answer,
    expected,
    monkeypatch,
    tmp_path,
):
    (tmp_path / "scontrol").write_text(f"""#!/bin/bash
[[ "$*" == "show node no-node --oneliner" ]] && echo "{answer}"
""")
    (tmp_path / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")

    assert find_host("localhost") == "localhost"

    if expected == "127.0.0.1":
        assert find_host("no-node") == expected
    else:
        with pytest.raises(
            ValueError,
            match=f"SLURM node no-node: its name must resolve .*{expected}",
        ):
            find_host("no-node")
