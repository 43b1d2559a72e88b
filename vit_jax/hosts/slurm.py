"""A process and its GPUs from SLURM's variables; several processes of a node share its GPUs.

JAX's own detection gives every task the GPU of its local number, so that one task for a node would
use a single GPU, and reads the first name of "rack[1-2]n[01-04]" as "rack1".
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
    ProcessInfo,
    read_coordinator,
    read_index_and_count,
    read_number,
)

_RANGE = r"[0-9A-Za-z]+(?:-[0-9A-Za-z]+)?"
_NODE = rf"(?:[0-9A-Za-z_.-]|\[{_RANGE}(?:,{_RANGE})*\])+"
_SHELL_STEPS = ("4294967290", "4294967291")
"""Step numbers of salloc's shell and of sbatch's script."""


def read_slurm_process(
    environment: Environment,
    count_gpus: GpuCount,
    find_host: FindHost,
) -> ProcessInfo | None:
    """Return the task that `srun` started; None outside of a step, where one process runs alone.

    `count_gpus` is called where no variable gives the number of GPUs, `find_host` with the name of
    the first node. Errors are those of `cluster`.
    """
    if not _is_in_step(environment):
        return None
    count = "SLURM_NTASKS"
    if "SLURM_STEP_NUM_TASKS" in environment:
        count = "SLURM_STEP_NUM_TASKS"
    process_id, num_processes = read_index_and_count(environment, "SLURM_PROCID", count)
    if num_processes == 1:
        return None
    coordinator = read_coordinator(environment)
    if not coordinator:
        host = find_host(_find_first_node(environment))
        coordinator = f"{host}:{_choose_port(environment)}"
    gpus = _find_gpu_share(environment, count_gpus)
    return ProcessInfo("SLURM", coordinator, num_processes, process_id, gpus)


def count_idle_tasks(environment: Environment) -> int:
    """Return the number of a job's tasks that no `srun` has started.

    More than one is probably a mistake.
    """
    tasks = environment.get("SLURM_NTASKS", "")
    if "SLURM_JOB_ID" not in environment or _is_in_step(environment) or not tasks.isdecimal():
        return 0
    return int(tasks)


def _is_in_step(environment: Environment) -> bool:
    """Return True if `srun` started this process.

    Shells of salloc and sbatch have the job's variables, too.
    """
    if "SLURM_JOB_ID" not in environment or environment.get("SLURM_STEP_ID") in _SHELL_STEPS:
        return False
    return "SLURM_STEP_ID" in environment or "SLURM_STEP_NODELIST" in environment


def _choose_port(environment: Environment) -> int:
    """Return a port for all tasks of a step.

    The next step, which may start while this one ends, has another port.
    """
    job = read_number(environment, "SLURM_JOB_ID")
    step = environment.get("SLURM_STEP_ID", "0")
    if step.isdecimal():
        job += 131 * int(step)
    return FIRST_PORT + job % NUM_PORTS


def _find_first_node(environment: Environment) -> str:
    """Return the first of a list of nodes.

    "node[01-03,07],x" → "node01", "rack[1-2]n[01-04]" → "rack1n01".
    """
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST") or ""
    match = re.fullmatch(rf"({_NODE})(,{_NODE})*", nodes)
    if match is None:
        raise ValueError(
            f"SLURM_STEP_NODELIST={nodes!r} is not a list like node[01-03,07],x: "
            "set VIT_JAX_COORDINATOR."
        )
    return re.sub(r"\[([0-9A-Za-z]+)[^\]]*\]", r"\1", match[1])


def _find_gpu_share(environment: Environment, count_gpus: GpuCount) -> tuple[int, ...] | None:
    """Return the task's share of the GPUs that it sees, or None for all."""
    if "JAX_LOCAL_DEVICE_IDS" in environment:  # the user has decided
        return None
    num_tasks = _count_tasks_of_node(environment)
    task = read_number(environment, "SLURM_LOCALID")
    if num_tasks == 1:
        return None
    visible = _count_visible_gpus(environment, count_gpus)
    if visible < num_tasks or _is_bound(environment, visible):
        return None
    if task >= num_tasks:
        raise ValueError(
            f"SLURM_LOCALID={task}, but SLURM_STEP_TASKS_PER_NODE gives this node "
            f"{num_tasks} tasks."
        )
    if visible % num_tasks:
        raise ValueError(
            f"{visible} GPUs cannot be shared evenly by the {num_tasks} tasks of this node: "
            "choose another --ntasks-per-node, or assign them with JAX_LOCAL_DEVICE_IDS."
        )
    share = visible // num_tasks
    return tuple(range(task * share, (task + 1) * share))


def _is_bound(environment: Environment, visible: int) -> bool:
    """Return True if SLURM shows each task its own GPUs only (--gpus-per-task, --gpu-bind)."""
    if "SLURM_GPUS_PER_TASK" in environment or "gpu" in environment.get("SLURM_TRES_PER_TASK", ""):
        return True
    of_node = environment.get("SLURM_STEP_GPUS") or environment.get("SLURM_JOB_GPUS")
    return of_node is not None and visible < len(of_node.split(","))


def _count_tasks_of_node(environment: Environment) -> int:
    """Return the number of tasks on this node; "2(x3),1" stands for nodes with 2, 2, 2 and 1."""
    tasks = environment.get("SLURM_STEP_TASKS_PER_NODE")
    if not tasks:
        tasks = environment.get("SLURM_TASKS_PER_NODE", "")
    counts: list[int] = []
    for group in tasks.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", group)
        if match is None:
            raise ValueError(
                f"SLURM_STEP_TASKS_PER_NODE={tasks!r} is not a list like 2(x3),1: "
                "start the run by srun."
            )
        counts += [int(match[1])] * int(match[2] or 1)
    node = read_number({"SLURM_NODEID": "0"} | dict(environment), "SLURM_NODEID")
    if node >= len(counts):
        raise ValueError(
            f"SLURM_NODEID={node}, but SLURM_STEP_TASKS_PER_NODE={tasks} names {len(counts)} nodes."
        )
    return counts[node]


def _count_visible_gpus(environment: Environment, count_gpus: GpuCount) -> int:
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return count_gpus()
    if visible in ("", "-1", "NoDevFiles"):
        return 0
    return len(visible.split(","))


def find_host(node: str) -> str:
    """Return the name of a node, or its address where this machine cannot resolve the name.

    Names of nodes need not resolve: SLURM itself uses the addresses of slurm.conf.

    Raises:
      ValueError: neither resolves.
    """
    if _resolves(node):
        return node
    address = _read_address(node)
    if address is not None and address != node and _resolves(address):
        return address
    reason = "scontrol shows no address of it here"
    if address is not None:
        reason = f"SLURM's address, {address}, does not either"
    raise ValueError(
        f"SLURM node {node}: its name must resolve on every node. It does not on "
        f"{socket.gethostname()}, and {reason}. "
        f"Check `getent hosts {node}` there, or set {COORDINATOR}=ADDRESS:PORT of the first node."
    )


def _read_address(node: str) -> str | None:
    """Return the address of a node in SLURM's configuration, or None."""
    command = ["scontrol", "show", "node", node, "--oneliner"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    if match := re.search(r"\bNodeAddr=(\S+)", done.stdout):
        return match[1]
    return None


def _resolves(host: str) -> bool:
    try:
        return bool(socket.getaddrinfo(host, None))
    except (OSError, UnicodeError):
        return False


def count_nvidia_gpus() -> int:
    """Return the number of GPUs that the driver shows this process; 0 without a driver."""
    try:
        listing = subprocess.run(
            ["nvidia-smi", "--list-gpus"],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return 0
    return sum(line.startswith("GPU ") for line in listing.stdout.splitlines())
