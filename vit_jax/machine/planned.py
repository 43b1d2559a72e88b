"""The figures of `vit-jax plan` for the devices of this process, from a process of its own.

A plan uses no device, and needs variables that libtpu reads when it is loaded, which has happened here.
"""

import contextlib
import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from vit_jax.files import first_line
from vit_jax.plan.topology import parse_topology
from vit_jax.sharding.fabrics import fabric_of

MAX_CHARACTERS = 2**22  # of what a plan prints; a report has some thousands
LIMIT_SECONDS = 150  # longer than any plan of the report takes on the hosts of accelerators


class Planned(NamedTuple):
    """Figures of a plan; None without a plan, and `basis` is then the reason."""

    basis: str  # such as "compiled for h100:1"
    seconds: float | None = None  # of a step
    num_bytes: int | None = None  # of one device

    @property
    def is_compiled(self) -> bool:
        return self.basis.startswith("compiled")


def topology_of(devices: Sequence[Any]) -> str | None:
    """Return the name that `--topology=` has for all devices of a machine; None where `plan` does not know it."""
    fabric = fabric_of(devices[0].device_kind)
    if fabric is None:
        return None
    lengths = [len(devices)]
    if fabric.num_axes:
        lengths = [len({device.coords[axis] for device in devices}) for axis in range(fabric.num_axes)]
    name = f"{fabric.kind}:{'x'.join(map(str, lengths))}"
    if math.prod(lengths) != len(devices):
        return None
    try:
        return parse_topology(name).name
    except ValueError:
        return None


@contextlib.contextmanager
def planning(recipe: str, overrides: Sequence[str], devices: Sequence[Any]) -> Iterator[Callable[[], Planned]]:
    """Start a plan; the function waits for its figures, and the process ends with the context."""
    topology = topology_of(devices)
    if topology is None:
        yield lambda: Planned(f"plan does not know {len(devices)} x {devices[0].device_kind}")
        return
    words = ["plan", f"--config={recipe}", *overrides, f"--topology={topology}", "--json"]
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = subprocess.Popen([sys.executable, "-P", "-m", "vit_jax", *words], stdout=out, stderr=err)

        def figures() -> Planned:
            try:
                code = process.wait(LIMIT_SECONDS)
            except subprocess.TimeoutExpired:
                return Planned(f"plan for {topology} took longer than {LIMIT_SECONDS} s")
            for file in (out, err):
                file.seek(0)
            if code:
                last = (err.read(MAX_CHARACTERS).strip().splitlines() or [""])[-1]
                return Planned(f"plan for {topology} failed with code {code}: {last}")
            plan = json.loads(out.read(MAX_CHARACTERS))
            if plan["step_seconds"] is None:
                return Planned(f"plan for {topology}: {first_line(plan['reason'])}", None, plan["needed_bytes"])
            return Planned(f"{plan['basis']} for {topology}", plan["step_seconds"], plan["needed_bytes"])

        try:
            yield figures
        finally:
            process.kill()
            process.wait()
