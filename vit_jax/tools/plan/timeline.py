"""Time of one step: a simulation of the compiled schedule.

The core executes instructions in order: on a TPU in XLA's cycles, on a GPU in the time of each
kernel (`gpu_kernels.py`). XLA counts no cycles of a Pallas kernel: it takes the bundles of its
schedule times the programs of its grid that one core runs. Beside the core work three queues: the
links carry collectives, the network exchanges between slices, and the memory bus prefetches; a
`-done` waits for them. A collective without start and done blocks the core. A loop costs its body
times its length, and a conditional its longest branch. A conditional of metrics costs its shortest
branch, since most steps are not logged. Not modelled: core and prefetches sharing the bus,
stragglers, hosts.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Mapping

from vit_jax.sharding.fabrics import NETWORK_SECONDS, PASSES
from vit_jax.tools.plan.gpu_kernels import Kernels
from vit_jax.tools.plan.hlo import Instruction, Program, list_members
from vit_jax.tools.plan.topology import CollectiveSeconds, Topology

PHASES = (  # by the names of operations in models and steps
    "embedding",
    "resnet",
    "norm",
    "attention",
    "mlp",
    "dropout",
    "pooling",
    "head",
    "loss",
    "optimizer",
    "average",
    "metrics",
)
_PHASE = re.compile(rf"\b({'|'.join(PHASES)})\b")
_PREFETCHES = ("copy-start", "slice-start", "async-slice-start")
_SUMS = (  # fields of a timeline that a loop multiplies
    "compute_seconds",
    "kernel_seconds",
    "collective_seconds",
    "prefetch_seconds",
    "unknown_loops_pass_seconds",
    "num_unknown_kernels",
)
# A collective may overlap with several fusions; XLA's names distinguish its start and end from its
# middle.
_FUSED_START = "async-collective-start"
_FUSED_MIDDLE = "async_collective_fusion"


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective of a step."""

    operation: str  # for example "all-reduce"
    num_bytes: int  # size of the complete array
    devices: tuple[int, ...]  # positions in the mesh of one group
    source: str  # the operation it comes from, by its name in jax
    count: int  # executions in a step
    seconds: float  # time of one execution
    waited_seconds: float  # time that the core waits for one execution


@dataclasses.dataclass
class Timeline:
    """The time of a step."""

    compute_seconds: float = 0.0  # the core computes what XLA compiled
    kernel_seconds: float = 0.0  # the core computes Pallas kernels, or those of cuBLAS and cuDNN
    collective_seconds: float = 0.0  # the core waits for collectives
    prefetch_seconds: float = 0.0  # the core waits for memory
    # Seconds of the core, kernels included
    phases: dict[str, float] = dataclasses.field(default_factory=dict)
    collectives: tuple[Collective, ...] = ()  # all of them, the most expensive first
    # Loops of unknown length, counted as one pass, as in the random numbers of mixup
    num_unknown_loops: int = 0
    unknown_loops_pass_seconds: float = 0.0  # one pass of each of these
    # Kernels without a count of cycles or of programs, counted as nothing
    num_unknown_kernels: int = 0

    @property
    def seconds(self) -> float:
        return (
            self.compute_seconds
            + self.kernel_seconds
            + self.collective_seconds
            + self.prefetch_seconds
        )

    def add(self, other: "Timeline", times: int) -> None:
        """Append `other`, repeated `times` times."""
        for name in _SUMS:
            setattr(self, name, getattr(self, name) + times * getattr(other, name))
        for phase, seconds in other.phases.items():
            self.phases[phase] = self.phases.get(phase, 0.0) + times * seconds
        repeated = []
        for collective in other.collectives:
            count = collective.count * times
            repeated.append(dataclasses.replace(collective, count=count))
        self.collectives += tuple(repeated)
        self.num_unknown_loops += other.num_unknown_loops


def simulate_step(
    program: Program,
    topology: Topology,
    collective_seconds: CollectiveSeconds,
    bundles: Mapping[str, int],
) -> Timeline:
    """Estimate one execution of the program on a machine with these times of collectives.

    `bundles` are the cycles of one program of each kernel, by the name of its instruction.
    """
    simulation = _Simulation(program, topology, collective_seconds, bundles)
    timeline = simulation.run(program.entry)
    by_cost = sorted(
        timeline.collectives,
        key=lambda collective: collective.count * collective.waited_seconds,
        reverse=True,
    )
    return dataclasses.replace(timeline, collectives=tuple(by_cost))


class _Simulation:
    """Simulates computations; remembers which instructions contain a collective."""

    def __init__(
        self,
        program: Program,
        topology: Topology,
        collective_seconds: CollectiveSeconds,
        bundles: Mapping[str, int],
    ):
        self.program = program
        self.topology = topology
        self.collective_seconds = collective_seconds
        self.gpu_kernels = None
        if not topology.is_tpu:
            self.gpu_kernels = Kernels(program, topology.chip)
        self.find_collective = functools.cache(self._find_collective)
        # By program, not by instruction: XLA compiles one of equal kernels.
        self.bundles = {}
        for instruction in program.list_instructions():
            if instruction.is_kernel and instruction.name in bundles:
                self.bundles[instruction.kernel] = bundles[instruction.name]

    def run(self, computation: str) -> Timeline:
        """Simulate one pass, starting with idle links and bus."""
        clocks = _Clocks()
        for instruction in self.program.computations[computation]:
            self._execute(instruction, clocks)
        return clocks.timeline

    def _execute(self, instruction: Instruction, clocks: "_Clocks") -> None:
        opcode = instruction.opcode
        if opcode == "while":
            one_pass, num_passes = self._simulate_loop(instruction)
            clocks.enter(one_pass, num_passes)
        elif opcode in ("call", "conditional"):
            branch = self._simulate_branches(instruction)
            clocks.enter(branch, times=1)
        elif opcode in _PREFETCHES:
            seconds = self._estimate_prefetch(instruction)
            clocks.start(instruction.name, "bus", seconds)
        elif opcode == "recv":
            exchange = self._describe_exchange(instruction)
            clocks.start(instruction.name, "network", exchange.seconds, exchange)
        elif instruction.is_kernel:
            phase = self._find_phase(instruction)
            clocks.run_kernel(phase, self._estimate_kernel(instruction))
        elif self.gpu_kernels is not None and opcode == "custom-call":
            phase = self._find_phase(instruction)
            clocks.run_kernel(phase, self.gpu_kernels.estimate_seconds(instruction))
        elif opcode.endswith("-done"):
            clocks.wait(instruction.operands[0])
        else:
            self._compute(instruction, clocks)

    def _compute(self, instruction: Instruction, clocks: "_Clocks") -> None:
        """Execute an instruction on the core; a fusion may compute while its collective sends."""
        name = instruction.name
        collective = self.find_collective(instruction)
        is_split = instruction.opcode.endswith("-start")
        key = name
        if collective is not None:
            if not is_split:
                key = collective.attribute("channel_id") or name
            if key not in clocks.ends:
                description = self._describe_collective(collective)
                clocks.start(key, "links", description.seconds, description)
        phase = self._find_phase(instruction)
        clocks.compute(phase, self._estimate_seconds(instruction))

        only_starts = is_split or name.startswith(_FUSED_START)
        if collective is not None and not only_starts:
            clocks.wait(key)

    def _simulate_loop(self, loop: Instruction) -> tuple[Timeline, int]:
        """Return one pass of a loop, and its number of passes; one pass if that is unknown."""
        body = self.run(loop.attribute("body"))
        num_passes = self.program.count_trips(loop)
        if num_passes is not None:
            return body, num_passes
        body = dataclasses.replace(
            body,
            num_unknown_loops=body.num_unknown_loops + 1,
            unknown_loops_pass_seconds=body.seconds,
        )
        return body, 1

    def _simulate_branches(self, instruction: Instruction) -> Timeline:
        """Return the longest branch, but of metrics the shortest: most steps are not logged."""
        branches = []
        for name in instruction.called:
            if name in self.program.computations:
                branches.append(self.run(name))
        choose = min if _read_phase(instruction) == "metrics" else max
        return choose(
            branches,
            key=lambda branch: branch.seconds,
            default=Timeline(),
        )

    def _list_inside(self, instruction: Instruction) -> list[Instruction]:
        """Return the instructions of the computations that an instruction calls."""
        inside: list[Instruction] = []
        for name in instruction.called:
            inside += self.program.computations.get(name, ())
        return inside

    def _find_phase(self, instruction: Instruction) -> str:
        """Return the phase of the step.

        XLA names a fusion of the update with norms of the state after the norms.
        """
        phase = _read_phase(instruction)
        if phase != "metrics":
            return phase
        for inside in self._list_inside(instruction):
            if _read_phase(inside) == "optimizer":
                return "optimizer"
        return phase

    def _estimate_prefetch(self, instruction: Instruction) -> float:
        """Return seconds on the bus.

        A copy between memories lists both arrays, a slice also the complete one.
        """
        sizes = [array.padded_bytes for array in instruction.arrays if array.dims]
        num_bytes = min(sizes, default=0)
        return num_bytes / self.topology.chip.memory_bandwidth_bytes_per_second

    def _estimate_kernel(self, kernel: Instruction) -> float | None:
        """Return seconds of a Pallas kernel; None without its bundles or its programs."""
        bundles = self.bundles.get(kernel.kernel)
        programs = kernel.programs
        if bundles is None or programs is None:
            return None
        # Cores share the grid, so the core with the most programs decides
        programs_of_core = math.ceil(programs / self.topology.fabric.cores_per_chip)
        return bundles * programs_of_core / self.topology.fabric.clock_hertz

    def _estimate_seconds(self, instruction: Instruction) -> float:
        """Return seconds of an instruction that XLA compiled."""
        if self.gpu_kernels is not None:
            return self.gpu_kernels.estimate_seconds(instruction)
        return instruction.cycles / self.topology.fabric.clock_hertz

    def _find_collective(self, instruction: Instruction) -> Instruction | None:
        """Return the collective that an instruction is, or that its fusion contains."""
        if _read_operation(instruction) in PASSES:
            return instruction
        is_middle = any(name.startswith(_FUSED_MIDDLE) for name in instruction.called)
        if instruction.opcode not in ("fusion", "async-start") or is_middle:
            return None
        for inside in self._list_inside(instruction):
            if _read_operation(inside) in PASSES:
                return _recognise_reduce_scatter(inside, instruction)
        return None

    def _describe_collective(self, collective: Instruction) -> Collective:
        operation = _read_operation(collective)
        devices = tuple(list_members(collective))
        num_bytes = _count_collective_bytes(collective, len(devices))
        seconds = self.collective_seconds(operation, num_bytes, devices)
        return Collective(
            operation,
            num_bytes,
            devices,
            collective.source,
            count=1,
            seconds=seconds,
            waited_seconds=0.0,
        )

    def _describe_exchange(self, received: Instruction) -> Collective:
        """Describe an exchange between slices; sending takes place at the same time."""
        num_bytes = 0
        if received.arrays:
            num_bytes = received.arrays[0].num_bytes
        sending_seconds = num_bytes / self.topology.fabric.network_bytes_per_second
        return Collective(
            "exchange between slices",
            num_bytes,
            (),
            received.source,
            count=1,
            seconds=sending_seconds + NETWORK_SECONDS,
            waited_seconds=0.0,
        )


class _Clocks:
    """The clocks of one pass through a computation."""

    def __init__(self) -> None:
        self.timeline = Timeline()
        self.now = 0.0
        self.free = {"links": 0.0, "network": 0.0, "bus": 0.0}
        self.ends: dict[str, tuple[float, Collective | None]] = {}

    def compute(self, phase: str, seconds: float) -> None:
        self.timeline.compute_seconds += seconds
        self._advance(phase, seconds)

    def run_kernel(self, phase: str, seconds: float | None) -> None:
        """Execute a kernel; None counts as an unknown kernel without time."""
        if seconds is None:
            self.timeline.num_unknown_kernels += 1
            seconds = 0.0
        self.timeline.kernel_seconds += seconds
        self._advance(phase, seconds)

    def _advance(self, phase: str, seconds: float) -> None:
        self.timeline.phases[phase] = self.timeline.phases.get(phase, 0.0) + seconds
        self.now += seconds

    def enter(self, nested: Timeline, times: int) -> None:
        self.now += nested.seconds * times
        self.timeline.add(nested, times)

    def start(
        self,
        key: str,
        resource: str,
        seconds: float,
        collective: Collective | None = None,
    ) -> None:
        """Queue work for a resource other than the core."""
        start = max(self.now, self.free[resource])
        end = start + seconds
        self.free[resource] = end
        self.ends[key] = (end, collective)

    def wait(self, key: str) -> None:
        """Wait for the work that was started under this key; unknown keys take no time."""
        end, collective = self.ends.pop(key, (self.now, None))
        seconds = max(0.0, end - self.now)
        self.now += seconds
        if collective is None:
            self.timeline.prefetch_seconds += seconds
        else:
            self.timeline.collective_seconds += seconds
            waited = dataclasses.replace(collective, waited_seconds=seconds)
            self.timeline.collectives += (waited,)


def _read_phase(instruction: Instruction) -> str:
    """Return the innermost phase in the name of an operation."""
    phases = _PHASE.findall(instruction.source)
    return phases[-1] if phases else "other"


def _read_operation(instruction: Instruction) -> str:
    return instruction.opcode.removesuffix("-start")


def _recognise_reduce_scatter(collective: Instruction, fusion: Instruction) -> Instruction:
    """Return a reduce-scatter for an all-reduce whose fusion keeps at most half of the sum."""
    if collective.opcode != "all-reduce":
        return collective
    total_bytes = sum(array.num_bytes for array in collective.arrays)
    kept_bytes = sum(array.num_bytes for array in fusion.arrays)
    if 2 * kept_bytes > total_bytes:
        return collective
    return dataclasses.replace(
        collective,
        opcode="reduce-scatter",
        shape=fusion.shape,
    )


def _count_collective_bytes(collective: Instruction, num_devices: int) -> int:
    """Return the bytes of the complete array.

    It is the result of an all-gather, and the input of a reduce-scatter.
    """
    arrays = collective.arrays
    sizes = [array.num_bytes for array in arrays if array.dims or len(arrays) == 1]
    if collective.opcode == "collective-permute-start":
        return max(sizes)  # input and output are both listed
    total = sum(sizes)
    if collective.opcode in ("all-gather-start", "reduce-scatter-start"):
        # Complete arrays and their parts on one device are both listed
        return total * num_devices // (num_devices + 1)
    if collective.opcode.startswith("reduce-scatter"):
        return total * num_devices
    return total
