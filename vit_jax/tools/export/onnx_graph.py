"""A traced program as an ONNX graph: the operations of our networks, and no others.

Values that do not depend on the images become constants. The loop over layers is unrolled, so that
every runtime can read the graph. `programs.py` writes and checks files.
"""

import itertools
import string
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeGuard, cast

import jax
import numpy as np
import onnx
from jax.extend import core
from onnx import helper, numpy_helper

OPSET = 18  # the first in which every reduction takes its axes as an input
_UNCHANGED = ("name", "stop_gradient", "copy", "copy_p", "optimization_barrier")
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
_CHANNELS_FIRST = (0, 3, 1, 2)  # (B, H, W, C) to the order of ONNX
_CHANNELS_LAST = (0, 2, 3, 1)


Dimension = Any  # an int, or a symbolic dimension of JAX
Shape = Sequence[Dimension]
Equation = Any  # a `JaxprEqn`; JAX does not type the shapes of its values
Params = Mapping[str, Any]  # parameters of an operation


class Tensor(NamedTuple):
    """Output of a node.

    Its shape may have 1 where the value in JAX is repeated: ONNX broadcasts as NumPy does.
    """

    name: str
    shape: tuple[Dimension, ...]


Value = np.ndarray | Tensor


def to_onnx(
    program: Callable[[jax.Array], tuple[jax.Array, ...]],
    names: Sequence[str],
    images: jax.ShapeDtypeStruct,
) -> onnx.ModelProto:
    """Return the graph of a function.

    Args:
      program: maps "images", (B, H, W, C), any B, to arrays whose first dimension is B.
      names: names of the outputs, in their order.
      images: shape and dtype of the images, with a symbolic batch.

    Raises:
      ValueError: the function has an unsupported operation.
    """
    closed = jax.make_jaxpr(program)(images)

    graph = _Graph(Tensor("images", images.shape))
    results = graph.run(closed.jaxpr, closed.consts, [graph.images])
    outputs = []
    for name, result, output in zip(names, results, closed.out_avals, strict=True):
        graph.add("Identity", graph.broadcast(result, output.shape), name=name)
        outputs.append(_describe_tensor(name, output))

    proto = helper.make_graph(
        graph.nodes,
        "vit_jax",
        [_describe_tensor("images", images)],
        outputs,
        graph.initializers,
    )
    opset = [helper.make_opsetid("", OPSET)]
    version = helper.find_min_ir_version_for(opset)  # so that older runtimes can read it
    return helper.make_model(
        proto,
        opset_imports=opset,
        ir_version=version,
        producer_name="vit_jax",
    )


def _describe_tensor(name: str, array: Any) -> onnx.ValueInfoProto:
    """Return the description of an input or output, whose first dimension is the batch."""
    kind = helper.np_dtype_to_tensor_dtype(array.dtype)
    return helper.make_tensor_value_info(name, kind, ["batch", *array.shape[1:]])


class _Graph:
    """Nodes and constants, added in the order of the program."""

    def __init__(self, images: Tensor):
        self.nodes = list[onnx.NodeProto]()
        self.initializers = list[onnx.TensorProto]()
        self.images = images
        self.batch = images.shape[0]
        # Names of constants by identity. Arrays are kept, so that identities are unique.
        self._constants: dict[int, tuple[str, np.ndarray]] = {}

    def add(
        self,
        kind: str,
        *inputs: Value,
        shape: Shape = (),
        name: str = "",
        **attributes: Any,
    ) -> Tensor:
        """Add a node and return its output."""
        name = name or f"{kind}_{len(self.nodes)}"
        input_names = [self._find_name(value) for value in inputs]
        self.nodes.append(helper.make_node(kind, input_names, [name], name, **attributes))
        return Tensor(name, tuple(shape))

    def _find_name(self, value: Value) -> str:
        """Return the name of a tensor, or of a constant, which is added when it is new."""
        if isinstance(value, Tensor):
            return value.name
        if id(value) not in self._constants:
            name = f"constant_{len(self._constants)}"
            content = np.ascontiguousarray(value).reshape(value.shape)
            self.initializers.append(numpy_helper.from_array(content, name))
            self._constants[id(value)] = name, value
        return self._constants[id(value)][0]

    def run(
        self,
        jaxpr: core.Jaxpr,
        constants: Sequence[Any],
        inputs: Sequence[Value],
    ) -> list[Value]:
        """Add the equations of a program and return its outputs."""
        values = dict[core.Var, Value]()
        values |= zip(jaxpr.constvars, map(np.asarray, constants), strict=True)
        values |= zip(jaxpr.invars, inputs, strict=True)

        def read(variable: core.Var | core.Literal) -> Value:
            if isinstance(variable, core.Literal):
                return np.asarray(variable.val, cast(jax.core.ShapedArray, variable.aval).dtype)
            return values[variable]

        for equation in jaxpr.eqns:
            results = self._apply(equation, [read(variable) for variable in equation.invars])
            values |= zip(equation.outvars, results, strict=True)
        return [read(variable) for variable in jaxpr.outvars]

    def _apply(self, equation: Equation, inputs: list[Value]) -> list[Value]:
        """Add the nodes of an equation, or compute it if its inputs are constants."""
        name = equation.primitive.name
        params = equation.params
        inner = params.get("jaxpr") or params.get("call_jaxpr")
        if inner:
            return self._call(equation, inner, inputs)
        if name in _UNCHANGED:
            return inputs
        result = equation.outvars[0].aval
        if name == "broadcast_in_dim":
            return [self._insert_dimensions(inputs[0], result.ndim, params)]
        if _is_fixed(result.shape) and _are_constants(inputs):
            return self._compute(equation, inputs)
        output = self._add_elementwise(name, inputs, params)
        if output is None:
            complete = self._broadcast_all(inputs, equation.invars)
            output = self._add_arrangement(name, complete, result.shape, params)
        return [output]

    def _call(self, equation: Equation, inner: Any, inputs: list[Value]) -> list[Value]:
        """Add the equations of a called function, or of all iterations of a loop."""
        body = getattr(inner, "jaxpr", inner)
        constants = getattr(inner, "consts", ())
        if equation.primitive.name == "scan":
            return self._unroll(equation, body, constants, inputs)
        return self.run(body, constants, inputs)

    def _unroll(
        self,
        equation: Equation,
        body: Any,
        constants: Sequence[Any],
        inputs: list[Value],
    ) -> list[Value]:
        """Unroll a loop over constants, such as the parameters of layers.

        The inputs are the constants of the loop, the initial carry, and stacked arrays, of which
        each iteration takes a row. The loop may return only its carry.
        """
        num_unstacked = 0
        for outside, inside in zip(equation.invars, body.invars, strict=True):
            num_unstacked += outside.aval.ndim == inside.aval.ndim
        num_fixed = num_unstacked - len(body.outvars)
        stacked = self._broadcast_all(inputs[num_unstacked:], equation.invars[num_unstacked:])
        returns_stack = False
        for outside, inside in zip(equation.outvars, body.outvars, strict=True):
            returns_stack |= outside.aval.ndim != inside.aval.ndim
        if returns_stack or not _are_constants(stacked):
            raise _reject("a loop over activations")

        fixed = inputs[:num_fixed]
        carry = inputs[num_fixed:num_unstacked]
        for number in range(equation.params["length"]):
            layer = [np.asarray(array[number]) for array in stacked]
            carry = self.run(body, constants, [*fixed, *carry, *layer])
        return carry

    def _compute(self, equation: Equation, inputs: Sequence[Value]) -> list[Value]:
        """Return the constant results of an equation."""
        arrays = self._broadcast_all(inputs, equation.invars)
        results = equation.primitive.bind(*arrays, **equation.params)
        if not equation.primitive.multiple_results:
            results = [results]
        return [np.asarray(result) for result in results]

    def _add_elementwise(self, name: str, inputs: list[Value], params: Params) -> Value | None:
        """Add an elementwise operation, which broadcasts its inputs; return None for another operation."""
        shape = _broadcast_shapes([x.shape for x in inputs])
        if name in _ELEMENTWISE:
            return self.add(_ELEMENTWISE[name], *inputs, shape=shape)
        match name:
            case "square":
                return self.add("Mul", *inputs, *inputs, shape=shape)
            case "integer_pow":
                return self.add("Pow", *inputs, np.array(params["y"], np.float32), shape=shape)
            case "rsqrt":
                root = self.add("Sqrt", *inputs, shape=shape)
                return self.add("Reciprocal", root, shape=shape)
            case "erfc":
                one = np.ones((), np.float32)
                return self.add("Sub", one, self.add("Erf", *inputs, shape=shape), shape=shape)
            case "select_n":
                condition, if_false, if_true = inputs
                return self.add("Where", condition, if_true, if_false, shape=shape)
            case "convert_element_type":
                kind = helper.np_dtype_to_tensor_dtype(np.dtype(params["new_dtype"]))
                return self.add("Cast", *inputs, shape=shape, to=kind)
        return None

    def _add_arrangement(
        self,
        name: str,
        inputs: list[Value],
        shape: Shape,
        params: Params,
    ) -> Value:
        """Add an operation that moves or combines values; its inputs have their complete shape."""
        x = inputs[0]
        match name:
            case "reshape" | "squeeze":
                return self._reshape(x, shape)
            case "transpose":
                return self._transpose(x, params["permutation"])
            case "reduce_sum" | "reduce_max":
                kind = "ReduceSum" if name == "reduce_sum" else "ReduceMax"
                return self.add(kind, x, np.array(params["axes"]), shape=shape, keepdims=0)
            case "concatenate":
                return self.add("Concat", *inputs, shape=shape, axis=params["dimension"])
            case "stack":
                return self._stack(inputs, shape, params["axis"])
            case "slice":
                return self._slice(x, shape, params)
            case "gather":
                return self._slice_at(x, inputs[1], shape, params)
            case "dot_general":
                return self._multiply(x, inputs[1], shape, params["dimension_numbers"])
            case "conv_general_dilated":
                return self._convolve(x, inputs[1], shape, params)
            case "reduce_window_max":
                return self._pool(x, shape, params)
        raise _reject(name)

    # Parts of these operations.

    def broadcast(self, value: Value, shape: Shape) -> Value:
        """Broadcast a value to a shape."""
        if value.shape == tuple(shape):
            return value
        if isinstance(value, np.ndarray) and _is_fixed(shape):
            return np.broadcast_to(value, shape)
        sizes = []
        for size in shape:
            sizes.append(np.array([size]) if type(size) is int else self._multiple_of_batch(size))
        return self.add("Expand", value, self.add("Concat", *sizes, axis=0), shape=shape)

    def _broadcast_all(self, inputs: Sequence[Value], variables: Sequence[Any]) -> list[Value]:
        """Return the values of variables in the shapes that they have in JAX."""
        complete = []
        for value, variable in zip(inputs, variables, strict=True):
            complete.append(self.broadcast(value, variable.aval.shape))
        return complete

    def _multiple_of_batch(self, size: Dimension) -> Tensor:
        batch = self.add("Shape", self.images, start=0, end=1)
        if size == self.batch:
            return batch
        return self.add("Mul", batch, np.array([int(size // self.batch)]))

    def _insert_dimensions(self, x: Value, ndim: int, params: Params) -> Value:
        """Insert dimensions of 1; later operations broadcast them."""
        sizes = [1] * ndim
        for axis, size in zip(params["broadcast_dimensions"], x.shape, strict=True):
            sizes[axis] = size
        return self._reshape(x, sizes)

    def _reshape(self, x: Value, shape: Shape) -> Value:
        if x.shape == tuple(shape):
            return x
        if isinstance(x, np.ndarray):
            return x.reshape(shape)
        sizes = [size if type(size) is int else -1 for size in shape]
        return self.add("Reshape", x, np.array(sizes, np.int64), shape=shape)

    def _transpose(self, x: Value, order: Sequence[int]) -> Value:
        if isinstance(x, np.ndarray):
            return x.transpose(order)
        return self.add("Transpose", x, shape=_select(x.shape, order), perm=list(order))

    def _stack(self, inputs: Sequence[Value], shape: Shape, axis: int) -> Value:
        """Concatenate along a new axis."""
        part_shape = list(shape)
        part_shape[axis] = 1
        parts = [self._reshape(x, part_shape) for x in inputs]
        return self.add("Concat", *parts, shape=shape, axis=axis)

    def _slice(self, x: Value, shape: Shape, params: Params) -> Value:
        """Slice x along the axes of a fixed size."""
        axes = [axis for axis, size in enumerate(shape) if type(size) is int]
        strides = params["strides"] or [1] * len(shape)
        starts = np.array(_select(params["start_indices"], axes))
        limits = np.array(_select(params["limit_indices"], axes))
        steps = np.array(_select(strides, axes))
        return self.add("Slice", x, starts, limits, np.array(axes), steps, shape=shape)

    def _slice_at(self, x: Value, start: Value, shape: Shape, params: Params) -> Value:
        """Slice x at a constant index: JAX traces slices of arrays of unknown size as gather."""
        axes = params["dimension_numbers"].start_index_map
        slice_sizes = params["slice_sizes"]
        if not isinstance(start, np.ndarray) or start.shape != (len(axes),):
            raise _reject("gather of several places")
        starts = start.astype(np.int64)
        limits = (start + _select(slice_sizes, axes)).astype(np.int64)
        part = self.add("Slice", x, starts, limits, np.array(axes), shape=slice_sizes)
        return self._reshape(part, shape)

    def _multiply(self, x: Value, y: Value, shape: Shape, dimension_numbers: Any) -> Value:
        """Multiply two arrays: a product of matrices, or an Einstein summation."""
        (summed_x, summed_y), (batch_x, batch_y) = dimension_numbers
        x_ndim = len(x.shape)
        y_ndim = len(y.shape)
        if y_ndim == 2 and tuple(summed_x) == (x_ndim - 1,) and tuple(summed_y) == (0,):
            return self.add("MatMul", x, y, shape=shape)

        # Each dimension has a letter; summed and batch dimensions of y have those of x.
        x_axis_of_y = dict(zip([*summed_y, *batch_y], [*summed_x, *batch_x], strict=True))
        x_letters = string.ascii_lowercase[:x_ndim]
        new_letters = iter(string.ascii_lowercase[x_ndim:])
        y_letters = ""
        for axis in range(y_ndim):
            y_letters += x_letters[x_axis_of_y[axis]] if axis in x_axis_of_y else next(new_letters)

        # The result has the batch dimensions, then the other ones of x, then those of y.
        batch = "".join(_select(x_letters, batch_x))
        rest_of_x = _skip_letters(x_letters, [*summed_x, *batch_x])
        rest_of_y = _skip_letters(y_letters, [*summed_y, *batch_y])
        summation = f"{x_letters},{y_letters}->{batch}{rest_of_x}{rest_of_y}"
        return self.add("Einsum", x, y, shape=shape, equation=summation)

    def _convolve(self, x: Value, kernel: Value, shape: Shape, params: Params) -> Value:
        orders = params["dimension_numbers"]
        is_dilated = any(dilation != 1 for dilation in params["lhs_dilation"])
        if is_dilated or params["batch_group_count"] != 1:
            raise _reject("a transposed convolution")
        images = self._transpose(x, orders.lhs_spec)
        kernels = self._transpose(kernel, orders.rhs_spec)
        result = self.add(
            "Conv",
            images,
            kernels,
            shape=_select(shape, orders.out_spec),
            strides=list(params["window_strides"]),
            dilations=list(params["rhs_dilation"]),
            group=params["feature_group_count"],
            pads=_order_pads(params["padding"]),
        )
        return self._transpose(result, np.argsort(orders.out_spec).tolist())

    def _pool(self, x: Value, shape: Shape, params: Params) -> Value:
        """Return the maximum of windows of a map (B, H, W, C)."""
        result = self.add(
            "MaxPool",
            self._transpose(x, _CHANNELS_FIRST),
            shape=_select(shape, _CHANNELS_FIRST),
            kernel_shape=list(params["window_dimensions"][1:3]),
            strides=list(params["window_strides"][1:3]),
            pads=_order_pads(params["padding"][1:3]),
        )
        return self._transpose(result, _CHANNELS_LAST)


def _select(values: Sequence[Any], axes: Sequence[int]) -> list[Any]:
    """Return the values of some axes, in their order."""
    return [values[axis] for axis in axes]


def _is_fixed(shape: Shape) -> bool:
    """Return True if no dimension depends on the batch."""
    return all(type(size) is int for size in shape)


def _are_constants(values: Sequence[Value]) -> TypeGuard[Sequence[np.ndarray]]:
    return all(isinstance(value, np.ndarray) for value in values)


def _broadcast_shapes(shapes: Sequence[Shape]) -> list[Dimension]:
    """Return the shape of an elementwise result, as NumPy does, also of symbolic dimensions."""
    reversed_shapes = [reversed(shape) for shape in shapes]
    result = []
    for sizes in itertools.zip_longest(*reversed_shapes, fillvalue=1):
        repeated = [size for size in sizes if type(size) is not int or size != 1]
        result.append(repeated[0] if repeated else 1)
    return result[::-1]


def _skip_letters(letters: str, axes: Sequence[int]) -> str:
    """Return the letters of all other axes."""
    return "".join(letter for axis, letter in enumerate(letters) if axis not in axes)


def _order_pads(padding: Sequence[tuple[int, int]]) -> list[int]:
    """Return all beginnings, then all ends, the order of ONNX."""
    beginnings = [begin for begin, _ in padding]
    ends = [end for _, end in padding]
    return beginnings + ends


def _reject(operation: str) -> ValueError:
    return ValueError(
        f"--to=onnx: the network has an unsupported operation: {operation}. "
        "Use --to=stablehlo or --to=safetensors."
    )
