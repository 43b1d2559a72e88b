"""One plan: a config on a machine, compiled if a compiler is installed, else by arithmetic."""

import dataclasses
from collections.abc import Sequence

from vit_jax.config import Architecture, FinetuneConfig, RunConfig, validate
from vit_jax.sharding.chips import find_chip
from vit_jax.sharding.memory import Memory, require_formulas
from vit_jax.storage import is_address
from vit_jax.storage.files import expand_path
from vit_jax.tools.plan import aot, hlo
from vit_jax.tools.plan.arithmetic import (
    Roofline,
    estimate_limit,
    estimate_memory,
    estimate_roofline,
)
from vit_jax.tools.plan.compiled_memory import measure_memory
from vit_jax.tools.plan.dataset import Dataset
from vit_jax.tools.plan.timeline import Timeline, simulate_step
from vit_jax.tools.plan.topology import Device, Topology, make_collective_seconds
from vit_jax.train.assemble import assemble
from vit_jax.train.assembly import Assembly
from vit_jax.train.starting_weights import read_network, set_open_size
from vit_jax.train.state_builder import architecture_of
from vit_jax.weights.hub import is_hub_address


@dataclasses.dataclass(frozen=True)
class Totals:
    """All steps of a recipe; earlier phases are counted at the FLOPs per second of the last one.

    Attributes:
      steps: updates, of all its runs.
      images: seen, repeats included.
      exaflops: 1e18 FLOPs, forward and backward, without recomputation; None for a custom network.
      images_per_second: on all chips.
      mfu: model FLOPs utilisation, these FLOPs as a fraction of the chips' peak; None for a custom
        network.
      days: from the first step to the last, without evaluation, checkpoints and interruptions.
      chip_hours: hours of all chips.
      core_days: TensorCores x days, as in the paper (TPU v3, two a chip); for GPUs, GPUs x days.
      tpu_v3_core_days: core-days of a TPU v3 for the same arithmetic at the same MFU.
      price: cost of all chip-hours; None without a price.
    """

    steps: int
    images: int
    exaflops: float | None
    images_per_second: float
    mfu: float | None
    days: float
    chip_hours: float
    core_days: float
    tpu_v3_core_days: float
    price: float | None


@dataclasses.dataclass(frozen=True)
class Network:
    """The network of a run, and the weights or the name that decide it; "" for pre-training."""

    architecture: Architecture
    origin: str = ""


def find_network(config: RunConfig, num_classes: int) -> Network:
    """Return the network of a run, of a fine-tuning run by its weights, as the run recognises them.

    Raises:
      ValueError: the weights cannot be read or do not fit the config; without weights on this
        machine, the config names no network.
    """
    start = config.init_from
    if not isinstance(config, FinetuneConfig) or start is None:
        return Network(architecture_of(config, num_classes))
    is_elsewhere = is_address(start) or is_hub_address(start)
    if config.model.name is None or is_elsewhere or expand_path(start).exists():
        return Network(*read_network(config, num_classes))
    origin = f"{start} is not on this machine; the network is {config.model.name} by its name"
    return Network(architecture_of(config, num_classes), origin)


@dataclasses.dataclass(frozen=True)
class Plan:
    """The memory, time and cost of a run.

    Attributes:
      config: config of the run on the machine.
      topology: the machine.
      dataset: numbers of images and classes.
      network: the network, and the weights that decide it.
      run: assembled for the machine.
      compiled: the compiler's result; None if nothing was compiled.
      reason: why nothing was compiled, or why the step does not fit; "".
      memory: None if the step does not fit by the compiler.
      timeline: time of the compiled schedule; None without one.
      roofline: time by arithmetic; None for a custom network.
      price_per_chip_hour: in any currency.
    """

    config: RunConfig
    topology: Topology
    dataset: Dataset
    network: Network
    run: Assembly
    compiled: aot.Executable | aot.TooLarge | None
    reason: str
    memory: Memory | None
    timeline: Timeline | None
    roofline: Roofline | None
    price_per_chip_hour: float | None

    @property
    def num_runs(self) -> int:
        """A search for a learning rate trains once for each, and once more with the best."""
        if isinstance(self.config, FinetuneConfig):
            return 1 + len(self.config.search.learning_rates)
        return 1

    @property
    def fits(self) -> bool:
        return self.memory is not None and self.memory.total <= self.usable_bytes

    @property
    def needed_bytes(self) -> int | None:
        """Memory of one chip; None if the compiler does not report it."""
        if self.memory is not None:
            return self.memory.total
        if isinstance(self.compiled, aot.TooLarge):
            return self.compiled.needed_bytes
        return None

    @property
    def usable_bytes(self) -> int:
        """Memory of a chip that a program may use."""
        if isinstance(self.compiled, aot.TooLarge) and self.compiled.available_bytes:
            return self.compiled.available_bytes
        return self.topology.fabric.usable_bytes

    @property
    def step_seconds(self) -> float | None:
        """Time by the compiled schedule, otherwise by arithmetic; None without both."""
        if self.timeline is not None:
            return self.timeline.seconds
        if self.roofline is not None:
            return self.roofline.seconds
        return None

    @property
    def attention_form(self) -> str | None:
        """The form of attention in the standard blocks.

        None: there are no such blocks, or nothing was compiled.
        """
        get_form = self.run.attention_form
        if get_form is None or self.compiled is None:
            return None
        return get_form()

    @property
    def limit_seconds(self) -> float | None:
        """The least time of a step by the peaks of the chip; None if no formula gives it."""
        return estimate_limit(self.run, self.topology)

    @property
    def totals(self) -> Totals | None:
        """Totals of the complete recipe at `step_seconds`; None if that is None."""
        if self.step_seconds is None:
            return None
        run = self.run
        topology = self.topology
        global_batch = self.config.global_batch
        steps = run.steps.total * self.num_runs
        flops_per_image = run.training_flops_per_image
        flops = run.training_flops(run.steps.total) * self.num_runs

        # Days are counted in steps of the last phase
        equal_steps: float = steps
        if run.earlier:
            equal_steps = flops / (flops_per_image * global_batch)
        days = equal_steps * self.step_seconds / 86400
        chip_days = days * topology.num_chips
        v3 = find_chip("TPU v3")
        assert v3 is not None

        images_per_second = global_batch / self.step_seconds
        peak_flops = topology.chip.peak_bf16_flops
        exaflops = None
        mfu = None
        if run.architecture.is_standard:
            exaflops = flops / 1e18
            mfu = images_per_second * flops_per_image / topology.num_chips / peak_flops
        price = None
        if self.price_per_chip_hour is not None:
            price = 24 * chip_days * self.price_per_chip_hour
        return Totals(
            steps=steps,
            images=run.images(run.steps.total) * self.num_runs,
            exaflops=exaflops,
            images_per_second=images_per_second,
            mfu=mfu,
            days=days,
            chip_hours=24 * chip_days,
            core_days=chip_days * topology.fabric.cores_per_chip,
            tpu_v3_core_days=chip_days * peak_flops / v3.peak_bf16_flops,
            price=price,
        )


def make_plan(
    config: RunConfig,
    topology: Topology,
    dataset: Dataset,
    *,
    network: Network | None = None,
    price_per_chip_hour: float | None = None,
    can_compile: bool = True,
) -> Plan:
    """Plan a run; without `can_compile` by arithmetic even where a compiler is installed.

    `network` is the result of `find_network`, which is called without it.

    Raises:
      ValueError: a config that does not fit the machine or the dataset, or a custom network where
        nothing can be compiled.
    """
    validate(config)
    if network is None:
        network = find_network(config, dataset.num_classes)
    architecture = network.architecture
    config = set_open_size(config, architecture)
    reason = aot.explain_missing_compiler(topology) if can_compile else "as requested"
    devices: Sequence[Device]
    if reason:
        require_formulas(architecture)
        devices = topology.stand_ins()
    else:
        config = _add_replicas(config, topology)
        devices = aot.list_devices(topology)
    run = assemble(config, architecture, num_examples=dataset.num_examples, devices=devices)

    compiled = None
    memory: Memory | None = None
    timeline = None
    if reason:
        memory = estimate_memory(run, topology)
    else:
        compiled = aot.compile_step(run)
    if isinstance(compiled, aot.TooLarge):
        reason = compiled.message
    elif compiled is not None:
        program = hlo.parse(compiled.text)
        collective_seconds = make_collective_seconds(run.batch_sharding.mesh.devices.flat, topology)
        memory = measure_memory(compiled.memory, program)
        timeline = simulate_step(program, topology, collective_seconds, compiled.bundles)

    return Plan(
        config=run.config,
        topology=topology,
        dataset=dataset,
        network=network,
        run=run,
        compiled=compiled,
        reason=reason,
        memory=memory,
        timeline=timeline,
        roofline=estimate_roofline(run, topology) if architecture.is_standard else None,
        price_per_chip_hour=price_per_chip_hour,
    )


def _add_replicas(config: RunConfig, topology: Topology) -> RunConfig:
    """Give each node of GPUs a replica, unless the config says otherwise.

    GPUs to compile for name no slices.
    """
    if topology.is_tpu or topology.num_slices == 1 or config.sharding.num_replicas is not None:
        return config
    sharding = dataclasses.replace(config.sharding, num_replicas=topology.num_slices)
    return dataclasses.replace(config, sharding=sharding)
