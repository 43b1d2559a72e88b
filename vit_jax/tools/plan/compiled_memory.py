"""Memory of a compiled step by kind, from XLA's totals and the arrays of its program."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from vit_jax.sharding.memory import Memory
from vit_jax.tools.plan.hlo import Array, Instruction, Program

_KINDS = {  # by the beginning of an argument's name
    "state['model/": "parameters",
    "state['optimizer/": "optimizer",
    "state['polyak/": "average",
    "batch": "batch",
    "frozen": "parameters",  # the teacher's
}
_FRESH = ("custom-call", "broadcast")  # instructions that make an array which a loop then fills
# On GPUs a fusion of these instructions makes the array
_FRESH_IN_FUSION = {"constant", "broadcast", "tuple", "parameter"}


def measure_memory(stats: Any, program: Program) -> Memory:
    """Return the memory of a compiled step by kind, from XLA's `CompiledMemoryStats`.

    The kinds sum to XLA's total.
    """
    arguments = _measure_arguments(program)
    arguments["batch"] += stats.argument_size_in_bytes - sum(arguments.values())  # alignment
    kept = _measure_kept(program)
    # Other outputs reuse the memory of an argument
    new_outputs = stats.output_size_in_bytes - stats.alias_size_in_bytes
    temporary = stats.temp_size_in_bytes + new_outputs - sum(kept.values())
    return Memory(
        **arguments,
        **kept,
        temporary=temporary,
        program=stats.generated_code_size_in_bytes,
    )


def _measure_arguments(program: Program) -> dict[str, int]:
    """Return the bytes of the program's arguments by kind."""
    arguments = dict.fromkeys(_KINDS.values(), 0)
    for parameter in program.computations[program.entry]:
        if parameter.opcode != "parameter":
            continue
        kind = _find_kind(parameter.source)
        for array in parameter.arrays:
            arguments[kind] += array.padded_bytes
    return arguments


def _find_kind(name: str) -> str:
    """Return the kind of an argument by its name."""
    for prefix, kind in _KINDS.items():
        if name.startswith(prefix):
            return kind
    return "optimizer"  # the step


def _measure_kept(program: Program) -> dict[str, int]:
    """Return the bytes of the arrays that loops fill: activations forward, gradients backward."""
    kept = {"activations": 0, "gradients": 0}
    for computation in program.computations.values():
        makers = {instruction.name: instruction for instruction in computation}
        for loop in computation:
            if loop.opcode != "while":
                continue
            kind = "activations"
            if "transpose(" in loop.source:
                kind = "gradients"
            for array in _list_filled(loop, makers, program):
                kept[kind] += array.padded_bytes
    return kept


def _list_filled(
    loop: Instruction,
    makers: Mapping[str, Instruction],
    program: Program,
) -> Iterator[Array]:
    """Yield the arrays that a loop fills slice by slice."""
    start = makers[loop.operands[0]]
    if start.opcode != "tuple":
        return

    trip_count = program.count_trips(loop)
    for name, array in zip(start.operands, loop.arrays, strict=True):
        num_values = math.prod(array.dims)
        if not array.is_in_hbm or len(array.dims) < 2 or num_values <= 1:
            continue
        is_stack = array.dims[0] == trip_count
        if is_stack and _is_fresh(makers[name], makers, program):
            yield array


def _is_fresh(
    maker: Instruction,
    makers: Mapping[str, Instruction],
    program: Program,
) -> bool:
    """Return True if an instruction makes an array without values of its operands."""
    while maker.opcode in ("get-tuple-element", "bitcast"):
        maker = makers[maker.operands[0]]
    if maker.opcode != "fusion":
        return maker.opcode in _FRESH
    fused = program.computations[maker.attribute("calls")]
    return {instruction.opcode for instruction in fused} <= _FRESH_IN_FUSION
