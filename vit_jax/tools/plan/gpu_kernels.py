"""Time of each kernel of a program compiled for a GPU, by arithmetic and memory.

XLA counts no cycles for GPUs.

A kernel takes the longest of its FLOPs at an attainable share of the peak, its elementwise
operations and its bytes at an attainable share of the bandwidth, and its launch. It reads and
writes its operands and results, or only the slice or the update of an array. Not counted: operands
that are read twice, and what XLA's autotuning chooses on a GPU, such as padded split products.

The rates were fitted to kernels measured on one H100: `tests/golden/measured_gpus.json`.
"""

import math
import re
from collections.abc import Iterable, Sequence

from vit_jax.sharding.chips import Chip
from vit_jax.sharding.fabrics import PASSES
from vit_jax.tools.plan.hlo import Array, Instruction, Program

PRODUCTS = 0.72
"""Share of the peak that cuBLAS attains in products, with the sums of split ones."""
ATTENTION = 0.28
"""Share of the peak that cuDNN's attention attains, of scores in complete tiles."""
ATTENTION_BACKWARD = 0.186
"""The same for the gradient, with its two kernels before and after."""
ATTENTION_TILE = 128
"""Positions of a tile of cuDNN's attention."""
BANDWIDTH = 0.9
"""Share of the memory's bandwidth that a kernel attains."""
COLUMN_SUMS = 0.7
"""The same for sums over rows of a matrix, such as gradients of norms and biases."""
OPERATIONS_PER_FLOP = 24e12 / 989.4e12
"""Elementwise operations in the time of a FLOP at the peak; assumed for other GPUs."""
LAUNCH_SECONDS = 2e-6
"""Time from the end of a kernel to the start of the next: an assumption."""
_NO_KERNEL = {
    "parameter",
    "constant",
    "tuple",
    "get-tuple-element",
    "bitcast",
    "after-all",
    "opt-barrier",
    "partition-id",
    "replica-id",
    "async-start",
    "async-update",
}
_SLICES = ("dynamic-slice", "slice", "gather")
_FUSIONS = ("fusion", "fusion-start")  # newer XLA starts updates of slices early
_SAME_VALUES = ("bitcast", "convert")
_UPDATE = "dynamic-update-slice"
_CONTRACTED = r'lhs_contracting_dim(?:ension)?s"?[=:][{\[]([\d,"]*)[}\]]'
_SUMMED = r"dimensions=\{([\d,]*)\}"
_SCORES = r'"intermediate_tensor_shape": ?\{[^}]*"dimensions": ?\[([\d,"\s]*)\]'
_CONVOLUTION = r"dim_labels=\w+_(\w+)->"
_MOVES = {
    *_NO_KERNEL,
    *_SLICES,
    _UPDATE,
    "broadcast",
    "concatenate",
    "copy",
    "iota",
    "pad",
    "reshape",
    "reverse",
    "transpose",
}
# Machine instructions of operations that need more than two
_OPERATIONS = {
    "divide": 8,
    "erf": 26,
    "exponential": 10,
    "exponential-minus-one": 20,
    "log": 20,
    "log-plus-one": 25,
    "logistic": 14,
    "power": 40,
    "rsqrt": 6,
    "sqrt": 8,
    "tanh": 28,
}


class Kernels:
    """Prices of a program's instructions on one kind of GPU."""

    def __init__(self, program: Program, chip: Chip):
        self.program = program
        self.chip = chip
        self.makers = {instruction.name: instruction for instruction in program.list_instructions()}

    def estimate_seconds(self, instruction: Instruction) -> float:
        """Return the time of one execution; 0 for collectives and without a kernel."""
        opcode = instruction.opcode
        if opcode in _NO_KERNEL or opcode.endswith("-done"):
            return 0.0
        if opcode.removesuffix("-start") in PASSES:
            return 0.0
        share = COLUMN_SUMS if self._sums_columns(instruction) else BANDWIDTH
        bytes_per_second = share * self.chip.memory_bandwidth_bytes_per_second
        operations_per_second = OPERATIONS_PER_FLOP * self.chip.peak_bf16_flops
        product_seconds = self._estimate_product_seconds(instruction)
        operation_seconds = self.count_operations(instruction) / operations_per_second
        memory_seconds = self.count_bytes(instruction) / bytes_per_second
        return max(product_seconds, operation_seconds, memory_seconds) + LAUNCH_SECONDS

    def _sums_columns(self, instruction: Instruction) -> bool:
        """Return whether a fusion adds up values that are not adjacent in memory."""
        if instruction.opcode not in _FUSIONS:
            return False
        for fused in self._list_fused(instruction):
            if fused.opcode != "reduce":
                continue
            summed = _find_numbers(_SUMMED, fused)
            adjacent = self._list_operands(fused)[0].minor_to_major[:1]
            if not set(adjacent) <= set(summed):
                return True
        return False

    def _estimate_product_seconds(self, instruction: Instruction) -> float:
        """Return the time of products at the share of the peak of their library."""
        share = PRODUCTS
        flops = float(self.count_flops(instruction))
        if "fmha" in instruction.target:
            share = ATTENTION
            if instruction.target.endswith("Backward"):
                share = ATTENTION_BACKWARD
            for length in _find_numbers(_SCORES, instruction)[-2:]:
                flops *= math.ceil(length / ATTENTION_TILE) * ATTENTION_TILE / length
        return flops / (share * self._get_peak(instruction))

    def count_operations(self, instruction: Instruction) -> int:
        """Return the elementwise operations of a fusion, in machine instructions."""
        if instruction.opcode not in _FUSIONS:
            return 0
        num_operations = 0
        for fused in self._list_fused(instruction):
            if fused.opcode in _MOVES or fused.opcode == "dot":
                continue
            array = fused.arrays[0]
            if fused.opcode == "reduce":
                array = self._list_operands(fused)[0]
            num_operations += math.prod(array.dims) * _count_instructions(fused)
        return num_operations

    def count_flops(self, instruction: Instruction) -> int:
        """Return the FLOPs of products: by cuBLAS, cuDNN and within a fusion."""
        if instruction.opcode in _FUSIONS:
            return sum(map(self.count_flops, self._list_fused(instruction)))
        if instruction.opcode == "dot" or "matmul" in instruction.target:
            return self._count_product_flops(instruction)
        if "fmha" in instruction.target:
            return self._count_attention_flops(instruction)
        labels = instruction.find(_CONVOLUTION)
        if labels:
            return self._count_convolution_flops(instruction, labels)
        return 0

    def _count_product_flops(self, instruction: Instruction) -> int:
        """Return two FLOPs for each value of the result and each contracted value."""
        first_dims = self._list_operands(instruction)[0].dims
        contracted = [first_dims[dim] for dim in _find_numbers(_CONTRACTED, instruction)]
        return 2 * math.prod(instruction.arrays[0].dims) * math.prod(contracted)

    def _count_attention_flops(self, instruction: Instruction) -> int:
        """Return the FLOPs of two products forward, of five backward, with scores again."""
        num_products = 5 if instruction.target.endswith("Backward") else 2
        head_dim = self._list_operands(instruction)[0].dims[-1]
        num_scores = math.prod(_find_numbers(_SCORES, instruction))
        return num_products * 2 * head_dim * num_scores

    def _count_convolution_flops(self, instruction: Instruction, labels: str) -> int:
        """Return the FLOPs of a convolution: one filter for each output value."""
        first, second = self._list_operands(instruction)[:2]
        output = instruction.arrays[0]
        kernel = second
        if "BackwardInput" in instruction.target:
            output = first
        elif "BackwardFilter" in instruction.target:
            output = second
            kernel = instruction.arrays[0]
        output_channels = kernel.dims[labels.index("o")]
        return 2 * math.prod(output.dims) * math.prod(kernel.dims) // output_channels

    def _get_peak(self, instruction: Instruction) -> float:
        """Return FLOP/s in the operands' type.

        float32 is multiplied as TF32, at half the speed of bfloat16.
        """
        factors = self._list_operands(instruction)[:2]
        if any(array.bits > 16 for array in factors):
            return self.chip.peak_bf16_flops / 2
        return self.chip.peak_bf16_flops

    def count_bytes(self, instruction: Instruction) -> int:
        """Return the bytes that one execution reads and writes."""
        if instruction.opcode in _FUSIONS:
            fused = self._list_fused(instruction)
            return _count_read_bytes(fused) + self._count_written_bytes(fused)
        if instruction.opcode in _SLICES:
            return 2 * _sum_bytes(instruction.arrays)
        operands = self._list_operands(instruction)
        if instruction.opcode == _UPDATE:
            return 2 * operands[1].num_bytes
        return _sum_bytes(operands) + _sum_bytes(_list_results(instruction))

    def _list_operands(self, instruction: Instruction) -> list[Array]:
        operands: list[Array] = []
        for name in instruction.operands:
            if name in self.makers:
                operands += self.makers[name].arrays
        return operands

    def _list_fused(self, fusion: Instruction) -> tuple[Instruction, ...]:
        return self.program.computations[fusion.attribute("calls")]

    def _count_written_bytes(self, fused: Sequence[Instruction]) -> int:
        """Return the bytes of the results of a fused computation; updates are written in place."""
        root = fused[-1]
        results = [root]
        if root.opcode == "tuple":
            results = [self.makers[name] for name in root.operands]
        num_bytes = 0
        for result in results:
            while result.opcode == "bitcast":
                result = self.makers[result.operands[0]]
            if result.opcode == _UPDATE:
                result = self.makers[result.operands[1]]
            num_bytes += _sum_bytes(result.arrays)
        return num_bytes


def _count_instructions(operation: Instruction) -> int:
    """Return the machine instructions of an operation on one value."""
    if operation.opcode in _OPERATIONS:
        return _OPERATIONS[operation.opcode]
    if operation.arrays[0].bits == 16 and operation.opcode != "convert":
        return 2  # with the rounding
    return 1


def _count_read_bytes(fused: Sequence[Instruction]) -> int:
    """Return the bytes that a fused computation reads of its parameters."""
    parameters = [instruction for instruction in fused if instruction.opcode == "parameter"]
    return sum(_count_bytes_of_parameter(parameter, fused) for parameter in parameters)


def _count_bytes_of_parameter(parameter: Instruction, fused: Sequence[Instruction]) -> int:
    """Return the bytes of a parameter's slices if it is only sliced or updated, else all."""
    names = {parameter.name}  # the parameter, and its values in another shape or dtype
    users = []
    for instruction in fused:  # in order of definition
        if names.isdisjoint(instruction.operands):
            continue
        if instruction.opcode in _SAME_VALUES:
            names.add(instruction.name)
        else:
            users.append(instruction)

    num_bytes = _sum_bytes(parameter.arrays)
    if not users:
        return num_bytes
    slice_bytes = 0
    for user in users:
        array, *indices = user.operands
        if array not in names or not names.isdisjoint(indices):
            return num_bytes
        if user.opcode in _SLICES:
            slice_bytes += math.prod(user.arrays[0].dims) * parameter.arrays[0].bits // 8
        elif user.opcode != _UPDATE:
            return num_bytes
    return min(num_bytes, slice_bytes)


def _list_results(instruction: Instruction) -> Sequence[Array]:
    """Return the results, without the scratch memory at the end of a library's results."""
    results = instruction.arrays
    if instruction.opcode != "custom-call" or len(results) <= 1:
        return results
    if "s8[" in instruction.shape and results[-1].bits == 8:
        return results[:-1]
    return results


def _sum_bytes(arrays: Iterable[Array]) -> int:
    return sum(array.num_bytes for array in arrays)


def _find_numbers(pattern: str, instruction: Instruction) -> list[int]:
    """Return the numbers in the first group of a pattern."""
    return [int(number) for number in re.findall(r"\d+", instruction.find(pattern))]
