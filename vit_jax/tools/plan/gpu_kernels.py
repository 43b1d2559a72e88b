"""Time of each kernel of a program compiled for a GPU, by arithmetic and memory: XLA counts no cycles there.

A kernel takes the longer of its FLOPs at an attainable share of the peak and its bytes at an
attainable share of the bandwidth, and its launch. Bytes are those of its operands and results; of a
slice or an update only that. Not counted: arithmetic other than products, such as GELU and random
numbers, and operands that are read twice.
"""

import math
import re
from collections.abc import Iterator

from vit_jax.sharding.chips import Chip
from vit_jax.sharding.fabrics import PASSES
from vit_jax.tools.plan.hlo import Array, Instruction, Program

PRODUCTS = 0.75
"""Share of the peak that cuBLAS and cuDNN attain in products: an assumption."""
BANDWIDTH = 0.9
"""Share of the memory's bandwidth that a kernel attains: an assumption."""
LAUNCH_SECONDS = 2e-6
"""From the end of a kernel to the start of the next: an assumption."""
_NO_KERNEL = {
    *(
        "parameter",
        "constant",
        "tuple",
        "get-tuple-element",
        "bitcast",
        "after-all",
        "opt-barrier",
        "partition-id",
    ),
    *("replica-id", "async-start", "async-update"),
}
_SLICES = ("dynamic-slice", "slice", "gather")
_FUSIONS = ("fusion", "fusion-start")  # newer XLA starts updates of slices early
_UPDATE = "dynamic-update-slice"
_CONTRACTED = r'lhs_contracting_dim(?:ension)?s"?[=:][{\[]([\d,"]*)[}\]]'
_SCORES = r'"intermediate_tensor_shape":\{[^}]*"dimensions":\[([\d,"]*)\]'
_CONVOLUTION = r"dim_labels=\w+_(\w+)->"


class Kernels:
    """Prices of a program's instructions on one kind of GPU."""

    def __init__(self, program: Program, chip: Chip):
        self.program = program
        self.chip = chip
        everything = (
            instruction
            for computation in program.computations.values()
            for instruction in computation
        )
        self.makers = {instruction.name: instruction for instruction in everything}

    def seconds(self, instruction: Instruction) -> float:
        """Return the time of one execution; 0 of what launches no kernel, and of collectives."""
        opcode = instruction.opcode
        if (
            opcode in _NO_KERNEL
            or opcode.endswith("-done")
            or opcode.removesuffix("-start") in PASSES
        ):
            return 0.0
        arithmetic = self.flops(instruction) / (PRODUCTS * self._peak(instruction))
        memory = self.num_bytes(instruction) / (
            BANDWIDTH * self.chip.memory_bandwidth_bytes_per_second
        )
        return max(arithmetic, memory) + LAUNCH_SECONDS

    def flops(self, instruction: Instruction) -> int:
        """Return those of products: of cuBLAS, cuDNN and those within a fusion."""
        if instruction.opcode in _FUSIONS:
            return sum(self.flops(inner) for inner in self._inside(instruction))
        if instruction.opcode == "dot" or "matmul" in instruction.target:
            contracted = _numbers(_CONTRACTED, instruction)
            rows = self._operands(instruction)[0].dims
            return (
                2
                * math.prod(instruction.arrays[0].dims)
                * math.prod(rows[dim] for dim in contracted)
            )
        if (
            "fmha" in instruction.target
        ):  # two products forwards; backwards five, since scores are computed again
            products = 5 if instruction.target.endswith("Backward") else 2
            head = self._operands(instruction)[0].dims[-1]
            return products * 2 * head * math.prod(_numbers(_SCORES, instruction))
        labels = instruction.find(_CONVOLUTION)
        return self._convolution_flops(instruction, labels) if labels else 0

    def _convolution_flops(self, instruction: Instruction, labels: str) -> int:
        """Each value of the output takes a filter's values of one output channel."""
        first, second, result = *self._operands(instruction)[:2], instruction.arrays[0]
        output = result
        kernel = second
        if "BackwardInput" in instruction.target:
            output = first
        elif "BackwardFilter" in instruction.target:
            output = second
            kernel = result
        return 2 * math.prod(output.dims) * math.prod(kernel.dims) // kernel.dims[labels.index("o")]

    def _peak(self, instruction: Instruction) -> float:
        """FLOP/s in the operands' type: float32 is multiplied as TF32, at half the speed of bfloat16."""
        is_wide = any(array.bits > 16 for array in self._operands(instruction)[:2])
        return self.chip.peak_bf16_flops / (2 if is_wide else 1)

    def num_bytes(self, instruction: Instruction) -> int:
        """Return what one execution reads and writes."""
        if instruction.opcode in _FUSIONS:
            inside = self._inside(instruction)
            return sum(_read(inside)) + sum(self._written(inside))
        if instruction.opcode in _SLICES:
            return 2 * _size(instruction.arrays)
        operands = self._operands(instruction)
        if instruction.opcode == _UPDATE:
            return 2 * operands[1].num_bytes
        return _size(operands) + _size(_without_workspace(instruction))

    def _operands(self, instruction: Instruction) -> list[Array]:
        makers = (self.makers[name] for name in instruction.operands if name in self.makers)
        return [array for maker in makers for array in maker.arrays]

    def _inside(self, fusion: Instruction) -> tuple[Instruction, ...]:
        return self.program.computations[fusion.attribute("calls")]

    def _written(self, inside: tuple[Instruction, ...]) -> Iterator[int]:
        root = inside[-1]
        for result in (
            [self.makers[name] for name in root.operands] if root.opcode == "tuple" else [root]
        ):
            while result.opcode == "bitcast":
                result = self.makers[result.operands[0]]
            if result.opcode == _UPDATE:  # in place
                result = self.makers[result.operands[1]]
            yield _size(result.arrays)


def _read(inside: tuple[Instruction, ...]) -> Iterator[int]:
    """Bytes of each parameter of a fused computation: slices of it, nothing where it is only updated, or all."""
    for parameter in inside:
        if parameter.opcode != "parameter":
            continue
        names = {parameter.name}
        users = list[Instruction]()
        for instruction in inside:  # in order of definition
            if not names.isdisjoint(instruction.operands):
                if instruction.opcode == "bitcast":
                    names.add(instruction.name)
                else:
                    users.append(instruction)
        places = [
            user.operands[0] in names and names.isdisjoint(user.operands[1:]) for user in users
        ]
        slices = [
            user
            for user, is_place in zip(users, places, strict=True)
            if is_place and user.opcode in _SLICES
        ]
        updates = [
            user
            for user, is_place in zip(users, places, strict=True)
            if is_place and user.opcode == _UPDATE
        ]
        is_all = len(slices) + len(updates) < len(users)
        size = _size(parameter.arrays)
        yield size if is_all or not users else min(size, sum(_size(user.arrays) for user in slices))


def _without_workspace(instruction: Instruction) -> tuple[Array, ...]:
    """Results, without the scratch memory that is the last of a library's call."""
    results = instruction.arrays
    is_call = (
        instruction.opcode == "custom-call" and len(results) > 1 and "s8[" in instruction.shape
    )
    return results[:-1] if is_call and results[-1].bits == 8 else results


def _size(arrays: list[Array] | tuple[Array, ...]) -> int:
    return sum(array.num_bytes for array in arrays)


def _numbers(pattern: str, instruction: Instruction) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", instruction.find(pattern))]
