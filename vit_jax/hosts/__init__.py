"""The processes of one run: they find each other, one prints and writes, and all end together.

`cluster` and `slurm` read the environment, `join` starts `jax.distributed`, `peers` monitors the
other processes, `notice` polls the platform, `exits` has exit codes.
"""

import atexit
import contextlib
import itertools
import json
import os
import sys
from collections.abc import Iterator
from subprocess import Popen
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from vit_jax.hosts import exits, peers
from vit_jax.hosts.internals import global_state
from vit_jax.hosts.join import SHUTDOWN_SECONDS, find_this_process, join, tell_service
from vit_jax.hosts.peers import MEETING_SECONDS, PeerMonitor, Report, Verdict
from vit_jax.imports.backend import explain_backend_errors

__all__ = [
    "PeerMonitor",
    "Report",
    "Verdict",
    "ends_together",
    "exits",
    "gather",
    "is_first",
    "start",
    "this_process",
    "wait_for_all",
]

_LOST_SECONDS = "VIT_JAX_LOST_SECONDS"
_folders = itertools.cycle(("vit_jax/gathered/even", "vit_jax/gathered/odd"))
"""Folders of the store, for `gather`."""
_this_process: PeerMonitor | None = None


def start() -> None:
    """Join the other processes of the run, if any; a second call has no effect.

    TPU pods, SLURM, Kubernetes JobSets and Open MPI are recognised. Elsewhere set
    `VIT_JAX_COORDINATOR` (host:port), `VIT_JAX_NUM_PROCESSES` and `VIT_JAX_PROCESS_ID`.

    Raises:
      ValueError: variables are missing or contradict each other, or the first process's port is
        taken.
    """
    global _this_process
    if _this_process is not None:
        return
    lost_seconds = _read_lost_seconds()
    process = None
    service = None
    if not jax.distributed.is_initialized():
        process = find_this_process()
    if process is not None:
        service = join(process, lost_seconds + 10)

    if global_state.client is None:
        _this_process = PeerMonitor(None, 0, 1)
        return
    _this_process = PeerMonitor(
        global_state.client,
        global_state.process_id,
        global_state.num_processes,
        lost_seconds=lost_seconds,
        leave=lambda exit_code: _leave(exit_code, service),
    )
    _this_process.start()
    atexit.register(_end, _this_process, service)
    _connect()
    if process is not None and process.process_id == 0:
        print(
            f"{process.num_processes} processes by {process.launcher}, "
            f"the first at {process.coordinator}",
            flush=True,
        )


def _connect() -> None:
    """Connect the CPUs of all processes while these are together.

    Gloo does so at the first collective, gives up after 30 s, and JAX has no option for it. Later
    it waits. On a busy machine compiling alone may differ by as much: processes meet again before
    the collective itself.
    """
    wait_for_all("devices")
    if jax.process_count() == 1 or jax.default_backend() != "cpu":
        return
    split = NamedSharding(Mesh(jax.devices(), "device"), PartitionSpec("device"))
    ones = jax.make_array_from_callback(
        (jax.device_count(),), split, lambda _: np.ones(1, np.float32)
    )
    total = jax.jit(jnp.sum).lower(ones).compile()
    wait_for_all("compiled")
    total(ones).block_until_ready()
    # This collective has another group of devices: one of each process.
    multihost_utils.process_allgather(np.zeros(1))


def _read_lost_seconds() -> float:
    text = os.environ.get(_LOST_SECONDS, f"{peers.LOST_SECONDS:.0f}")
    if not text.isdecimal() or not 5 <= int(text) <= 90:
        raise ValueError(
            f"{_LOST_SECONDS}={text}: give 5 to 90, the seconds without a sign of life."
        )
    return float(text)


def _end(process: PeerMonitor, service: Popen | None) -> None:
    """End the processes and threads that `start` began; called last, before JAX shuts down."""
    uncaught = getattr(sys, "last_value", None)
    if uncaught is not None:
        process.fail(uncaught)
    client = global_state.client
    assert client is not None
    process.end(lambda: client.wait_at_barrier("vit_jax end", SHUTDOWN_SECONDS * 1000))
    _dismiss(service, seconds=1)


def _leave(exit_code: int, service: Popen | None) -> None:
    _dismiss(service, seconds=10)  # so that the others can read the reason
    exits.leave_at_once(exit_code)


def _dismiss(service: Popen | None, seconds: int) -> None:
    """Make the coordination service end this number of seconds after this process."""
    if service is None or service.stdin is None or service.stdin.closed:
        return
    tell_service(service, seconds)
    os.dup(service.stdin.fileno())  # stays open until the process has ended, without a warning
    service.stdin.close()
    service.returncode = 0  # no one waits for it


@contextlib.contextmanager
def ends_together(*orderly: type[BaseException]) -> Iterator[None]:
    """End every process of the run at an error in this context; a message names the process.

    Args:
      *orderly: exceptions that all processes raise together and that are not errors.
    """
    try:
        with explain_backend_errors():
            yield
    except orderly:
        raise
    except BaseException as error:
        if _this_process is not None:
            _this_process.fail(error)
        raise


def this_process() -> PeerMonitor:
    """Return the peer monitor of this process, once the run has started."""
    global _this_process
    if _this_process is None:
        _this_process = PeerMonitor(None, 0, 1)
    return _this_process


def is_first() -> bool:
    """Return True in the process that prints and writes."""
    return jax.process_index() == 0


def wait_for_all(name: str) -> None:
    """Return once every process has called this with the same name, however late one comes.

    Use few names, again and again: the service keeps each for as long as the run lasts.
    """
    if jax.process_count() > 1:
        assert global_state.client is not None
        global_state.client.wait_at_barrier(f"vit_jax/{name}", MEETING_SECONDS * 1000)


def gather(value: Any) -> list[Any]:
    """Return the values of all processes, as JSON has them, by process id.

    Every process must call this as often as the others.
    """
    client = global_state.client
    if client is None or jax.process_count() == 1:
        return [json.loads(json.dumps(value))]
    # A process that arrives here has read the values of the previous call. Two folders in turn
    # suffice, and the store does not grow.
    folder = next(_folders)
    client.key_value_set(f"{folder}/{jax.process_index()}", json.dumps(value), allow_overwrite=True)
    wait_for_all("gathered")
    texts = dict(client.key_value_dir_get(folder))
    values = []
    for process in range(jax.process_count()):
        values.append(json.loads(texts[f"{folder}/{process}"]))
    return values
