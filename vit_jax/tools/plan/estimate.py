"""One plan: a config on a machine, compiled where a compiler is installed, otherwise by arithmetic."""

import dataclasses

from vit_jax.config import FinetuneConfig, RunConfig, validate
from vit_jax.sharding.chips import find_chip
from vit_jax.sharding.memory import Memory, require_formulas
from vit_jax.tools.plan import aot, hlo
from vit_jax.tools.plan.arithmetic import Roofline, arithmetic_memory, limit_seconds, roofline
from vit_jax.tools.plan.compiled_memory import compiled_memory
from vit_jax.tools.plan.dataset import Dataset
from vit_jax.tools.plan.timeline import Timeline, step_timeline
from vit_jax.tools.plan.topology import Topology, make_collective_seconds
from vit_jax.train.assemble import architecture_of, assemble
from vit_jax.train.assembly import Assembly


@dataclasses.dataclass(frozen=True)
class Totals:
    """All steps of a recipe; earlier phases are counted at the FLOPs per second of the last one."""

    steps: int  # updates, of all its runs
    images: int  # seen, repeats included
    exaflops: (
        float | None
    )  # 1e18 FLOPs, forward and backward, without recomputation; None for a user's own network
    images_per_second: float  # on all chips
    mfu: (
        float | None
    )  # model FLOPs utilisation: these FLOPs as a fraction of the chips' peak; None likewise
    days: float  # from the first step to the last: no evaluation, no checkpoint, no interruption
    chip_hours: float
    core_days: (
        float  # TensorCores x days, as in the paper (TPU v3, two a chip); of GPUs, GPUs x days
    )
    tpu_v3_core_days: (
        float  # of so many cores of a TPU v3 that do the same arithmetic at the same MFU
    )
    price: float | None  # of all chip-hours; None without a price


@dataclasses.dataclass(frozen=True)
class Plan:
    """The memory, time and cost of a run."""

    config: RunConfig
    topology: Topology
    dataset: Dataset
    run: Assembly  # for the machine
    compiled: (
        aot.Executable | aot.TooLarge | None
    )  # the compiler's result; None where nothing was compiled
    reason: str  # why nothing was compiled, or why the step does not fit; ""
    memory: Memory | None  # None where the step does not fit by the compiler
    timeline: Timeline | None  # of the compiled schedule; None where there is none
    roofline: Roofline | None  # time by arithmetic; None for a network with a user's own code
    price_per_chip_hour: float | None  # in any currency

    @property
    def num_runs(self) -> int:
        """A search for a learning rate trains once for each, and once more with the best."""
        return (
            1 + len(self.config.search.learning_rates)
            if isinstance(self.config, FinetuneConfig)
            else 1
        )

    @property
    def fits(self) -> bool:
        return self.memory is not None and self.memory.total <= self.usable_bytes

    @property
    def needed_bytes(self) -> int | None:
        """Memory of one chip; None if the compiler does not report it."""
        return (
            self.memory.total
            if self.memory is not None
            else getattr(self.compiled, "needed_bytes", None)
        )

    @property
    def usable_bytes(self) -> int:
        """Memory of a chip that a program may use."""
        return getattr(self.compiled, "available_bytes", None) or self.topology.fabric.usable_bytes

    @property
    def step_seconds(self) -> float | None:
        """Time by the compiled schedule, otherwise by arithmetic; None without both."""
        estimate = self.timeline or self.roofline
        return estimate.seconds if estimate is not None else None

    @property
    def attention_form(self) -> str | None:
        """Return the form of attention in the standard blocks; None without these, and where nothing was compiled."""
        form = self.run.attention_form
        return None if form is None or self.compiled is None else form()

    @property
    def limit_seconds(self) -> float | None:
        """Return the least time of a step by the peaks of the chip; None where no formula gives it."""
        return limit_seconds(self.run, self.topology)

    @property
    def totals(self) -> Totals | None:
        """Totals of the complete recipe at `step_seconds`; None if that is None."""
        if self.step_seconds is None:
            return None
        run = self.run
        topology = self.topology
        steps = run.steps.total * self.num_runs
        v3 = find_chip("TPU v3")
        assert v3 is not None
        speed = self.config.global_batch / self.step_seconds
        flops = run.training_flops_per_image
        all_flops = run.training_flops(run.steps.total) * self.num_runs
        # Days are counted in steps of the last phase
        equal_steps = all_flops / (flops * self.config.global_batch) if run.earlier else steps
        days = equal_steps * self.step_seconds / 86400
        chip_days = days * topology.num_chips
        is_standard = run.architecture.is_standard
        return Totals(
            steps=steps,
            images=run.images(run.steps.total) * self.num_runs,
            exaflops=all_flops / 1e18 if is_standard else None,
            images_per_second=speed,
            mfu=speed * flops / topology.num_chips / topology.chip.peak_bf16_flops
            if is_standard
            else None,
            days=days,
            chip_hours=24 * chip_days,
            core_days=chip_days * topology.fabric.cores_per_chip,
            tpu_v3_core_days=chip_days * topology.chip.peak_bf16_flops / v3.peak_bf16_flops,
            price=None
            if self.price_per_chip_hour is None
            else 24 * chip_days * self.price_per_chip_hour,
        )


def make_plan(
    config: RunConfig,
    topology: Topology,
    dataset: Dataset,
    *,
    price_per_chip_hour: float | None = None,
    can_compile: bool = True,
) -> Plan:
    """Plan a run; without `can_compile` by arithmetic even where a compiler is installed.

    Raises:
      ValueError: a config that does not fit the machine or the dataset, or a network with a user's
        own code where nothing can be compiled.
    """
    validate(config)
    reason = aot.missing_compiler(topology) if can_compile else "as requested"
    architecture = architecture_of(config, dataset.num_classes)
    if reason:
        require_formulas(architecture)
    run = assemble(
        config if reason else _by_node(config, topology),
        architecture,
        num_examples=dataset.num_examples,
        devices=topology.stand_ins() if reason else aot.topology_devices(topology),  # type: ignore[arg-type]
    )
    compiled = None if reason else aot.compile_step(run)
    memory = None
    timeline = None
    if isinstance(compiled, aot.Executable):
        program = hlo.parse(compiled.text)
        collective_seconds = make_collective_seconds(run.batch_sharding.mesh.devices.flat, topology)
        memory = compiled_memory(compiled.memory, program)
        timeline = step_timeline(program, topology, collective_seconds, compiled.bundles)
    elif compiled is None:
        memory = arithmetic_memory(run, topology)
    else:
        reason = compiled.message
    return Plan(
        config=run.config,
        topology=topology,
        dataset=dataset,
        run=run,
        compiled=compiled,
        reason=reason,
        memory=memory,
        timeline=timeline,
        roofline=roofline(run, topology) if architecture.is_standard else None,
        price_per_chip_hour=price_per_chip_hour,
    )


def _by_node(config: RunConfig, topology: Topology) -> RunConfig:
    """Give each node of GPUs a replica, unless the config says otherwise: GPUs to compile for name no slices."""
    if topology.is_tpu or topology.num_slices == 1 or config.sharding.num_replicas is not None:
        return config
    sharding = dataclasses.replace(config.sharding, num_replicas=topology.num_slices)
    return dataclasses.replace(config, sharding=sharding)
