"""Planned steps of accelerators: a table of `vit_jax/bench/README.md`.

Plans of GPUs are compiled, those of TPUs are by arithmetic. Measured steps are those of
`tests/tools/plan/record_gpus.py`.
"""

from collections.abc import Iterator
from typing import NamedTuple

from docs.tables import describe_origin, find_origin, table
from tests.bench import against_timm
from tests.bench.store import Row, load, store
from vit_jax.tools.machine.hardware import COMPLETE, RECIPE

NAME = "accelerators"
COMMAND = f"python -m tests.bench.record {NAME}"
GIB = 2**30
H100 = "h100:1"
MACHINES = {
    H100: 1,
    "v5e:1x1": 1,
    "v5e:2x4": 8,
}
"""Machines of `vit-jax doctor --hardware`, with their number of devices."""
TIMM_MODELS = ("S/16", "B/16")
TIMM_BATCH = 256
COLUMNS = (
    "program: step",
    "machine",
    "images a device",
    "plan, ms",
    "images/s",
    "GiB",
)


class Step(NamedTuple):
    """A training step on a machine.

    Attributes:
      program: "doctor" or "against_timm".
      network: name of the network, such as "B/16".
      contender: form of the step in `against_timm`, or "".
      images: number of images on each device.
      machine: as in `--topology=`.
    """

    program: str
    network: str
    contender: str
    images: int
    machine: str

    @property
    def name(self) -> str:
        """The name of the row, without the machine."""
        name = f"`{self.program}`: {self.network}"
        if self.contender:
            name += f", {self.contender}"
        return name

    @property
    def key(self) -> str:
        """The name of the row in the file of figures."""
        return f"{self.name} on {self.machine}"


def list_steps() -> Iterator[Step]:
    """Yield the steps of the table."""
    for network in COMPLETE.networks:
        for machine in MACHINES:
            yield Step("doctor", network, "", COMPLETE.images, machine)
    for network in TIMM_MODELS:
        for contender in against_timm.OURS:
            yield Step("against_timm", network, contender, TIMM_BATCH, H100)


def store_plans() -> None:
    """Plan all steps of the table and store their figures."""
    rows = {}
    for step in list_steps():
        print(step.key, flush=True)
        planned = plan_contender(step) if step.contender else plan_doctor(step)
        rows[step.key] = planned | find_origin()
    store(NAME, rows)


def plan_doctor(step: Step) -> Row:
    """Return the plan of a step of `vit-jax doctor --hardware`."""
    from vit_jax.config import load_recipe
    from vit_jax.tools.plan.dataset import IMAGENET
    from vit_jax.tools.plan.estimate import make_plan
    from vit_jax.tools.plan.topology import parse_topology

    topology = parse_topology(step.machine)
    fields = (*COMPLETE.fields, f"global_batch={step.images * topology.num_chips}")
    overrides = [f"--config.{field}" for field in fields]
    config = load_recipe(RECIPE.format(step.network), overrides)
    # A TPU's compiler takes minutes
    plan = make_plan(
        config,
        topology,
        IMAGENET,
        can_compile=not topology.is_tpu,
    )
    assert plan.step_seconds is not None
    assert plan.needed_bytes is not None
    return {"ms": 1e3 * plan.step_seconds, "gib": plan.needed_bytes / GIB}


def plan_contender(step: Step) -> Row:
    """Return the plan of our step in the comparison with timm."""
    from vit_jax.tools.plan import aot, hlo
    from vit_jax.tools.plan.compiled_memory import measure_memory
    from vit_jax.tools.plan.timeline import simulate_step
    from vit_jax.tools.plan.topology import make_collective_seconds, parse_topology

    topology = parse_topology(step.machine)
    devices = aot.list_devices(topology)
    form, unrolled = against_timm.OURS[step.contender]
    _, traced, _ = against_timm.build_ours(
        step.network,
        step.images,
        form,
        unrolled,
        devices[0],
    )
    compiled = aot.compile_program(traced.lower, devices[0])
    assert isinstance(compiled, aot.Executable), compiled
    program = hlo.parse(compiled.text)
    collective_seconds = make_collective_seconds(devices[:1], topology)
    line = simulate_step(
        program,
        topology,
        collective_seconds,
        {},
    )
    return {
        "ms": 1e3 * line.seconds,
        "gib": measure_memory(compiled.memory, program).total / GIB,
    }


def format_table() -> str:
    """Return the table with its command and the origin of its figures."""
    stored = load()[NAME]
    lines = []
    for step in list_steps():
        planned = stored[step.key]
        num_images = step.images * MACHINES[step.machine]
        lines.append(
            [
                step.name,
                step.machine,
                str(step.images),
                f"{planned['ms']:.1f}",
                f"{1e3 * num_images / planned['ms']:,.0f}",
                f"{planned['gib']:.2f}",
            ]
        )
    return table(COLUMNS, lines) + describe_origin(COMMAND, stored.values())
