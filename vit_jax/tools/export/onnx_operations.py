"""The operations of our networks as nodes of an ONNX graph: a function for each of them."""

import string
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from onnx import helper

from vit_jax.tools.export.onnx_nodes import (
    Dimension,
    Graph,
    Operation,
    Tensor,
    Value,
    make_rejection,
    select,
)

AddNodes = Callable[[Graph, Operation], Value]
AxisPairs = tuple[Sequence[int], Sequence[int]]  # axes of x, and the corresponding ones of y
_CHANNELS_FIRST = (0, 3, 1, 2)  # (B, H, W, C) to the order of ONNX
_CHANNELS_LAST = (0, 2, 3, 1)


# Elementwise operations. ONNX broadcasts their inputs.

_ELEMENTWISE = {
    "add": "Add",
    "sub": "Sub",
    "mul": "Mul",
    "div": "Div",
    "max": "Max",
    "min": "Min",
    "lt": "Less",
    "gt": "Greater",
    "and": "And",
    "or": "Or",
    "exp": "Exp",
    "tanh": "Tanh",
    "logistic": "Sigmoid",
    "erf": "Erf",
    "neg": "Neg",
    "sqrt": "Sqrt",
}


def broadcast_shapes(values: Sequence[Value]) -> list[Dimension]:
    """Return the shape of an elementwise result, as NumPy does, also of symbolic dimensions."""
    num_axes = max(len(value.shape) for value in values)
    result: list[Dimension] = [1] * num_axes
    for value in values:
        first_axis = num_axes - len(value.shape)
        for axis, size in enumerate(value.shape, first_axis):
            if type(size) is not int or size != 1:
                result[axis] = size
    return result


def add_elementwise(graph: Graph, operation: Operation) -> Tensor:
    """Add the node of the same operation."""
    kind = _ELEMENTWISE[operation.name]
    return graph.add(kind, *operation.inputs, shape=operation.shape)


def add_square(graph: Graph, operation: Operation) -> Tensor:
    """Add x x."""
    (x,) = operation.inputs
    return graph.add("Mul", x, x, shape=operation.shape)


def add_integer_power(graph: Graph, operation: Operation) -> Tensor:
    """Add x**y for a constant y."""
    exponent = np.array(operation.params["y"], np.float32)
    return graph.add("Pow", *operation.inputs, exponent, shape=operation.shape)


def add_rsqrt(graph: Graph, operation: Operation) -> Tensor:
    """Add 1 / sqrt(x)."""
    root = graph.add("Sqrt", *operation.inputs, shape=operation.shape)
    return graph.add("Reciprocal", root, shape=operation.shape)


def add_erfc(graph: Graph, operation: Operation) -> Tensor:
    """Add 1 - erf(x)."""
    erf = graph.add("Erf", *operation.inputs, shape=operation.shape)
    one = np.ones((), np.float32)
    return graph.add("Sub", one, erf, shape=operation.shape)


def add_selection(graph: Graph, operation: Operation) -> Tensor:
    """Add a choice between two arrays, whose order is the other one in JAX."""
    condition, if_false, if_true = operation.inputs
    return graph.add(
        "Where",
        condition,
        if_true,
        if_false,
        shape=operation.shape,
    )


def add_cast(graph: Graph, operation: Operation) -> Tensor:
    """Add a conversion to another dtype."""
    dtype = np.dtype(operation.params["new_dtype"])
    kind = helper.np_dtype_to_tensor_dtype(dtype)
    return graph.add("Cast", *operation.inputs, shape=operation.shape, to=kind)


ELEMENTWISE: Mapping[str, AddNodes] = {
    **dict.fromkeys(_ELEMENTWISE, add_elementwise),
    "square": add_square,
    "integer_pow": add_integer_power,
    "rsqrt": add_rsqrt,
    "erfc": add_erfc,
    "select_n": add_selection,
    "convert_element_type": add_cast,
}


# Operations that move or combine values. Their inputs have their complete shapes.

_REDUCTIONS = {"reduce_sum": "ReduceSum", "reduce_max": "ReduceMax"}


def add_reshape(graph: Graph, operation: Operation) -> Value:
    """Add a change of shape, also one that removes dimensions of 1."""
    (x,) = operation.inputs
    return graph.reshape(x, operation.shape)


def add_transpose(graph: Graph, operation: Operation) -> Value:
    """Add another order of the axes."""
    (x,) = operation.inputs
    return graph.transpose(x, operation.params["permutation"])


def add_reduction(graph: Graph, operation: Operation) -> Tensor:
    """Add the sum or the maximum over some axes."""
    kind = _REDUCTIONS[operation.name]
    axes = np.array(operation.params["axes"])
    return graph.add(
        kind,
        *operation.inputs,
        axes,
        shape=operation.shape,
        keepdims=0,
    )


def add_concatenation(graph: Graph, operation: Operation) -> Tensor:
    """Add a concatenation along an axis."""
    axis = operation.params["dimension"]
    return graph.add("Concat", *operation.inputs, shape=operation.shape, axis=axis)


def add_stack(graph: Graph, operation: Operation) -> Tensor:
    """Add a concatenation along a new axis."""
    axis = operation.params["axis"]
    part_shape = list(operation.shape)
    part_shape[axis] = 1
    parts = [graph.reshape(x, part_shape) for x in operation.inputs]
    return graph.add("Concat", *parts, shape=operation.shape, axis=axis)


def add_slice(graph: Graph, operation: Operation) -> Tensor:
    """Add a slice along the axes of a fixed size."""
    (x,) = operation.inputs
    params = operation.params
    axes = []
    for axis, size in enumerate(operation.shape):
        if type(size) is int:
            axes.append(axis)

    starts = select(params["start_indices"], axes)
    limits = select(params["limit_indices"], axes)
    strides = [1] * len(axes)
    if params["strides"]:
        strides = select(params["strides"], axes)
    return graph.add(
        "Slice",
        x,
        np.array(starts),
        np.array(limits),
        np.array(axes),
        np.array(strides),
        shape=operation.shape,
    )


def add_reversal(graph: Graph, operation: Operation) -> Tensor:
    """Add the opposite order of values along some axes: slices from the last to the first value."""
    (x,) = operation.inputs
    axes = np.array(operation.params["dimensions"])
    backwards = np.full(len(axes), -1)
    before_first = np.full(len(axes), np.iinfo(np.int64).min)
    return graph.add(
        "Slice",
        x,
        backwards,
        before_first,
        axes,
        backwards,
        shape=operation.shape,
    )


def add_gather(graph: Graph, operation: Operation) -> Value:
    """Add a slice at a constant index: JAX traces slices of arrays of unknown size as gather."""
    x, start = operation.inputs
    axes = operation.params["dimension_numbers"].start_index_map
    slice_sizes = operation.params["slice_sizes"]
    if not isinstance(start, np.ndarray) or start.shape != (len(axes),):
        raise make_rejection("gather of several places")

    limit = start + select(slice_sizes, axes)
    part = graph.add(
        "Slice",
        x,
        start.astype(np.int64),
        limit.astype(np.int64),
        np.array(axes),
        shape=slice_sizes,
    )
    return graph.reshape(part, operation.shape)


def add_product(graph: Graph, operation: Operation) -> Tensor:
    """Add the product of two arrays: a product of matrices, or an Einstein summation."""
    x, y = operation.inputs
    summed, batch = operation.params["dimension_numbers"]
    if _is_matrix_product(x, y, summed):
        return graph.add("MatMul", x, y, shape=operation.shape)

    summation = _write_summation(len(x.shape), len(y.shape), summed, batch)
    return graph.add(
        "Einsum",
        x,
        y,
        shape=operation.shape,
        equation=summation,
    )


def _is_matrix_product(x: Value, y: Value, summed: AxisPairs) -> bool:
    """Return True if y is a matrix, and its rows are summed with the last axis of x."""
    summed_x, summed_y = summed
    last_of_x = len(x.shape) - 1
    if len(y.shape) != 2:
        return False
    return tuple(summed_x) == (last_of_x,) and tuple(summed_y) == (0,)


def _write_summation(
    x_ndim: int,
    y_ndim: int,
    summed: AxisPairs,
    batch: AxisPairs,
) -> str:
    """Return an Einstein summation, such as "abc,adc->abd"; `batch` are the axes of batches."""
    shared_x = [*summed[0], *batch[0]]
    shared_y = [*summed[1], *batch[1]]

    # Each dimension has a letter; shared dimensions of y have those of x.
    x_letters = string.ascii_lowercase[:x_ndim]
    y_letters = list(string.ascii_lowercase[x_ndim : x_ndim + y_ndim])
    for x_axis, y_axis in zip(shared_x, shared_y, strict=True):
        y_letters[y_axis] = x_letters[x_axis]

    # The result has the batch dimensions, then the other ones of x, then those of y.
    result = select(x_letters, batch[0])
    result += _skip_letters(x_letters, shared_x)
    result += _skip_letters(y_letters, shared_y)
    return f"{x_letters},{''.join(y_letters)}->{''.join(result)}"


def _skip_letters(letters: Sequence[str], axes: Sequence[int]) -> list[str]:
    """Return the letters of all other axes."""
    return [letter for axis, letter in enumerate(letters) if axis not in axes]


def add_convolution(graph: Graph, operation: Operation) -> Value:
    """Add a convolution, whose arrays have other orders of axes in ONNX."""
    x, kernel = operation.inputs
    params = operation.params
    orders = params["dimension_numbers"]
    is_dilated = any(dilation != 1 for dilation in params["lhs_dilation"])
    if is_dilated or params["batch_group_count"] != 1:
        raise make_rejection("a transposed convolution")

    images = graph.transpose(x, orders.lhs_spec)
    kernels = graph.transpose(kernel, orders.rhs_spec)
    result = graph.add(
        "Conv",
        images,
        kernels,
        shape=select(operation.shape, orders.out_spec),
        strides=list(params["window_strides"]),
        dilations=list(params["rhs_dilation"]),
        group=params["feature_group_count"],
        pads=_order_pads(params["padding"]),
    )
    order_of_jax = np.argsort(orders.out_spec)
    return graph.transpose(result, order_of_jax.tolist())


def add_pooling(graph: Graph, operation: Operation) -> Value:
    """Add the maximum of windows of a map (B, H, W, C)."""
    (x,) = operation.inputs
    params = operation.params
    result = graph.add(
        "MaxPool",
        graph.transpose(x, _CHANNELS_FIRST),
        shape=select(operation.shape, _CHANNELS_FIRST),
        kernel_shape=list(params["window_dimensions"][1:3]),
        strides=list(params["window_strides"][1:3]),
        pads=_order_pads(params["padding"][1:3]),
    )
    return graph.transpose(result, _CHANNELS_LAST)


def _order_pads(padding: Sequence[tuple[int, int]]) -> list[int]:
    """Return all beginnings, then all ends, the order of ONNX."""
    beginnings = [begin for begin, _ in padding]
    ends = [end for _, end in padding]
    return beginnings + ends


ARRANGEMENTS: Mapping[str, AddNodes] = {
    "reshape": add_reshape,
    "squeeze": add_reshape,
    "transpose": add_transpose,
    **dict.fromkeys(_REDUCTIONS, add_reduction),
    "concatenate": add_concatenation,
    "stack": add_stack,
    "slice": add_slice,
    "rev": add_reversal,
    "gather": add_gather,
    "dot_general": add_product,
    "conv_general_dilated": add_convolution,
    "reduce_window_max": add_pooling,
}
