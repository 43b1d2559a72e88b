"""A run's processes from SLURM's variables, and the GPUs of each of several processes on one node.

JAX's own detection gives every task the GPU of its local number, so that one task for a node would use a single GPU,
and reads the first name of "rack[1-2]n[01-04]" as "rack1".
"""

import re
import socket
import subprocess

from vit_jax.hosts.cluster import (
    COORDINATOR,
    FIRST_PORT,
    NUM_PORTS,
    Environment,
    FindHost,
    GpuCount,
    Place,
    given_coordinator,
    index_and_count,
    number,
)

_RANGE = r"[0-9A-Za-z]+(?:-[0-9A-Za-z]+)?"
_NODE = rf"(?:[0-9A-Za-z_.-]|\[{_RANGE}(?:,{_RANGE})*\])+"
_OF_A_SHELL = ("4294967290", "4294967291")  # step numbers of salloc's shell and of sbatch's script


def slurm_place(
    environment: Environment, count_gpus: GpuCount, find_host: FindHost
) -> Place | None:
    """Return the place of a task that `srun` started; None outside of a step, where one process runs alone.

    `count_gpus`, the number of GPUs this process can use, is called where no variable gives it; `find_host` with the
    name of the first node. Errors are those of `cluster`.
    """
    if not _is_in_step(environment):
        return None
    count = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environment else "SLURM_NTASKS"
    process_id, num_processes = index_and_count(environment, "SLURM_PROCID", count)
    if num_processes == 1:
        return None
    coordinator = (
        given_coordinator(environment)
        or f"{find_host(_first_node(environment))}:{_port(environment)}"
    )
    return Place(
        "SLURM", coordinator, num_processes, process_id, _gpu_share(environment, count_gpus)
    )


def idle_tasks(environment: Environment) -> int:
    """Tasks of a job that no `srun` has started; more than one is probably a mistake."""
    tasks = environment.get("SLURM_NTASKS", "")
    is_idle = "SLURM_JOB_ID" in environment and not _is_in_step(environment) and tasks.isdecimal()
    return int(tasks) if is_idle else 0


def _is_in_step(environment: Environment) -> bool:
    """Return whether `srun` started this process: shells of salloc and sbatch have the job's variables, too."""
    if "SLURM_JOB_ID" not in environment or environment.get("SLURM_STEP_ID") in _OF_A_SHELL:
        return False
    return "SLURM_STEP_ID" in environment or "SLURM_STEP_NODELIST" in environment


def _port(environment: Environment) -> int:
    """The same for all tasks of a step, different for the next step, which may start while this one ends."""
    step = environment.get("SLURM_STEP_ID", "0")
    job = number(environment, "SLURM_JOB_ID") + 131 * (int(step) if step.isdecimal() else 0)
    return FIRST_PORT + job % NUM_PORTS


def _first_node(environment: Environment) -> str:
    """The first of a list of nodes: "node[01-03,07],x" → "node01", "rack[1-2]n[01-04]" → "rack1n01"."""
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST") or ""
    match = re.fullmatch(rf"({_NODE})(,{_NODE})*", nodes)
    if match is None:
        raise ValueError(
            f"SLURM_STEP_NODELIST={nodes!r} is not a list like node[01-03,07],x: set VIT_JAX_COORDINATOR."
        )
    return re.sub(r"\[([0-9A-Za-z]+)[^\]]*\]", r"\1", match[1])


def _gpu_share(environment: Environment, count_gpus: GpuCount) -> tuple[int, ...] | None:
    """The task's share of the GPUs that it sees, or None for all."""
    if "JAX_LOCAL_DEVICE_IDS" in environment:  # the user has decided
        return None
    num_tasks = _tasks_of_this_node(environment)
    task = number(environment, "SLURM_LOCALID")
    visible = _visible_gpus(environment, count_gpus) if num_tasks > 1 else 0
    if num_tasks == 1 or visible < num_tasks or _is_bound(environment, visible):
        return None
    if task >= num_tasks:
        raise ValueError(
            f"SLURM_LOCALID={task}, but SLURM_STEP_TASKS_PER_NODE gives this node {num_tasks} tasks."
        )
    if visible % num_tasks:
        raise ValueError(
            f"{visible} GPUs cannot be shared evenly by the {num_tasks} tasks of this node: choose another "
            "--ntasks-per-node, or assign them with JAX_LOCAL_DEVICE_IDS."
        )
    share = visible // num_tasks
    return tuple(range(task * share, (task + 1) * share))


def _is_bound(environment: Environment, visible: int) -> bool:
    """Return whether SLURM already shows each task only its own GPUs (--gpus-per-task, --gpu-bind)."""
    if "SLURM_GPUS_PER_TASK" in environment or "gpu" in environment.get("SLURM_TRES_PER_TASK", ""):
        return True
    of_node = environment.get("SLURM_STEP_GPUS") or environment.get("SLURM_JOB_GPUS")
    return of_node is not None and visible < len(of_node.split(","))


def _tasks_of_this_node(environment: Environment) -> int:
    """Return the number of tasks on this node; "2(x3),1" stands for nodes with 2, 2, 2 and 1."""
    tasks = (
        environment.get("SLURM_STEP_TASKS_PER_NODE")
        or environment.get("SLURM_TASKS_PER_NODE")
        or ""
    )
    counts: list[int] = []
    for group in tasks.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", group)
        if match is None:
            raise ValueError(
                f"SLURM_STEP_TASKS_PER_NODE={tasks!r} is not a list like 2(x3),1: start the run by srun."
            )
        counts += [int(match[1])] * int(match[2] or 1)
    node = number({"SLURM_NODEID": "0"} | dict(environment), "SLURM_NODEID")
    if node >= len(counts):
        raise ValueError(
            f"SLURM_NODEID={node}, but SLURM_STEP_TASKS_PER_NODE={tasks} names {len(counts)} nodes."
        )
    return counts[node]


def _visible_gpus(environment: Environment, count_gpus: GpuCount) -> int:
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return count_gpus()
    return 0 if visible in ("", "-1", "NoDevFiles") else len(visible.split(","))


def find_host(node: str) -> str:
    """Return the name of a node if this machine can resolve it, else the address that SLURM has for it (`NodeAddr`).

    Names of nodes need not resolve: SLURM itself uses the addresses of slurm.conf.

    Raises:
      ValueError: neither resolves.
    """
    if _resolves(node):
        return node
    try:
        show = ["scontrol", "show", "node", node, "--oneliner"]
        shown = subprocess.run(show, capture_output=True, text=True, timeout=60, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        shown = ""
    address = re.search(r"\bNodeAddr=(\S+)", shown)
    if address and address[1] != node and _resolves(address[1]):
        return address[1]
    has = (
        f"SLURM's address, {address[1]}, does not either"
        if address
        else "scontrol shows no address of it here"
    )
    raise ValueError(
        f"SLURM node {node}: its name must resolve on every node. It does not on {socket.gethostname()}, and {has}. "
        f"Check `getent hosts {node}` there, or set {COORDINATOR}=ADDRESS:PORT of the first node."
    )


def _resolves(host: str) -> bool:
    try:
        return bool(socket.getaddrinfo(host, None))
    except (OSError, UnicodeError):
        return False


def count_nvidia_gpus() -> int:
    """GPUs that the driver shows this process; 0 without a driver."""
    try:
        listing = subprocess.run(
            ["nvidia-smi", "--list-gpus"], capture_output=True, text=True, timeout=60, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return 0
    return sum(line.startswith("GPU ") for line in listing.stdout.splitlines())
