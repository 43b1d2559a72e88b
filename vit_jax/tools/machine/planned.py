"""The figures of `vit-jax plan` for the devices of this process, from another process.

A plan uses no device, and needs variables that libtpu reads when it is loaded. This process has
already loaded it.
"""

import json
import math
import subprocess
import sys
from collections.abc import Sequence
from typing import NamedTuple

from vit_jax.sharding.fabrics import find_fabric_of_device
from vit_jax.text.printable import first_line
from vit_jax.tools.plan.topology import Device, parse_topology

LIMIT_SECONDS = 150  # longer than any plan of the report takes on the hosts of accelerators


class Planned(NamedTuple):
    """Figures of a plan; None without a plan, and `basis` is then the reason."""

    basis: str  # for example "compiled for h100:1"
    seconds: float | None = None  # time of a step
    num_bytes: int | None = None  # memory of one device

    @property
    def is_compiled(self) -> bool:
        return self.basis.startswith("compiled")


def find_topology(devices: Sequence[Device]) -> str | None:
    """Return the value of `--topology=` for all devices of a machine; None if `plan` has none."""
    fabric = find_fabric_of_device(devices[0].device_kind)
    if fabric is None:
        return None
    lengths = []
    for axis in range(fabric.num_axes):
        lengths.append(len({device.coords[axis] for device in devices}))
    if not lengths:
        lengths.append(len(devices))
    if math.prod(lengths) != len(devices):
        return None
    name = f"{fabric.kind}:{'x'.join(map(str, lengths))}"
    try:
        return parse_topology(name).name
    except ValueError:
        return None


def plan(
    recipe: str,
    overrides: Sequence[str],
    devices: Sequence[Device],
) -> Planned:
    """Return the figures of a plan for these devices, or the reason why there are none."""
    topology = find_topology(devices)
    if topology is None:
        return Planned(f"plan does not know {len(devices)} x {devices[0].device_kind}")
    words = ["plan", f"--config={recipe}", *overrides, f"--topology={topology}", "--json"]
    command = [sys.executable, "-P", "-m", "vit_jax", *words]
    try:
        process = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=LIMIT_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return Planned(f"plan for {topology} took longer than {LIMIT_SECONDS} s")
    if process.returncode:
        lines = process.stderr.strip().splitlines() or [""]
        return Planned(f"plan for {topology} failed with code {process.returncode}: {lines[-1]}")

    figures = json.loads(process.stdout)
    seconds = figures["step_seconds"]
    num_bytes = figures["needed_bytes"]
    if seconds is None:
        return Planned(f"plan for {topology}: {first_line(figures['reason'])}", None, num_bytes)
    return Planned(f"{figures['basis']} for {topology}", seconds, num_bytes)
