"""Memory of one chip by kind; of a compiled step all kinds come from XLA's totals and the arrays of its program."""

import dataclasses
import math
from collections.abc import Iterator

from vit_jax.plan.aot import Executable
from vit_jax.plan.hlo import Array, Instruction, Program

_KINDS = {"state.model": "parameters", "state.optimizer": "optimizer", "state.polyak": "average", "batch": "batch"}
_FRESH = ("custom-call", "broadcast")  # how a program makes an array that a loop then fills


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes on one chip at the step's peak.

    Attributes:
      parameters: the network's.
      optimizer: moments and counters.
      average: Polyak's; 0 without one.
      batch: images, labels and masks.
      activations: what the loops over layers keep for the backward pass.
      gradients: what the backward loops collect.
      temporary: everything else: what a layer works with, parameters in the compute dtype, layers outside of loops,
        logits, gaps.
      program: the instructions.
    """

    parameters: int
    optimizer: int
    average: int
    batch: int
    activations: int
    gradients: int
    temporary: int
    program: int

    @property
    def state(self) -> int:
        """Of the training state."""
        return self.parameters + self.optimizer + self.average

    @property
    def total(self) -> int:
        return sum(dataclasses.astuple(self))


def compiled_memory(executable: Executable, program: Program) -> Memory:
    """Memory of a compiled step by kind; the kinds sum to XLA's total."""
    arguments = dict.fromkeys(_KINDS.values(), 0)
    for parameter in program.computations[program.entry]:
        if parameter.opcode == "parameter":
            kind = next((kind for name, kind in _KINDS.items() if parameter.source.startswith(name)), "optimizer")
            arguments[kind] += sum(array.padded_bytes for array in parameter.arrays)
    arguments["batch"] += executable.arguments_bytes - sum(arguments.values())  # alignment
    kept = {"activations": 0, "gradients": 0}
    for computation in program.computations.values():
        makers = {instruction.name: instruction for instruction in computation}
        for loop in computation:
            if loop.opcode == "while":
                kind = "gradients" if "transpose(" in loop.source else "activations"
                kept[kind] += sum(array.padded_bytes for array in _filled(loop, makers, program.trip_count(loop)))
    temporary = executable.temporary_bytes + executable.new_output_bytes - sum(kept.values())
    return Memory(**arguments, **kept, temporary=temporary, program=executable.program_bytes)


def _filled(loop: Instruction, makers: dict[str, Instruction], trip_count: int | None) -> Iterator[Array]:
    """Arrays that a loop fills slice by slice."""
    start = makers[loop.operands[0]]
    if start.opcode != "tuple":
        return
    for name, array in zip(start.operands, loop.arrays, strict=True):
        is_stack = array.is_in_hbm and len(array.dims) > 1 and array.dims[0] == trip_count
        if is_stack and makers[name].opcode in _FRESH and math.prod(array.dims) > 1:
            yield array
