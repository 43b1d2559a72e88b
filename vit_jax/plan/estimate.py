"""One plan: a config on a machine, compiled where a compiler is at hand, by arithmetic where not."""

import dataclasses

from vit_jax.config import FinetuneConfig, RunConfig
from vit_jax.plan import aot, hlo
from vit_jax.plan.arithmetic import Roofline, arithmetic_memory, roofline
from vit_jax.plan.dataset import Dataset
from vit_jax.plan.memory import Memory, compiled_memory
from vit_jax.plan.network import make_collective_seconds
from vit_jax.plan.timeline import Speeds, Timeline, step_timeline
from vit_jax.plan.topology import Topology
from vit_jax.plan.totals import Totals, run_totals
from vit_jax.train.assemble import Assembly, architecture_of, assemble


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a run would need.

    Attributes:
      config: of the run.
      topology: the machine.
      dataset: what it would train on.
      run: its parts, assembled for the machine.
      memory: of one chip by kind; None where the compiler found that the step does not fit.
      needed_bytes: of one chip, in all; None where the compiler does not say.
      usable_bytes: what a program may use of a chip's memory.
      timeline: of the compiled schedule; None where nothing was compiled.
      roofline: of arithmetic.
      totals: of the whole recipe at `step_seconds`.
      program_text: optimised HLO; "" where nothing was compiled.
      compile_seconds: 0 where nothing was compiled.
      reason: why nothing was compiled, or why it did not fit, in a sentence; "".
    """

    config: RunConfig
    topology: Topology
    dataset: Dataset
    run: Assembly
    memory: Memory | None
    needed_bytes: int | None
    usable_bytes: int
    timeline: Timeline | None
    roofline: Roofline
    totals: Totals
    program_text: str
    compile_seconds: float
    reason: str

    @property
    def num_runs(self) -> int:
        return num_runs(self.config)

    @property
    def is_compiled(self) -> bool:
        return self.compile_seconds > 0

    @property
    def fits(self) -> bool:
        return self.memory is not None and self.memory.total <= self.usable_bytes

    @property
    def step_seconds(self) -> float:
        return self.timeline.seconds if self.timeline is not None else self.roofline.seconds


def num_runs(config: RunConfig) -> int:
    """How often a recipe trains: a search for a learning rate does so for each, and once more with the best."""
    return 1 + len(config.search.learning_rates) if isinstance(config, FinetuneConfig) else 1


def make_plan(
    config: RunConfig,
    topology: Topology,
    dataset: Dataset,
    *,
    price_per_chip_hour: float | None = None,
    can_compile: bool = True,
) -> Plan:
    """Plans a run.

    Args:
      config: as loaded.
      topology: from `parse_topology`.
      dataset: from `choose_dataset`.
      price_per_chip_hour: in any currency.
      can_compile: False plans by arithmetic even where a compiler is at hand.

    Raises:
      ValueError: a config that does not fit the machine or the dataset.
    """
    reason = "" if can_compile else "as asked for"
    if can_compile and not topology.is_tpu:
        reason = "compilers for GPUs need the GPU"
    elif can_compile and not aot.has_compiler():
        reason = "libtpu is not installed here; pip install 'vit_jax[tpu]' brings it"
    run = assemble(
        config,
        architecture_of(config, dataset.num_classes),
        num_examples=dataset.num_examples,
        devices=topology.stand_ins() if reason else aot.topology_devices(topology),  # type: ignore[arg-type]
    )
    result = None if reason else aot.compile_step(run)
    memory, timeline, usable = None, None, topology.fabric.usable_bytes
    if isinstance(result, aot.Executable):
        program = hlo.parse(result.text)
        memory, timeline = compiled_memory(result, program), step_timeline(program, _speeds(run, topology))
    elif result is None:
        memory = arithmetic_memory(run, topology)
    else:
        usable = result.available_bytes or usable
    needed = memory.total if memory is not None else getattr(result, "needed_bytes", None)
    bound = roofline(run, topology)
    return Plan(
        config=config,
        topology=topology,
        dataset=dataset,
        run=run,
        memory=memory,
        needed_bytes=needed,
        usable_bytes=usable,
        timeline=timeline,
        roofline=bound,
        totals=run_totals(
            run.architecture,
            topology,
            steps=run.steps.total * num_runs(config),
            global_batch=config.global_batch,
            step_seconds=timeline.seconds if timeline is not None else bound.seconds,
            price_per_chip_hour=price_per_chip_hour,
        ),
        program_text=result.text if isinstance(result, aot.Executable) else "",
        compile_seconds=getattr(result, "compile_seconds", 0.0),
        reason=reason or (result.message if isinstance(result, aot.TooLarge) else ""),
    )


def _speeds(run: Assembly, topology: Topology) -> Speeds:
    devices = list(run.batch_sharding.mesh.devices.flat)
    return Speeds(
        clock_hertz=topology.fabric.clock_hertz,
        memory_bytes_per_second=topology.chip.memory_bandwidth_bytes_per_second,
        network_bytes_per_second=topology.fabric.network_bytes_per_second,
        collective_seconds=make_collective_seconds(devices, topology),
    )
