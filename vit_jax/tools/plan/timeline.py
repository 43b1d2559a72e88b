"""Time of one step: a simulation of the compiled schedule.

The core executes instructions in order: on a TPU for XLA's cycles, on a GPU for the time of each
kernel (`gpu_kernels.py`). A Pallas kernel, of which XLA counts none, takes the bundles of its
schedule times the programs of its grid that one core runs. Beside it, each with its own queue, the
links carry collectives, the network exchanges between slices, and the memory bus prefetches; a
`-done` waits for them. A collective without start and done blocks the core. A loop costs its body
times its length, a conditional its longest branch; one of metrics its shortest, since most steps
are not logged. Not modelled: core and prefetches sharing the bus, stragglers, hosts.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Mapping

from vit_jax.sharding.fabrics import NETWORK_SECONDS, PASSES
from vit_jax.tools.plan.gpu_kernels import Kernels
from vit_jax.tools.plan.hlo import Instruction, Program, members
from vit_jax.tools.plan.topology import CollectiveSeconds, Topology

PHASES = (  # of a step, by the names that models and steps give to what they compute
    *("embedding", "resnet", "norm", "attention", "mlp", "dropout", "pooling", "head"),
    *("loss", "optimizer", "average", "metrics"),
)
_PHASE = re.compile(rf"\b({'|'.join(PHASES)})\b")
_PREFETCHES = ("copy-start", "slice-start", "async-slice-start")
_SUMS = (  # fields of a timeline that a loop multiplies
    *("compute_seconds", "kernel_seconds", "collective_seconds", "prefetch_seconds"),
    *("unknown_loops_pass_seconds", "num_unknown_kernels"),
)
# A collective may overlap with several fusions; XLA's names distinguish its start and end from its
# middle.
_FUSED_START = "async-collective-start"
_FUSED_MIDDLE = "async_collective_fusion"


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective of a step."""

    operation: str  # such as "all-reduce"
    num_bytes: int  # of the complete array
    devices: tuple[int, ...]  # positions in the mesh of one group
    source: str  # the operation it comes from, as jax names it
    count: int  # how often a step executes it
    seconds: float  # of one execution
    waited_seconds: float  # of one execution, how long the core waits for it


@dataclasses.dataclass
class Timeline:
    """The time of a step."""

    compute_seconds: float = 0.0  # the core computes what XLA compiled
    kernel_seconds: float = 0.0  # the core computes Pallas kernels, or those of cuBLAS and cuDNN
    collective_seconds: float = 0.0  # the core waits for collectives
    prefetch_seconds: float = 0.0  # the core waits for memory
    phases: dict[str, float] = dataclasses.field(
        default_factory=dict
    )  # seconds of the core, kernels included
    collectives: tuple[Collective, ...] = ()  # all of them, the most expensive first
    # Loops of unknown length, counted as one pass; the random numbers of mixup have such
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
        self.collectives += tuple(
            dataclasses.replace(c, count=c.count * times) for c in other.collectives
        )
        self.num_unknown_loops += other.num_unknown_loops


def step_timeline(
    program: Program,
    topology: Topology,
    collective_seconds: CollectiveSeconds,
    bundles: Mapping[str, int],
) -> Timeline:
    """Estimate one execution of the program on a machine whose collectives take so long.

    `bundles` are the cycles of one program of each kernel, by the name of its instruction.
    """
    timeline = _Walk(program, topology, collective_seconds, bundles).run(program.entry)
    dearest = sorted(timeline.collectives, key=lambda c: c.count * c.waited_seconds, reverse=True)
    return dataclasses.replace(timeline, collectives=tuple(dearest))


class _Walk:
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
        every = (
            instruction
            for computation in program.computations.values()
            for instruction in computation
        )
        kernels = [instruction for instruction in every if instruction.is_kernel]
        # By program, not by instruction: of equal kernels XLA compiles one.
        self.bundles = {
            kernel.kernel: bundles[kernel.name] for kernel in kernels if kernel.name in bundles
        }
        self.gpu_kernels = None if topology.is_tpu else Kernels(program, topology.chip)
        self.collective_of = functools.cache(self._collective_of)

    def run(self, computation: str) -> Timeline:
        """One pass, starting with idle links and bus."""
        pass_ = _Pass()
        for instruction in self.program.computations[computation]:
            self._execute(instruction, pass_)
        return pass_.timeline

    def _execute(self, instruction: Instruction, pass_: "_Pass") -> None:
        opcode = instruction.opcode
        name = instruction.name
        if opcode in ("while", "call", "conditional"):
            pass_.enter(*self._nested(instruction))
        elif opcode in _PREFETCHES:
            # A copy between memories lists both arrays, a slice also the complete one.
            num_bytes = min(
                (array.padded_bytes for array in instruction.arrays if array.dims), default=0
            )
            pass_.start(
                name, "bus", num_bytes / self.topology.chip.memory_bandwidth_bytes_per_second
            )
        elif (
            opcode == "recv"
        ):  # between slices; the matching send goes the other way at the same time
            fact = self._exchange(instruction)
            pass_.start(name, "network", fact.seconds, fact)
        elif instruction.is_kernel:
            bundles = self.bundles.get(instruction.kernel)
            programs = instruction.programs
            # Share the grid, so that the fuller one decides
            cores = self.topology.fabric.cores_per_chip
            cycles = (
                None
                if bundles is None or programs is None
                else bundles * math.ceil(programs / cores)
            )
            seconds = None if cycles is None else cycles / self.topology.fabric.clock_hertz
            pass_.run_kernel(self._phase_of(instruction), seconds)
        elif self.gpu_kernels is not None and opcode == "custom-call":
            pass_.run_kernel(self._phase_of(instruction), self.gpu_kernels.seconds(instruction))
        elif opcode.endswith("-done"):
            pass_.wait(instruction.operands[0])
        elif (collective := self.collective_of(instruction)) is None:
            pass_.compute(self._phase_of(instruction), self._seconds(instruction))
        else:
            is_split = opcode.endswith("-start")
            key = name if is_split else collective.attribute("channel_id") or name
            if key not in pass_.ends:
                fact = self._fact(collective)
                pass_.start(key, "links", fact.seconds, fact)
            pass_.compute(
                self._phase_of(instruction), self._seconds(instruction)
            )  # a fusion may compute while it sends
            if not is_split and not name.startswith(_FUSED_START):
                pass_.wait(key)

    def _phase_of(self, instruction: Instruction) -> str:
        """Return the phase of the step; XLA names a fusion of the update with norms of the state after the norms."""
        phase = _phase(instruction)
        inside = (i for name in instruction.called for i in self.program.computations.get(name, ()))
        return (
            "optimizer"
            if phase == "metrics" and any(_phase(i) == "optimizer" for i in inside)
            else phase
        )

    def _seconds(self, instruction: Instruction) -> float:
        if self.gpu_kernels is not None:
            return self.gpu_kernels.seconds(instruction)
        return instruction.cycles / self.topology.fabric.clock_hertz

    def _nested(self, instruction: Instruction) -> tuple[Timeline, int]:
        if instruction.opcode == "while":
            body = self.run(instruction.attribute("body"))
            times = self.program.trip_count(instruction)
            if times is None:
                number = body.num_unknown_loops + 1
                seconds = body.seconds
                return dataclasses.replace(
                    body, num_unknown_loops=number, unknown_loops_pass_seconds=seconds
                ), 1
            return body, times
        called = [name for name in instruction.called if name in self.program.computations]
        choose = min if _phase(instruction) == "metrics" else max
        return choose(
            (self.run(name) for name in called),
            key=lambda timeline: timeline.seconds,
            default=Timeline(),
        ), 1

    def _collective_of(self, instruction: Instruction) -> Instruction | None:
        """The collective that an instruction is, or that its fusion contains."""
        if instruction.opcode.removesuffix("-start") in PASSES:
            return instruction
        is_middle = any(name.startswith(_FUSED_MIDDLE) for name in instruction.called)
        if instruction.opcode not in ("fusion", "async-start") or is_middle:
            return None
        inside = (i for name in instruction.called for i in self.program.computations.get(name, ()))
        collective = next((i for i in inside if i.opcode.removesuffix("-start") in PASSES), None)
        if collective is not None and collective.opcode == "all-reduce":
            total, kept = (
                sum(array.num_bytes for array in each.arrays) for each in (collective, instruction)
            )
            if 2 * kept <= total:  # XLA's form of a reduce-scatter
                return dataclasses.replace(
                    collective, opcode="reduce-scatter", shape=instruction.shape
                )
        return collective

    def _fact(self, collective: Instruction) -> Collective:
        operation = collective.opcode.removesuffix("-start")
        devices = tuple(members(collective))
        num_bytes = _collective_bytes(collective, len(devices))
        seconds = self.collective_seconds(operation, num_bytes, devices)
        return Collective(operation, num_bytes, devices, collective.source, 1, seconds, 0.0)

    def _exchange(self, received: Instruction) -> Collective:
        num_bytes = sum(array.num_bytes for array in received.arrays[:1])
        seconds = num_bytes / self.topology.fabric.network_bytes_per_second + NETWORK_SECONDS
        return Collective(
            "exchange between slices", num_bytes, (), received.source, 1, seconds, 0.0
        )


class _Pass:
    """The clocks of one pass through a computation."""

    def __init__(self) -> None:
        self.timeline = Timeline()
        self.now = 0.0
        self.free = {"links": 0.0, "network": 0.0, "bus": 0.0}
        self.ends: dict[str, tuple[float, Collective | None]] = {}

    def compute(self, phase: str, seconds: float) -> None:
        self.timeline.compute_seconds += seconds
        self._pass(phase, seconds)

    def run_kernel(self, phase: str, seconds: float | None) -> None:
        self.timeline.kernel_seconds += seconds or 0.0
        self._pass(phase, seconds or 0.0)
        self.timeline.num_unknown_kernels += seconds is None

    def _pass(self, phase: str, seconds: float) -> None:
        self.timeline.phases[phase] = self.timeline.phases.get(phase, 0.0) + seconds
        self.now += seconds

    def enter(self, nested: Timeline, times: int) -> None:
        self.now += nested.seconds * times
        self.timeline.add(nested, times)

    def start(
        self, key: str, resource: str, seconds: float, fact: Collective | None = None
    ) -> None:
        self.free[resource] = max(self.now, self.free[resource]) + seconds
        self.ends[key] = (self.free[resource], fact)

    def wait(self, key: str) -> None:
        """Wait for what was started under this key; unknown keys take no time."""
        end, fact = self.ends.pop(key, (self.now, None))
        seconds = max(0.0, end - self.now)
        self.now += seconds
        if fact is None:
            self.timeline.prefetch_seconds += seconds
        else:
            self.timeline.collective_seconds += seconds
            self.timeline.collectives += (dataclasses.replace(fact, waited_seconds=seconds),)


def _phase(instruction: Instruction) -> str:
    return ["other", *_PHASE.findall(instruction.source)][-1]


def _collective_bytes(collective: Instruction, num_devices: int) -> int:
    """Bytes of the complete array: the result of an all-gather, the input of a reduce-scatter."""
    sizes = [
        array.num_bytes for array in collective.arrays if array.dims or len(collective.arrays) == 1
    ]
    if collective.opcode == "collective-permute-start":
        return max(sizes)  # input and output are both listed
    if collective.opcode in (
        "all-gather-start",
        "reduce-scatter-start",
    ):  # as here, of any number of arrays
        return sum(sizes) * num_devices // (num_devices + 1)
    return sum(sizes) * (num_devices if collective.opcode.startswith("reduce-scatter") else 1)
