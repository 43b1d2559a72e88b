"""The processes of one run: start of `jax.distributed`, which process speaks, waiting for each other."""

import os

import jax
from jax.experimental import multihost_utils


def start() -> None:
    """Joins the other processes of the run, if the environment says that there are any.

    `VIT_JAX_COORDINATOR` (host:port), `VIT_JAX_NUM_PROCESSES` and `VIT_JAX_PROCESS_ID` start processes by
    explicit address. Without them a run has one process.

    Raises:
      ValueError: some of the three variables are set and others are not.
    """
    names = ("VIT_JAX_COORDINATOR", "VIT_JAX_NUM_PROCESSES", "VIT_JAX_PROCESS_ID")
    given = {name: os.environ[name] for name in names if name in os.environ}
    if not given:
        return
    if len(given) < len(names):
        missing = ", ".join(name for name in names if name not in given)
        raise ValueError(f"{', '.join(given)} is set but {missing} is not: set all three, or none.")
    coordinator, num_processes, process_id = (given[name] for name in names)
    if not (num_processes.isdecimal() and process_id.isdecimal() and int(process_id) < int(num_processes)):
        raise ValueError(
            f"VIT_JAX_NUM_PROCESSES={num_processes} and VIT_JAX_PROCESS_ID={process_id}: give a number of processes, "
            f"and for each process a number below it, from 0."
        )
    jax.distributed.initialize(coordinator, int(num_processes), int(process_id))


def is_first() -> bool:
    """Whether this is the process that prints and writes."""
    return jax.process_index() == 0


def wait_for_all(name: str) -> None:
    """Returns once every process has called this with the same name."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)
