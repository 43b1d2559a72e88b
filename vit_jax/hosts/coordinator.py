"""A program: the coordination service of a run, in a process of its own beside the first process.

In the first process it would die with it, and with the service every other process at once, with a C++ stack instead
of a message. Started by path, so that it imports nothing of vit_jax; told on its input how long to stay.
"""

import errno
import os
import signal
import socket
import sys
import time

PORT_SECONDS = 120  # a run that was started again may find the service of the last one still there


def main() -> None:
    """`coordinator.py ADDRESS NUM_PROCESSES HEARTBEAT_SECONDS SHUTDOWN_SECONDS`; prints "ready", or why not.

    At the end of input the first process is gone. The service stays for as many seconds as the last line said, so that
    the others can hear of it.
    """
    address, num_processes, heartbeat, shutdown = sys.argv[1:5]
    stay = "0"
    for number in (signal.SIGINT, signal.SIGTERM):  # sent to all processes of a job: the first one decides
        signal.signal(number, signal.SIG_IGN)
    try:
        _wait_for_port(address)
        from jaxlib import _jax

        service = _jax.get_distributed_runtime_service(
            address, int(num_processes), heartbeat_timeout=int(heartbeat), shutdown_timeout=int(shutdown)
        )
    except Exception as error:
        print(f"{type(error).__name__}: {error}".splitlines()[0], flush=True)
        sys.exit(1)
    print("ready", flush=True)
    for line in sys.stdin:
        stay = line
    time.sleep(float(stay))
    service.shutdown()


def _wait_for_port(address: str) -> None:
    """The service shares a port with another that listens there already, and runs would mix: so look first."""
    port, deadline = int(address.rpartition(":")[2]), time.monotonic() + PORT_SECONDS
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
