"""Compute Engine's preemption notice, converted to SIGTERM.

A spot machine has about 30 seconds after it, some of which pass before the system's own SIGTERM.
SLURM and Kubernetes send theirs at once.
"""

import os
import pathlib
import signal
import threading
import urllib.request
from collections.abc import Callable

PRODUCT = pathlib.Path("/sys/class/dmi/id/product_name")
METADATA = "http://metadata.google.internal/computeMetadata/v1/instance"
SIGNS = {"preempted": "TRUE", "maintenance-event": "TERMINATE_ON_HOST_MAINTENANCE"}
POLL_SECONDS = 3.0
RESPONSE_SECONDS = 3.0
MAX_FAILURES = 5
"""Failures in a row after which polling ends: a pod may have no access to the metadata."""


def read_metadata(name: str) -> str:
    """Return an entry of the machine's metadata.

    Raises:
      OSError: there is no access to the server.
    """
    request = urllib.request.Request(f"{METADATA}/{name}", headers={"Metadata-Flavor": "Google"})
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # the address is local
    with direct.open(request, timeout=RESPONSE_SECONDS) as response:
        return str(response.read().decode().strip())


class Notice:
    """A thread that polls the machine's metadata until the notice has come or `stop` is called.

    `read` returns an entry of the metadata by its name.
    """

    def __init__(self, read: Callable[[str], str] = read_metadata) -> None:
        self._read = read
        self._is_stopped = threading.Event()

    def start(self) -> None:
        """Start polling; without effect elsewhere than on Compute Engine."""
        try:
            is_there = PRODUCT.read_text().strip() == "Google Compute Engine"
        except OSError:
            is_there = False
        if is_there:
            threading.Thread(target=self.poll, daemon=True).start()

    def stop(self) -> None:
        """Send no SIGTERM from now on."""
        self._is_stopped.set()

    def poll(self) -> None:
        """Send SIGTERM once the notice has come; called by the thread.

        It ends too after `MAX_FAILURES` or `stop`.
        """
        failures = 0
        while failures < MAX_FAILURES and not self._is_stopped.wait(POLL_SECONDS):
            try:
                has_come = any(self._read(name) == word for name, word in SIGNS.items())
            except OSError:  # urllib's errors are OSErrors
                failures += 1
                continue
            failures = 0
            if has_come:
                os.kill(os.getpid(), signal.SIGTERM)
                return
