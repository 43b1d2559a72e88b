"""Memory of one chip by kind; of a compiled step all kinds come from XLA's totals and the arrays of its program."""

import math
from collections.abc import Iterator
from typing import Any

from vit_jax.sharding.memory import Memory
from vit_jax.tools.plan.hlo import Array, Instruction, Program

_KINDS = {  # by the beginning of an argument's name
    "state['model/": "parameters",
    "state['optimizer/": "optimizer",
    "state['polyak/": "average",
    "batch": "batch",
}
_FRESH = ("custom-call", "broadcast")  # how a program makes an array that a loop then fills
_FILLERS = {
    "constant",
    "broadcast",
    "tuple",
    "parameter",
}  # of a fusion that does the same, on GPUs


def compiled_memory(stats: Any, program: Program) -> Memory:
    """Memory of a compiled step by kind, from XLA's `CompiledMemoryStats`; the kinds sum to XLA's total."""
    arguments = dict.fromkeys(_KINDS.values(), 0)
    for parameter in program.computations[program.entry]:
        if parameter.opcode == "parameter":
            kind = next(
                (kind for name, kind in _KINDS.items() if parameter.source.startswith(name)),
                "optimizer",
            )
            arguments[kind] += sum(array.padded_bytes for array in parameter.arrays)
    arguments["batch"] += stats.argument_size_in_bytes - sum(arguments.values())  # alignment
    kept = {"activations": 0, "gradients": 0}
    for computation in program.computations.values():
        makers = {instruction.name: instruction for instruction in computation}
        for loop in computation:
            if loop.opcode == "while":
                kind = "gradients" if "transpose(" in loop.source else "activations"
                kept[kind] += sum(array.padded_bytes for array in _filled(loop, makers, program))
    # Others reuse the memory of an argument
    new_outputs = stats.output_size_in_bytes - stats.alias_size_in_bytes
    temporary = stats.temp_size_in_bytes + new_outputs - sum(kept.values())
    return Memory(
        **arguments, **kept, temporary=temporary, program=stats.generated_code_size_in_bytes
    )


def _filled(loop: Instruction, makers: dict[str, Instruction], program: Program) -> Iterator[Array]:
    """Arrays that a loop fills slice by slice."""
    start = makers[loop.operands[0]]
    trip_count = program.trip_count(loop)
    if start.opcode != "tuple":
        return
    for name, array in zip(start.operands, loop.arrays, strict=True):
        is_stack = array.is_in_hbm and len(array.dims) > 1 and array.dims[0] == trip_count
        if is_stack and _is_fresh(makers[name], makers, program) and math.prod(array.dims) > 1:
            yield array


def _is_fresh(maker: Instruction, makers: dict[str, Instruction], program: Program) -> bool:
    while maker.opcode in ("get-tuple-element", "bitcast"):
        maker = makers[maker.operands[0]]
    if maker.opcode != "fusion":
        return maker.opcode in _FRESH
    return {inner.opcode for inner in program.computations[maker.attribute("calls")]} <= _FILLERS
