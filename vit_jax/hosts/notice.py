"""Compute Engine's word that this machine will be taken away, handed on as SIGTERM.

A spot machine has about 30 seconds from it on, some of which pass before the system's own SIGTERM arrives. SLURM and
Kubernetes send theirs at once and need nothing of this.
"""

import os
import pathlib
import signal
import threading
import urllib.request

PRODUCT = pathlib.Path("/sys/class/dmi/id/product_name")
METADATA = "http://metadata.google.internal/computeMetadata/v1/instance"
SIGNS = {"preempted": "TRUE", "maintenance-event": "TERMINATE_ON_HOST_MAINTENANCE"}
POLL_SECONDS = 3.0
MAX_FAILURES = 5  # in a row: a pod may see the machine and not be allowed to ask it


class Notice:
    """A thread that asks, where there is somebody to ask, until the notice has come or `stop` is called.

    Args:
      metadata: address of the machine's metadata.
      product: file with the machine's kind.
    """

    def __init__(self, metadata: str = METADATA, product: pathlib.Path = PRODUCT):
        self._metadata, self._product = metadata, product
        self._is_stopped = threading.Event()

    def start(self) -> None:
        """Has no effect elsewhere than on Compute Engine."""
        try:
            is_there = self._product.read_text().strip() == "Google Compute Engine"
        except OSError:
            is_there = False
        if is_there:
            threading.Thread(target=self._ask, daemon=True).start()

    def stop(self) -> None:
        """No SIGTERM comes from here any more."""
        self._is_stopped.set()

    def _ask(self) -> None:
        failures = 0
        while failures < MAX_FAILURES and not self._is_stopped.wait(POLL_SECONDS):
            try:
                has_come = any(self._read(name) == word for name, word in SIGNS.items())
            except OSError:  # those of urllib are
                failures += 1
                continue
            failures = 0
            if has_come:
                os.kill(os.getpid(), signal.SIGTERM)
                return

    def _read(self, name: str) -> str:
        request = urllib.request.Request(f"{self._metadata}/{name}", headers={"Metadata-Flavor": "Google"})
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # the address is the machine's own
        with direct.open(request, timeout=POLL_SECONDS) as answer:
            return str(answer.read().decode().strip())
