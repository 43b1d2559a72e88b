"""A traced program as an ONNX graph: the operations of our networks, and no others.

Values that do not depend on the images become constants; the loop over layers is unrolled, so that
every runtime can read the graph. `export.py` writes and checks files.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

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


Dimension = Any  # an int, or a symbolic dimension of JAX
Shape = Sequence[Dimension]
Equation = Any  # a `JaxprEqn`; JAX does not type the shapes of its values
Params = Mapping[str, Any]  # of an operation


class Tensor(NamedTuple):
    """Output of a node."""

    name: str
    shape: tuple[
        Dimension, ...
    ]  # with 1 where a variable repeats its values: ONNX broadcasts as NumPy does


Value = np.ndarray | Tensor


def to_onnx(
    program: Callable[[jax.Array], jax.Array], image_size: tuple[int, int]
) -> onnx.ModelProto:
    """Return the graph of a function from "images", uint8 (B, H, W, 3), any B, to "probabilities", float32 (B, K).

    Raises:
      ValueError: the function has an unsupported operation.
    """
    (batch,) = jax.export.symbolic_shape("batch")
    images = jax.ShapeDtypeStruct((batch, *image_size, 3), np.uint8)
    closed = jax.make_jaxpr(program)(images)
    graph = _Graph(Tensor("images", images.shape))
    (result,) = graph.run(closed.jaxpr, closed.consts, [graph.images])
    (output,) = closed.out_avals
    graph.add("Identity", graph.full(result, output.shape), name="probabilities")
    inputs, outputs = (
        helper.make_tensor_value_info(
            name, helper.np_dtype_to_tensor_dtype(aval.dtype), ["batch", *aval.shape[1:]]
        )
        for name, aval in (("images", images), ("probabilities", output))
    )
    proto = helper.make_graph(graph.nodes, "vit_jax", [inputs], [outputs], graph.initializers)
    opset = [helper.make_opsetid("", OPSET)]
    version = helper.find_min_ir_version_for(opset)  # so that older runtimes read it too
    return helper.make_model(
        proto, opset_imports=opset, ir_version=version, producer_name="vit_jax"
    )


class _Graph:
    """Nodes and constants, added in the order of the program."""

    def __init__(self, images: Tensor):
        self.nodes = list[onnx.NodeProto]()
        self.initializers = list[onnx.TensorProto]()
        self.images = images
        self.batch = images.shape[0]
        self._constants: dict[
            int, tuple[str, np.ndarray]
        ] = {}  # by identity; kept, so that identities are unique

    def add(
        self, kind: str, *inputs: Value, shape: Shape = (), name: str = "", **attributes: Any
    ) -> Tensor:
        name = name or f"{kind}_{len(self.nodes)}"
        self.nodes.append(
            helper.make_node(
                kind, [self._name(value) for value in inputs], [name], name, **attributes
            )
        )
        return Tensor(name, tuple(shape))

    def _name(self, value: Value) -> str:
        if isinstance(value, Tensor):
            return value.name
        if id(value) not in self._constants:
            name = f"constant_{len(self._constants)}"
            self.initializers.append(
                numpy_helper.from_array(np.ascontiguousarray(value).reshape(value.shape), name)
            )
            self._constants[id(value)] = name, value
        return self._constants[id(value)][0]

    def run(
        self, jaxpr: core.Jaxpr, constants: Sequence[Any], inputs: Sequence[Value]
    ) -> list[Value]:
        values: dict[core.Var, Value] = dict(
            zip(jaxpr.constvars, map(np.asarray, constants), strict=True)
        )
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
        name = equation.primitive.name
        params = equation.params
        shapes = [v.aval.shape for v in equation.invars]
        if inner := params.get("jaxpr") or params.get(
            "call_jaxpr"
        ):  # a function that is called, or the body of a loop
            body = getattr(inner, "jaxpr", inner)
            constants = getattr(inner, "consts", ())
            if name == "scan":
                return self._unroll(equation, body, constants, inputs)
            return self.run(body, constants, inputs)
        if name in _UNCHANGED:
            return inputs
        result = equation.outvars[0].aval
        if name == "broadcast_in_dim":
            sizes = dict(zip(params["broadcast_dimensions"], inputs[0].shape, strict=True))
            return [self._reshape(inputs[0], [sizes.get(axis, 1) for axis in range(result.ndim)])]
        is_fixed = all(type(size) is int for size in result.shape)
        if is_fixed and all(isinstance(x, np.ndarray) for x in inputs):
            arrays = [self.full(x, shape) for x, shape in zip(inputs, shapes, strict=True)]
            results = equation.primitive.bind(*arrays, **params)
            return [
                np.asarray(x)
                for x in (results if equation.primitive.multiple_results else [results])
            ]
        if (output := self._elementwise(name, inputs, params)) is not None:
            return [output]
        whole = [self.full(x, shape) for x, shape in zip(inputs, shapes, strict=True)]
        return [self._arranged(name, whole, result.shape, params)]

    def _unroll(
        self, equation: Equation, body: Any, constants: Sequence[Any], inputs: list[Value]
    ) -> list[Value]:
        """Unroll a loop over constants, such as the parameters of layers, that returns only its carry."""
        pairs = zip(equation.invars, body.invars, strict=True)
        first = sum(
            outside.aval.ndim == inside.aval.ndim for outside, inside in pairs
        )  # unstacked inputs are last
        carried = first - len(body.outvars)
        layers = [
            self.full(x, v.aval.shape)
            for x, v in zip(inputs[first:], equation.invars[first:], strict=True)
        ]
        kept = zip(equation.outvars, body.outvars, strict=True)
        if not all(isinstance(x, np.ndarray) for x in layers) or any(
            v.aval.ndim != w.aval.ndim for v, w in kept
        ):
            raise _unknown("a loop over activations")
        carry = inputs[carried:first]
        for number in range(equation.params["length"]):
            layer = [np.asarray(x[number]) for x in layers]
            carry = self.run(body, constants, [*inputs[:carried], *carry, *layer])
        return carry

    def _elementwise(self, name: str, inputs: list[Value], params: Params) -> Value | None:
        """Add an elementwise operation, which broadcasts its inputs; return None for another operation."""
        length = max(len(x.shape) for x in inputs)
        sizes = zip(*((1,) * (length - len(x.shape)) + x.shape for x in inputs), strict=True)
        shape = [next((d for d in dims if type(d) is not int or d != 1), 1) for dims in sizes]
        match name:
            case _ if name in _ELEMENTWISE:
                return self.add(_ELEMENTWISE[name], *inputs, shape=shape)
            case "square":
                return self.add("Mul", *inputs, *inputs, shape=shape)
            case "integer_pow":
                return self.add("Pow", *inputs, np.array(params["y"], np.float32), shape=shape)
            case "rsqrt":
                return self.add("Reciprocal", self.add("Sqrt", *inputs, shape=shape), shape=shape)
            case "erfc":
                return self.add(
                    "Sub",
                    np.ones((), np.float32),
                    self.add("Erf", *inputs, shape=shape),
                    shape=shape,
                )
            case "select_n":
                which, otherwise, chosen = inputs
                return self.add("Where", which, chosen, otherwise, shape=shape)
            case "convert_element_type":
                kind = helper.np_dtype_to_tensor_dtype(np.dtype(params["new_dtype"]))
                return self.add("Cast", *inputs, shape=shape, to=kind)
        return None

    def _arranged(self, name: str, inputs: list[Value], shape: Shape, params: Params) -> Value:
        """Add an operation that moves or joins values; its inputs have their full shape."""
        x = inputs[0]
        match name:
            case "reshape" | "squeeze":
                return self._reshape(x, shape)
            case "transpose":
                return self._turn(x, params["permutation"])
            case "reduce_sum" | "reduce_max":
                kind = "ReduceSum" if name == "reduce_sum" else "ReduceMax"
                return self.add(kind, x, np.array(params["axes"]), shape=shape, keepdims=0)
            case "concatenate":
                return self.add("Concat", *inputs, shape=shape, axis=params["dimension"])
            case "slice":
                steps = params["strides"] or [1] * len(shape)
                axes = [axis for axis, size in enumerate(shape) if type(size) is int]
                bounds = (
                    params["start_indices"],
                    params["limit_indices"],
                    range(len(shape)),
                    steps,
                )
                return self.add(
                    "Slice",
                    x,
                    *(np.array([ends[axis] for axis in axes]) for ends in bounds),
                    shape=shape,
                )
            case "gather":
                return self._cut(x, inputs[1], shape, **params)
            case "dot_general":
                return self._multiply(x, inputs[1], shape, params["dimension_numbers"])
            case "conv_general_dilated":
                return self._convolve(x, inputs[1], shape, **params)
            case "reduce_window_max":
                return self._pool(x, shape, **params)
        raise _unknown(name)

    # Parts of these operations.

    def full(self, value: Value, shape: Shape) -> Value:
        """Broadcast a value to a shape."""
        if value.shape == tuple(shape):
            return value
        if isinstance(value, np.ndarray) and all(type(size) is int for size in shape):
            return np.broadcast_to(value, shape)
        sizes = [np.array([d]) if type(d) is int else self._multiple_of_batch(d) for d in shape]
        return self.add("Expand", value, self.add("Concat", *sizes, axis=0), shape=shape)

    def _multiple_of_batch(self, size: Dimension) -> Tensor:
        batch = self.add("Shape", self.images, start=0, end=1)
        return (
            batch
            if size == self.batch
            else self.add("Mul", batch, np.array([int(size // self.batch)]))
        )

    def _reshape(self, x: Value, shape: Shape) -> Value:
        if x.shape == tuple(shape):
            return x
        if isinstance(x, np.ndarray):
            return x.reshape(shape)
        sizes = [size if type(size) is int else -1 for size in shape]
        return self.add("Reshape", x, np.array(sizes, np.int64), shape=shape)

    def _turn(self, x: Value, order: Sequence[int]) -> Value:
        if isinstance(x, np.ndarray):
            return x.transpose(order)
        return self.add("Transpose", x, shape=[x.shape[axis] for axis in order], perm=list(order))

    def _cut(
        self,
        x: Value,
        start: Value,
        shape: Shape,
        *,
        dimension_numbers: Any,
        slice_sizes: Any,
        **_: Any,
    ) -> Value:
        """Slice x at a constant place: JAX traces slices of arrays of unknown size as gather."""
        axes = dimension_numbers.start_index_map
        if not isinstance(start, np.ndarray) or start.shape != (len(axes),):
            raise _unknown("gather of several places")
        last = start + [slice_sizes[axis] for axis in axes]
        cut = self.add(
            "Slice",
            x,
            start.astype(np.int64),
            last.astype(np.int64),
            np.array(axes),
            shape=slice_sizes,
        )
        return self._reshape(cut, shape)

    def _multiply(self, x: Value, y: Value, shape: Shape, dimension_numbers: Any) -> Value:
        (summed_x, summed_y), (same_x, same_y) = dimension_numbers
        if len(y.shape) == 2 and tuple(summed_x) == (len(x.shape) - 1,) and tuple(summed_y) == (0,):
            return self.add("MatMul", x, y, shape=shape)
        letters = iter("abcdefghijklmnopqrstuvwxyz")
        of_x = [next(letters) for _ in x.shape]
        pairs = dict(zip([*summed_y, *same_y], [*summed_x, *same_x], strict=True))
        of_y = [
            of_x[pairs[axis]] if axis in pairs else next(letters) for axis in range(len(y.shape))
        ]
        result = [of_x[axis] for axis in same_x]
        result += [letter for axis, letter in enumerate(of_x) if axis not in {*summed_x, *same_x}]
        result += [letter for axis, letter in enumerate(of_y) if axis not in {*summed_y, *same_y}]
        words = f"{''.join(of_x)},{''.join(of_y)}->{''.join(result)}"
        return self.add("Einsum", x, y, shape=shape, equation=words)

    def _convolve(self, x: Value, kernel: Value, shape: Shape, **params: Any) -> Value:
        orders = params["dimension_numbers"]
        if any(d != 1 for d in params["lhs_dilation"]) or params["batch_group_count"] != 1:
            raise _unknown("a transposed convolution")
        images = self._turn(x, orders.lhs_spec)
        kernels = self._turn(kernel, orders.rhs_spec)
        result = self.add(
            "Conv",
            images,
            kernels,
            shape=[shape[axis] for axis in orders.out_spec],
            strides=list(params["window_strides"]),
            dilations=list(params["rhs_dilation"]),
            group=params["feature_group_count"],
            pads=_pads(params["padding"]),
        )
        return self._turn(result, np.argsort(orders.out_spec).tolist())

    def _pool(
        self,
        x: Value,
        shape: Shape,
        *,
        window_dimensions: Any,
        window_strides: Any,
        padding: Any,
        **_: Any,
    ) -> Value:
        """Return the maximum of windows of a map (B, H, W, C)."""
        order = (0, 3, 1, 2)
        result = self.add(
            "MaxPool",
            self._turn(x, order),
            shape=[shape[axis] for axis in order],
            kernel_shape=list(window_dimensions[1:3]),
            strides=list(window_strides[1:3]),
            pads=_pads(padding[1:3]),
        )
        return self._turn(result, (0, 2, 3, 1))


def _pads(padding: Sequence[tuple[int, int]]) -> list[int]:
    """Return all beginnings, then all ends, the order of ONNX."""
    return [pad[end] for end in (0, 1) for pad in padding]


def _unknown(operation: str) -> ValueError:
    return ValueError(
        f"--to=onnx: the network has an unsupported operation: {operation}. Use --to=stablehlo or --to=safetensors."
    )
