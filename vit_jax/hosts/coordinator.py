"""A program: the coordination service of a run, in its own process beside the first process.

Inside the first process it would end with it, and then JAX would abort every other process with a
C++ stack. Started by path, so that it imports nothing of vit_jax; its input gives the time to
continue after the first process.
"""

import errno
import os
import signal
import socket
import sys
import time

PORT_SECONDS = 120
"""Time for the service of the previous run to free its port."""


def main() -> None:
    """Run `coordinator.py ADDRESS NUM_PROCESSES HEARTBEAT_SECONDS SHUTDOWN_SECONDS`.

    It prints "ready", or the reason why it cannot start. The end of input is the end of the first
    process. The service then continues for the number of seconds in the last line, so that the
    others can read the reason.
    """
    address, num_processes, heartbeat, shutdown = sys.argv[1:]
    # All processes of a job receive these signals; the first process decides.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        _wait_for_port(address)
        from jaxlib import _jax

        service = _jax.get_distributed_runtime_service(
            address,
            int(num_processes),
            heartbeat_timeout=int(heartbeat),
            shutdown_timeout=int(shutdown),
        )
    except Exception as error:
        print(f"{type(error).__name__}: {error}".splitlines()[0], flush=True)
        sys.exit(1)
    print("ready", flush=True)

    stay = "0"
    for line in sys.stdin:
        stay = line
    time.sleep(float(stay))
    service.shutdown()


def _wait_for_port(address: str) -> None:
    """Wait until no other program listens there.

    The service would share the port, and messages of two runs would mix.
    """
    port = int(address.rpartition(":")[2])
    deadline = time.monotonic() + PORT_SECONDS
    parent = os.getppid()
    while os.getppid() == parent:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("", port))
                return
            except OSError as error:
                if error.errno != errno.EADDRINUSE or time.monotonic() > deadline:
                    raise
        time.sleep(0.5)
    sys.exit(1)


if __name__ == "__main__":
    main()
